"""Other model families: the full cache against the stock model, and what each family asks of the engine."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import step
from kvbench.cache.rotary import rotate_back
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseSlots, DenseStore, Store
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.recompute import Recompute
from kvbench.methods.streaming_llm import StreamingLLM
from tests.shared.families import COMMON, FAMILIES, HAS_WINDOW, random_ids, tiny

pytestmark = pytest.mark.engine

PROMPT, TOTAL = 24, 70
RUNS = [name for name in FAMILIES if name != "falcon"]
LEARNED = ["gpt2", "gpt2-scaled", "opt"]
LENGTH_BOUND = ["llama-dynamic", "phi3-longrope"]


def stock_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model as transformers runs it, eager attention, no cache: [B, T, V]."""
    model.set_attn_implementation("eager")
    return model(input_ids=ids, use_cache=False).logits


def decoded(model: PreTrainedModel, ids: Tensor, rule: KeepRule, store: Store, q: int = 1) -> tuple[Tensor, object]:
    """Logits [B, T - PROMPT + 1, V] from the last prompt token on, fed q at a time; and the cache."""
    cache = build_cache(model, Method("m", rule, store), ids[:, :PROMPT], ids.shape[1] - PROMPT, max_step=q)
    out = [cache.last_logits[:, None]]
    for at in range(PROMPT, ids.shape[1], q):
        out.append(step(model, ids[:, at : at + q], cache, logits_to_keep=0))
    return torch.cat(out, dim=1), cache


@pytest.mark.parametrize("name", RUNS)
def test_full_equals_the_stock_model(name: str) -> None:
    """46 single steps, and 23 of two tokens: within 1e-5 of the largest logit. h2o with a budget that is never
    exceeded gives the same."""
    model, ids = tiny(name), random_ids(2, TOTAL)
    want = stock_logits(model, ids)[:, PROMPT - 1 :]
    tolerance = 1e-5 * want.abs().max().item()
    for rule, q in ((Full(), 1), (Full(), 2), (H2O(budget=TOTAL), 1)):
        got, cache = decoded(model, ids, rule, DenseStore(), q)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
        assert not cache.has_compressed and cache.kept_tokens in (TOTAL, 15)


@pytest.mark.parametrize("name", RUNS)
def test_recompute_equals_the_stock_model(name: str) -> None:
    """Plain tensors through the attention function: windows, soft caps and sinks hold there as well."""
    model, ids = tiny(name), random_ids(2, PROMPT + 6)
    want = stock_logits(model, ids)[:, PROMPT - 1 :]
    got, _ = decoded(model, ids, Recompute(), DenseStore(), 2)
    torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", HAS_WINDOW)
@pytest.mark.parametrize("prompt", [5, 16, 40])
def test_decoding_beyond_a_models_window_equals_the_stock_model(name: str, prompt: int) -> None:
    """A window of 16 keeps 15 tokens between steps, and three more during one of three tokens."""
    model, ids = tiny(name), random_ids(1, 61)
    want = stock_logits(model, ids)
    cache = build_cache(model, Method("full", Full(), DenseStore()), ids[:, :prompt], 60, max_step=3)
    for at in range(prompt, 59, 3):
        got = step(model, ids[:, at : at + 3], cache, logits_to_keep=0)
        tolerance = 1e-5 * want.abs().max().item()
        torch.testing.assert_close(got, want[:, at : at + 3], atol=tolerance, rtol=0)
    assert not cache.has_compressed


@pytest.mark.parametrize("name", HAS_WINDOW)
@pytest.mark.parametrize(
    ("rule", "store"), [(H2O(budget=10), DenseStore()), (Full(), Kivi(2, 2, 8, 8))], ids=["h2o", "kivi"]
)
def test_window_layers_stay_bounded_and_out_of_the_methods_hands(name: str, rule: KeepRule, store: Store) -> None:
    """Dense, the last 15 positions, in every head; the method applies to the other layers, and only they count."""
    model, ids = tiny(name), random_ids(2, 60)
    prompt = 12
    cache = build_cache(model, Method("m", rule, store), ids[:, :prompt], 60)
    windowed = [layer for layer in cache.layers if layer not in cache.compressible]
    assert len(windowed) == (2 if name == "mistral-window" else 1)
    for at in range(prompt, 60):
        step(model, ids[:, at : at + 1], cache)
        for layer in windowed:
            assert isinstance(layer.slots, DenseSlots) and layer.capacity == 15 + 1
            assert (layer.kept_positions() == torch.arange(max(0, at + 1 - 15), at + 1)).all()
    for layer in cache.compressible:
        assert layer.kept == (10 if isinstance(rule, H2O) else 60)
        assert layer.has_compressed
    assert cache.has_compressed == bool(cache.compressible)
    if cache.compressible:
        assert cache.kept_tokens == cache.compressible[0].kept


