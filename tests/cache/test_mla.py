"""Multi-head latent attention: every layout gives what the stock model gives, and takes the bytes it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from kvbench.cache.build import Method, build_cache, check_model, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import step
from kvbench.cache.hadamard import hadamard
from kvbench.cache.mla import LatentStore, latents_of
from kvbench.cache.observe import ColumnSums
from kvbench.cache.record import RecordLayer
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, SlotShape, Store
from kvbench.check.__main__ import main as check
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.kernels.cpu_parts import pack_parts
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.keydiff import KeyDiff
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.lagkv import LagKV
from kvbench.methods.per_token import PerToken
from kvbench.methods.r_kv import RKV
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from kvbench.models.shape import shape_of
from kvbench.results.loading import load
from tests.shared.reference import along_channels, attention_matrix, attention_output
from tests.shared.text import light

RANK, ROPE, NOPE, VALUE, HEADS, LAYERS = 32, 16, 24, 40, 4, 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
DENSE = {
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def deepseek(
    version: int = 3,
    layout: str | None = None,
    yarn: bool = False,
    query_rank: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """A small DeepSeek with random weights, without experts."""
    config_class, model_class = {
        2: (DeepseekV2Config, DeepseekV2ForCausalLM),
        3: (DeepseekV3Config, DeepseekV3ForCausalLM),
    }[version]
    rope = YARN if yarn else PLAIN
    config = config_class(**SIZES, **DENSE, q_lora_rank=query_rank, rope_parameters=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        model = model_class(config)
    if layout is not None:
        model.config.mla_layout = layout
    return model.to(dtype).eval().requires_grad_(False)


def random_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def stock_logits(model: Any, ids: Tensor) -> Tensor:
    """[B, T, V] from transformers' own attention, without a cache."""
    model.set_attn_implementation("sdpa")  # eager takes its softmax in float32
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@contextmanager
def attended(model: Any) -> Iterator[list[Tensor]]:
    """What the first layer's attention gives, forward by forward: norms behind it round to float32."""
    outputs: list[Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    yield outputs
    hook.remove()


@pytest.mark.parametrize("layout", ["expand", "latent", "absorbed"])
@pytest.mark.parametrize("query_rank", [None, 20])
@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_every_layout_is_exact(version: int, yarn: bool, query_rank: int | None, layout: str) -> None:
    model = deepseek(version, layout, yarn, query_rank)
    ids = random_ids(2, 60)
    with attended(model) as stock:
        want = stock_logits(model, ids)
    with attended(model) as ours:
        record = prefill(model, ids[:, :40])
        cache = build_cache(model, Method("full", Full(), DenseStore()), record, max_new_tokens=20, max_step=5)
        got = [record.logits.unsqueeze(1), step(model, ids[:, 40:45], cache, logits_to_keep=0)]
        got += [step(model, ids[:, t : t + 1], cache) for t in range(45, 60)]
    assert (torch.cat(ours, dim=1) - stock[0]).abs().max() < 1e-12
    assert (torch.cat(got, dim=1) - want[:, 39:]).abs().max() < 1e-12
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)


@pytest.mark.parametrize("family", ["youtu", "minicpm3"])
def test_families_that_attend_as_deepseek_does(family: str) -> None:
    settings = {**SIZES, "q_lora_rank": 24}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    ids = random_ids(2, 40)
    want = stock_logits(model, ids)
    for layout in ("absorbed", "latent", "expand"):
        model.config.mla_layout = layout
        _, got = decoded(model, Method("full", Full(), DenseStore()), ids, 30)
        assert (got - want[:, 30:]).abs().max() < 1e-12


def test_sparse_latent_attention_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32", **SIZES, **DENSE, q_lora_rank=24))
    with pytest.raises(UserError, match="DeepseekV32"):
        check_model(model, Full())


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [("expand", HEADS * (NOPE + ROPE + VALUE)), ("latent", RANK + ROPE), ("absorbed", RANK + ROPE)],
)
def test_bytes_are_those_of_the_layout(layout: str, numbers: int) -> None:
    """Latents are cached once, not as key and as value."""
    model = deepseek(layout=layout, dtype=torch.float32)
    record = prefill(model, random_ids(1, 30))
    assert [layer.token_numbers for layer in record.layers] == [numbers] * LAYERS
    cache = build_cache(model, Method("full", Full(), DenseStore()), record, max_new_tokens=10)
    held = held_bytes(cache.buffers())
    assert held.parts["dense"] == 4 * LAYERS * 40 * numbers and held.parts["positions"] == 4 * LAYERS * 40


def test_published_sizes_take_576_numbers_a_token() -> None:
    config = DeepseekV2Config(num_attention_heads=128)  # V2: 512 + 64, against 128 heads of 192 + 128
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576
    for layout, heads, head_dim in (("absorbed", 1, 512), ("latent", 1, 512), ("expand", 128, 192)):
        config.mla_layout = layout
        shape = shape_of(config)
        assert (shape.arch, shape.kv_heads, shape.head_dim, shape.mla) == ("mla", heads, head_dim, layout)


