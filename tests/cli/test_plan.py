"""kvbench.plan: the textbook's numbers, what caches really take, and one line for what cannot be planned."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.rule import KeepRule
from kvbench.cache.size import Planned, cache_bytes, largest_batch
from kvbench.cache.store import DenseStore
from kvbench.cli.plan import config_of, main, planned_model, planned_shape, weight_bytes
from kvbench.config import method_config
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.measures.memory import Memory
from kvbench.measures.memory.cache_bytes import measure_bytes
from kvbench.method_runs import instantiate
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.models.checkpoint import model_spec
from kvbench.models.known_configs import PUBLISHED
from kvbench.models.load import load_model
from kvbench.models.shape import layer_windows
from tests.cache.test_mla import deepseek
from tests.shared.families import random_ids, tiny
from tests.shared.models import random_llama
from tests.shared.text import character_tokenizer, rows_of, run_context_of, value

MIB = 2**20


def published(name: str) -> Planned:
    spec = model_spec({"id": name, "device": "cpu"})
    config = config_of(spec)
    return planned_model(spec, config, planned_shape(spec, config))


def test_the_textbook() -> None:
    """32 layers of heads of 128 in 16 bits: 8 KV heads and 4,096 tokens take 512 MiB; 32 take 524,288 bytes a token."""
    gqa, mha = published("meta-llama/Llama-3.1-8B"), published("meta-llama/Llama-2-7b-hf")
    assert gqa.full_bytes(1, 4096) == 512 * MIB
    assert mha.full_bytes(1, 1) == 524_288
    assert 100_000 * mha.full_bytes(1, 1) == pytest.approx(50e9, rel=0.05)
    mqa = Planned(1, 128, 128, mha.windows, mha.dtype)
    assert mha.full_bytes(1, 1000) == 32 * mqa.full_bytes(1, 1000) == 4 * gqa.full_bytes(1, 1000)
    latent = Planned(1, 512, 512, [None], torch.float16, latent=True)
    heads = Planned(32, 128, 128, [None], torch.float16)
    assert heads.full_bytes(1, 1) == 16 * latent.full_bytes(1, 1)
    lite = published("deepseek-ai/DeepSeek-V2-Lite")
    assert lite.full_bytes(1, 1) == 27 * 576 * 2
    assert largest_batch(Method("full", Full(), DenseStore()), gqa, 4096, 0, 5 * 512 * MIB) == 4  # positions take some


def test_every_published_model_is_planned_offline() -> None:
    bounded = {name: sum(w is not None for w in published(name).windows) for name in PUBLISHED}
    assert bounded["google/gemma-3-1b-pt"] == 22 and bounded["google/gemma-2-2b"] == 13
    assert not any(bounded[name] for name in bounded if not name.startswith("google/"))
    ids = {BUILT_IN.composed([f"model={name}"]).model.id for name in BUILT_IN.files("model")}
    assert set(PUBLISHED) == ids - {None}


def measured(model: PreTrainedModel, method: Method, ids: torch.Tensor, new: int) -> int:
    record = prefill(model, ids, [method.rule])
    return held_bytes(build_cache(model, method, record, max_new_tokens=new).buffers()).held


def of(model: PreTrainedModel) -> Planned:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    windows, queries = layer_windows(config), config.num_attention_heads
    return Planned(heads, head, head, windows, model.dtype, query_heads=queries)


def every_method() -> dict[str, Method]:
    """Each rule with a dense store and with int4 where single slots are needed, and each store with every token."""
    found = {}
    # A low-rank basis is made from weights; hf_* are transformers' own caches, with other dependencies.
    for store in (name for name in BUILT_IN.files("store") if name != "lowrank" and not name.startswith("hf_")):
        found[f"full+{store}"] = ["budget=null", "method=full", f"store={store}", "residual=32"]
    others = ("full", "recompute", "kivi", "adakv", "kvzip", "duo", "hf_")  # heads of three hold whole blocks
    for name in (name for name in BUILT_IN.files("method") if not name.startswith(others)):
        budget = "budget=270" if name == "lagkv" else "budget=64"
        for store in ("dense", "int4"):
            found[f"{name}+{store}"] = [budget, f"method={name}", f"store={store}"]
    return {label: instantiate(method_config(BUILT_IN.composed(words))) for label, words in found.items()}


def test_planned_bytes_are_what_caches_hold() -> None:
    model = random_llama(4, 2, 32, dtype=torch.float32)
    ids = random_ids(2, 300)
    methods = every_method()
    assert {"full+kivi2", "full+paged", "h2o+int4", "tova+dense", "snapkv+int4"} <= set(methods)
    for label, method in methods.items():
        planned = cache_bytes(method, of(model), 2, 300, 24)
        assert measured(model, method, ids, 24) == pytest.approx(planned, rel=0.01), label


@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "qwen3"])
@pytest.mark.parametrize(
    ("rule", "store"),
    [(Full(), DenseStore()), (H2O(budget=20), DenseStore()), (Full(), Kivi(4, 4, 8, 8))],
    ids=["full", "h2o", "kivi"],
)
def test_windows_are_planned_as_they_are_held(family: str, rule: KeepRule, store: DenseStore | Kivi) -> None:
    model, method = tiny(family), Method("m", rule, store)
    assert measured(model, method, random_ids(2, 60), 8) == cache_bytes(method, of(model), 2, 60, 8)


def test_a_budget_by_depth_counts_the_layers_that_it_is_of() -> None:
    """Six layers, three of them bounded already: over the other three the mean is the budget, planned and held."""
    model = tiny(
        "gemma3",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]
        + ["full_attention", "sliding_attention", "full_attention"],
    )
    method, ids = Method("pyramid", Pyramid(budget=28, window=8), DenseStore()), random_ids(2, 100)
    cache = build_cache(model, method, prefill(model, ids, [method.rule]), max_new_tokens=4)
    assert [layer.kept for layer in cache.compressible] == [8 + 39, 8 + 20, 8 + 1] and cache.kept_tokens == 28
    assert held_bytes(cache.buffers()).held == cache_bytes(method, of(model), 2, 100, 4)


@pytest.mark.parametrize("layout", ["absorbed", "latent"])
@pytest.mark.parametrize("entry", ["full", "full+int4", "h2o"])
def test_latents_are_planned_as_they_are_held(layout: str, entry: str) -> None:
    model = deepseek(layout=layout).float()
    config = model.config
    rank = config.kv_lora_rank
    planned = Planned(1, rank + config.qk_rope_head_dim, rank, [None] * config.num_hidden_layers, torch.float32, True)
    rule = H2O(budget=20) if entry == "h2o" else Full()
    method = Method(entry, rule, PerToken(4, 4, 8) if entry == "full+int4" else DenseStore())
    assert measured(model, method, random_ids(2, 60), 8) == cache_bytes(method, planned, 2, 60, 8)


def methods_of(entries: dict[str, list[str]], group: str) -> dict[str, Method]:
    """Methods by label, from the words of a command."""
    return {
        label: instantiate(method_config(BUILT_IN.composed([*words, group] if label != "full" else words)))
        for label, words in entries.items()
    }


MEASURED = {
    "Llama, grouped heads": lambda: random_llama(4, 2, 32, dtype=torch.float32),
    "Gemma 3, sliding windows": lambda: tiny("gemma3", head_dim=32, sliding_window=48),
    "DeepSeek, latent attention": lambda: deepseek().float(),
    "GPT-2": lambda: tiny("gpt2", n_embd=128),
    "Qwen 3": lambda: tiny("qwen3", head_dim=32),
}
"""Models that a folder holds: heads of 32 and more, so that groups of kivi4 and int4 fit."""


@pytest.mark.parametrize("family", MEASURED)
def test_the_plan_of_a_model_s_folder_is_what_the_memory_measure_finds(family: str, tmp_path: Path) -> None:
    """From the words of a command: the config in the folder on one side, rows of a run on the other."""
    MEASURED[family]().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    prompt, new = 300, 24
    spec = model_spec({"path": str(tmp_path), "device": "cpu", "dtype": "float32"})
    config = config_of(spec)
    shape = planned_shape(spec, config)
    model = planned_model(spec, config, shape)
    entries = {
        "full": ["method=full"],
        "h2o": ["method=h2o", "budget=64"],
        "kivi4": ["method=full", "store=kivi4", "residual=32"],
        "int4": ["method=full", "store=int4"],
        "h2o+int4": ["method=h2o", "budget=64", "store=int4"],
    }
    group = f"group={8 if model.latent else 32}"
    if model.latent:
        with pytest.raises(UserError, match="Kivi needs keys and values of each head"):
            methods_of(entries, group)["kivi4"].check_combination(shape.mla)
        entries.pop("kivi4")
    named = methods_of(entries, group)
    loaded = load_model(spec)
    ids = random_ids(1, prompt + new).squeeze(0)
    context = replace(run_context_of(loaded.model, named, ids), loaded=loaded)
    rows = rows_of(measure_bytes(context, Memory([prompt], new, isolate=False)))
    assert not context.journal.failures
    for label, method in named.items():
        held = value(rows, label, "held_bytes")
        assert cache_bytes(method, model, 1, prompt, new) == pytest.approx(held, rel=0.01), label
    assert value(rows, "full", "dense_bytes") == model.full_bytes(1, prompt + new)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json by itself is enough; what does not fit is refused in its own line."""
    random_llama(4, 2, 24).config.save_pretrained(tmp_path)
    words = [f"model.path={tmp_path / 'config.json'}", "model=hub", "context=100", "tokens=1", "batch=2", "memory=1GB"]
    assert main([*words, "compare=[full,h2o,full+int4]", "budget=50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 layers" in lines[0] and "2 KV heads, 48 numbers" in lines[0]
    full, h2o, int4 = (line.split() for line in lines[-3:])
    assert full[0] == "full" and full[3] == "0.99x" and int(full[4].replace(",", "")) > 1000
    assert h2o[:2] == ["h2o", "50"] and "group=8, group=24" in " ".join(int4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["context=many"], "type context=4096"),
        (["batch=0"], "type batch=1"),
        (["memory=lots"], "type memory=80GiB"),
        (["memory=80"], "type memory=80GiB"),
        (["model=random-tiny", "method=h2o", "budget=0"], "budget=0 is not a budget"),
        (["model=random-deepseek", "method=adakv"], "choose method=snapkv"),
        (["model=random-deepseek", "method=streaming_llm"], "type variant=absolute"),
        (["model=random-deepseek", "model.mla=expand", "method=full", "store=lowrank"], "another store than lowrank"),
        (["model=random-deepseek", "method=full", "store=lowrank"], "type store=dense, int8, int4 or rot4\n"),
        (["model=gemma2-2b", "method=expected_attention"], "choose another method than expected_attention"),
        (["model=hub", "+model.random={model_type: deepseek_v32}"], "DeepSeek V2's or V3's"),
        (["context"], "'context' is not KEY=VALUE"),
        (["model=llama9"], "model=llama9 is unknown"),
        (["model.foo=1"], "model.foo is no setting"),
        (["method=h20"], "did you mean h2o?"),
    ],
)
def test_bad_words_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err


def test_what_speaks_against_a_plan_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama2-7b", "method=full", "context=8192", "memory=10GiB"]) == 0
    said = capsys.readouterr().out
    assert "the model has 4,096 positions and this plan needs 8,320: a run will be refused" in said
    assert "the weights alone do not fit into 10.00 GiB" in said and said.splitlines()[-1].split()[-1] == "0"


def test_other_kv_heads_are_planned_in_the_weights_too() -> None:
    spec = model_spec({"id": "meta-llama/Llama-2-7b-hf", "kv_heads": 8})
    config = config_of(spec)
    before = weight_bytes(config, 2)
    shape = planned_shape(spec, config)
    assert planned_model(spec, config, shape).full_bytes(1, 1) == 524_288 // 4
    assert before - weight_bytes(config, 2) == 2 * 32 * 2 * 4096 * 24 * 128


def test_a_bad_word_imports_no_torch() -> None:
    code = (
        "import sys; from kvbench.cli.plan import main; assert main(['model=llama9']) == 2; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