@pytest.mark.parametrize("name", LEARNED + LENGTH_BOUND)
def test_in_cache_positions_are_refused_where_a_rotation_cannot_be_taken_back(name: str) -> None:
    model, ids = tiny(name), random_ids(1, 60)
    with pytest.raises(UserError, match="type variant=absolute") as error:
        build_cache(model, Method("streaming_llm", StreamingLLM(budget=20), DenseStore()), ids[:, :30])
    assert type(model).__name__ in str(error.value) and "\n" not in str(error.value)
    rule = StreamingLLM(budget=20, variant="absolute")
    got, cache = decoded(model, ids, rule, DenseStore())
    assert got.isfinite().all() and cache.kept_tokens == 20


ROTATED = [name for name in RUNS if name not in LEARNED + LENGTH_BOUND and name not in HAS_WINDOW]
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize("name", [*ROTATED, "gemma3", "gemma2", "gpt-oss"])
def test_in_cache_positions_equal_a_stock_forward_over_the_kept_tokens(name: str) -> None:
    """With one layer, keys depend on their token and place alone. So a step with positions inside the cache
    equals the stock model on [sinks, window, new token] written one after another, in every kind of embedding."""
    full = {"layer_types": ["full_attention"]} if name in ("gemma3", "gemma2", "gpt-oss") else {}
    model, ids = tiny(name, **ONE_LAYER, **full), random_ids(2, 100)
    rule = StreamingLLM(budget=14, n_sink=3)
    cache = build_cache(model, Method("streaming_llm", rule, DenseStore()), ids[:, :40], 60)
    for at in range(40, 100, 4):
        for token in range(at, at + 4):
            got = step(model, ids[:, token : token + 1], cache)[:, -1]
        kept = torch.cat([ids[:, :3], ids[:, at + 3 - 11 : at + 4]], dim=1)
        want = stock_logits(model, kept)[:, -1]
        torch.testing.assert_close(got, want, atol=3e-4, rtol=0)


@pytest.mark.parametrize("name", [*ROTATED, "gemma3", "gpt-oss"])
def test_rotating_back_gives_the_query_of_an_earlier_position(name: str) -> None:
    """The model's own embedding and rotation at p, taken back by e, against p - e, layer by layer. Attention
    scaling (yarn) must not be applied a second time."""
    model = tiny(name)
    embed = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = torch.randn(1, 4, 2, dim, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        back = rotate_back(model, layer)
        extra = () if name != "gemma3" else (config.layer_types[layer],)

        def at(p: int, extra: tuple[str, ...] = extra, back: object = back) -> Tensor:
            cos, sin = embed(query, torch.tensor([[p, p + 1]]), *extra)
            return back.apply(query, query, cos, sin)[0]

        for p, e in ((7, 3), (300, 1), (300, 299), (411, 200)):
            torch.testing.assert_close(back(at(p), e), at(p - e), atol=2e-4, rtol=0)
        assert (back(at(300), 150) - at(300)).abs().max() > 0.1


@pytest.mark.parametrize(("family", "channels"), [("Phi", 8), ("StableLm", 4), ("Persimmon", 8)])
def test_partial_rotary_embeddings_are_named_where_they_cannot_be_taken_off(family: str, channels: int) -> None:
    config = getattr(transformers, f"{family}Config")(**COMMON | {"num_key_value_heads": 4})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    line = rf"{family}ForCausalLM has partial rotary embeddings \({channels} of 16 channels\), .* variant=absolute"
    with pytest.raises(UserError, match=line):
        rotate_back(model, 0)


def test_gemma3_layers_have_rotations_of_their_own() -> None:
    model = tiny(
        "gemma3",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
        },
    )
    query = torch.ones(1, 1, 1, 16)
    first, second = (rotate_back(model, layer)(query, 40) for layer in range(2))
    assert (first - second).abs().max() > 0.1


def test_a_family_without_the_attention_interface_is_refused_by_name() -> None:
    model, ids = tiny("falcon", attention="sdpa"), random_ids(1, 10)
    method = Method("full", Full(), DenseStore())
    for attempt in (lambda: prefill(model, ids), lambda: build_cache(model, method, ids)):
        with pytest.raises(UserError, match="FalconForCausalLM .* choose another family") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=ids).logits.isfinite().all()