def test_absorbed_decode_makes_no_heads() -> None:
    """No tensor of a step holds a key or value for each head of every cached token."""
    model, prompt = deepseek(dtype=torch.float32), 300
    cache = build_cache(model, Method("full", Full(), DenseStore()), random_ids(1, prompt), 4, kernel="cpu")
    with LargestTensor() as largest:
        step(model, random_ids(1, 1), cache)
    assert largest.numbers < prompt * HEADS * min(NOPE, VALUE)
    model.config.mla_layout = "latent"
    cache = build_cache(model, Method("full", Full(), DenseStore()), random_ids(1, prompt), 4, kernel="cpu")
    with LargestTensor() as largest:
        step(model, random_ids(1, 1), cache)
    assert largest.numbers >= prompt * HEADS * (NOPE + ROPE)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any new tensor had inside the block; slots that were there before do not count."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.numbers = max(self.numbers, out.numel())
        return out


def decoded(model: Any, method: Method, ids: Tensor, prompt: int, kernel: str = "auto") -> tuple[KVCache, Tensor]:
    """The cache after feeding ids behind a prompt one by one, and the logits [B, n, V]."""
    cache = build_cache(model, method, ids[:, :prompt], ids.shape[1] - prompt, kernel=kernel)
    assert isinstance(cache, KVCache)
    return cache, torch.cat([step(model, ids[:, t : t + 1], cache) for t in range(prompt, ids.shape[1])], dim=1)


STORES = {
    "int8": PerToken(8, 8, 16),
    "int4": PerToken(4, 4, 16),
    "rot4": PerToken(4, 4, 16, rotate=True),
    "rot3": PerToken(3, 3, 32),
    "fp16": DenseStore("float16"),
}


@pytest.mark.parametrize("name", STORES)
def test_stored_latents_against_explicit_attention(name: str) -> None:
    """The first layer's output with each token's latent encoded and decoded, its rotated key rounded to 16 bits."""
    model, store = deepseek(yarn=True), STORES[name]
    ids, prompt = random_ids(1, 30), 29
    record = prefill(model, ids)
    key = record.layers[0].key
    latent, rotated = key[..., :RANK], key[..., RANK:].half().double()
    if isinstance(store, PerToken):
        turned = hadamard(latent) if store.rotate else latent
        held = along_channels(turned, store.k_bits, store.group_size)
        held = hadamard(held) if store.rotate else held
    else:
        held = latent.half().double()
    attention = model.model.layers[0].self_attn
    keys, values = attention.expand_kv(held, rotated)
    with queries(model) as seen:
        prefill(model, ids)
    p = attention_matrix(seen[0][:, :, -1:], keys, torch.ones(1, 30, dtype=torch.bool), attention.scaling)
    want = attention.o_proj(attention_output(p, values).transpose(1, 2).flatten(2))
    for layout in ("absorbed", "latent"):
        model.config.mla_layout = layout
        with attended(model) as outputs:
            cache, _ = decoded(model, Method(name, Full(), store), ids, prompt)
        assert (outputs[-1] - want).abs().max() < 1e-9, layout
        assert cache.has_compressed


RULES: dict[str, KeepRule] = {
    "h2o": H2O(budget=16),
    "snapkv": SnapKV(budget=16, window=8),
    "tova": Tova(budget=16),
    "knorm": KNorm(budget=16),
    "random": Random(budget=16),
    "streaming_llm": StreamingLLM(budget=16, variant="absolute"),
    "keydiff": KeyDiff(budget=16),
    "keydiff, evicting": KeyDiff(budget=16, buffer=3, decode="evict"),
    "lagkv, evicting": LagKV(budget=16, n_sink=2, block=5, decode="evict"),
    "r_kv": RKV(budget=16, buffer=5),
}


@pytest.mark.parametrize("store", [DenseStore(), PerToken(8, 8, 16)], ids=["dense", "int8"])
@pytest.mark.parametrize("name", RULES)
def test_rules_decide_alike_in_both_latent_layouts(name: str, store: Store) -> None:
    """One decision for all heads, whether probabilities come over the latents or over heads made of them."""
    ids, found = random_ids(2, 50), []
    for layout in ("absorbed", "latent"):
        model = deepseek(layout=layout)
        cache, logits = decoded(model, Method(name, RULES[name], store), ids, 40)
        found.append((logits, *(layer.kept_positions() for layer in cache.layers)))
        assert cache.layers[0].position.shape[1] == 1
    assert (found[0][0] - found[1][0]).abs().max() < 1e-9
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0][1:], found[1][1:], strict=True))


def test_scores_of_a_latent_are_sums_over_all_heads() -> None:
    """H2O's column sums over absorbed keys are those over the expanded ones, summed over the heads."""
    sums = []
    for layout in ("absorbed", "expand"):
        record = prefill(deepseek(layout=layout, yarn=True), random_ids(2, 40), [H2O(budget=8)])
        sums.append([layer.observed[ColumnSums()] for layer in record.layers])
    for absorbed, expanded in zip(*sums, strict=True):
        assert absorbed.shape[1] == 1 and expanded.shape[1] == HEADS
        torch.testing.assert_close(absorbed, expanded.sum(1, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layout", "method", "answer"),
    [
        ("absorbed", Method("kivi", Full(), Kivi(4, 4, 16, 32)), "store=dense, int8, int4"),
        ("latent", Method("kivi", Full(), Kivi(4, 4, 16, 32)), "model.mla=expand"),
        ("absorbed", Method("streaming_llm", StreamingLLM(budget=16), DenseStore()), "variant=absolute"),
        ("expand", Method("streaming_llm", StreamingLLM(budget=16), DenseStore()), "variant=absolute"),
        ("absorbed", Method("int4", Full(), PerToken(4, 4, 24)), "group=16"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(layout: str, method: Method, answer: str) -> None:
    with pytest.raises(UserError, match=answer):
        build_cache(deepseek(layout=layout), method, random_ids(1, 40), 4)


def test_expanded_heads_take_every_store() -> None:
    cache, _ = decoded(deepseek(layout="expand"), Method("kivi", Full(), Kivi(4, 4, 8, 16)), random_ids(1, 50), 40)
    assert cache.has_compressed and cache.layers[0].position.shape[1] in (1, HEADS)


def test_without_a_cache_the_stock_expansion_runs() -> None:
    model, ids = deepseek(), random_ids(1, 20)
    want = stock_logits(model, ids)
    cache = build_cache(model, Method("recompute", Recompute(), DenseStore()), ids[:, :19], 1)
    assert (step(model, ids[:, 19:], cache) - want[:, 19:]).abs().max() < 1e-12


def test_the_compiled_kernel_reads_latents_as_they_lie() -> None:
    model, ids = deepseek(dtype=torch.float32, yarn=True), random_ids(2, 50)
    for store in (DenseStore(), PerToken(4, 4, 16)):
        method = Method("h2o", H2O(budget=30), store)
        runs = [decoded(model, method, ids, 40, kernel) for kernel in ("cpu", "reference")]
        torch.testing.assert_close(runs[0][1], runs[1][1], atol=2e-4, rtol=0)
        slots = runs[0][0].layers[0].slots
        query = slots.transform_query(torch.randn(2, HEADS, 1, NOPE + ROPE))
        assert pack_parts(query, slots.key_parts(), slots.value_parts()) is not None


@contextmanager
def queries(model: Any) -> Iterator[list[Tensor]]:
    """The first layer's query [B, H, T, nope + rope], as its attention function gets it."""
    found: list[Tensor] = []

    class Listening(RecordLayer):
        def attend(self, query: Tensor, scoring: Any) -> Tensor:
            found.append(query)
            return super().attend(query, scoring)

    with (
        mock.patch("kvbench.cache.record.RecordLayer", Listening),
        mock.patch("kvbench.cache.prefill.RecordLayer", Listening),
    ):
        yield found


@pytest.mark.parametrize("store", [DenseStore(), DenseStore("float16"), PerToken(8, 8, 16), PerToken(4, 4, 16)])
def test_bytes_by_formula_are_those_held(store: Store) -> None:
    """The formula sums over what is stored: codes and pairs of the latent, the rotated key beside them."""
    model = deepseek(dtype=torch.float32)
    cache = build_cache(model, Method("x", Full(), store), random_ids(2, 30), 10)
    shape = SlotShape(2, 1, RANK + ROPE, RANK, 40, 1, torch.float32, torch.device("cpu"))
    ways = latents_of(model)
    assert ways is not None and isinstance(cache, KVCache)
    planned = LatentStore(store, ways[0]).planned_bytes(shape)
    assert [held_bytes(layer.slots.buffers(40)).held for layer in cache.layers] == [planned] * LAYERS
    if isinstance(store, PerToken):
        assert planned == 80 * (RANK * store.k_bits // 8 + RANK // 16 * 4 + 2 * ROPE)


def test_rows_name_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=random-deepseek", "data=random", "measure=[memory]", "memory.contexts=[40]", "memory.tokens=2"]
    with light():
        for layout in ("absorbed", "expand"):
            assert main([*words, f"model.mla={layout}"]) == 0
        assert main([*words, "store=kivi4"]) == main([*words, "method=streaming_llm", "budget=16"]) == 2
    frame = load("results").drop_duplicates("run").set_index("kv_heads")
    assert set(frame["arch"]) == {"mla"} and set(frame.index) == {1, 4}
    assert json.loads(frame.loc[1, "knobs"])["mla"] == "absorbed"
    assert json.loads(frame.loc[4, "knobs"])["mla"] == "expand"


@pytest.mark.parametrize("layout", ["absorbed", "expand"])
def test_the_identities_hold(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Evicting equals masking the whole history, prompts leave each other alone, and the rest of kvbench.check."""
    assert check(["model=random-deepseek", f"model.mla={layout}", "data=random", "compare=[h2o]", "budget=64"]) == 0
    assert "evicting equals masking" in capsys.readouterr().out
