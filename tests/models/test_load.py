"""kvbench.models.load:

what a config says, one line for what cannot be measured, and the facts about the offline model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import generate
from kvbench.errors import UserError
from kvbench.hub import hub_reachable
from kvbench.method_runs import base_row
from kvbench.methods.h2o import H2O
from kvbench.methods.per_token import PerToken
from kvbench.models.load import LoadedModel, describe, load_model, load_tokenizer, model_spec
from kvbench.models.shape import shape_of
from kvbench.texts.load import Text, load_text
from kvbench.texts.tokens import tokenize
from tests.shared.models import TINY, random_llama


def perplexity(loaded: LoadedModel, ids: torch.Tensor) -> float:
    logits = loaded.model(ids[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[1:]).exp().item()


# --- shapes


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("llama", {"num_key_value_heads": 8}, ("gqa", 8, 32, 128, 0)),
        ("llama", {"num_key_value_heads": 1}, ("mqa", 1, 32, 128, 0)),
        ("llama", {"head_dim": 64}, ("mha", 32, 32, 64, 0)),
        ("mistral", {}, ("gqa", 8, 32, 128, 32)),
        ("mistral", {"sliding_window": None}, ("gqa", 8, 32, 128, 0)),
        ("qwen2", {}, ("mha", 32, 32, 128, 0)),
        ("qwen3", {"num_key_value_heads": 4}, ("gqa", 4, 32, 128, 0)),
        ("gemma2", {}, ("gqa", 4, 8, 256, 13)),
        ("gemma3_text", {}, ("gqa", 4, 8, 256, 22)),
        ("gpt_oss", {"num_hidden_layers": 4}, ("gqa", 8, 64, 64, 2)),
        ("gpt2", {}, ("mha", 12, 12, 64, 0)),
        ("gpt_neox", {}, ("mha", 64, 64, 96, 0)),
        ("opt", {}, ("mha", 12, 12, 64, 0)),
        ("gpt_bigcode", {}, ("mqa", 1, 12, 64, 0)),
        ("deepseek_v3", {}, ("mla", 1, 128, 512, 0)),
        ("qwen3_next", {}, ("hybrid", 2, 16, 256, 0)),
    ],
)
def test_shape_of_a_family(kind: str, settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = AutoConfig.for_model(kind, **settings)
    shape = shape_of(config)
    found = (shape.arch, shape.kv_heads, shape.query_heads, shape.head_dim, shape.sliding_layers)
    assert found == expected
    assert (shape.n_layers, shape.vocab_size) == (config.num_hidden_layers, config.vocab_size)
    describe(model_spec({"random": {"model_type": kind, **settings}}))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("falcon", "the Falcon family .* AttentionInterface"),
        ("bloom", "the Bloom family .* AttentionInterface"),
        ("t5", "encoder-decoder"),
        ("gemma3", "multimodal"),
        ("bert", "without causal attention"),
        ("mamba", "no attention heads"),
        ("gemma4_text", "heads of different sizes or numbers"),
        ("gemma3n_text", "15 layers that attend over another layer's keys and values"),
        ("deepseek_v32", "selection of its latents"),
        ("llamma", "not known to transformers"),
    ],
)
def test_a_family_that_cannot_be_measured_is_refused_by_name(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        load_model(model_spec({"random": {"model_type": kind}}))
    assert "\n" not in str(refused.value)


# --- the node


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({}, "no model is named"),
        ({"id": "a/b", "path": "c"}, "both given"),
        ({"pth": "c"}, "unknown model key pth"),
        ({"id": "a/b", "random": TINY}, "model=hub model.id="),
        ({"id": "a/b", "dtype": "int3"}, "auto, float32, bfloat16"),
        ({"id": "a/b", "load_kwargs": "4bit"}, "must be a mapping"),
        ({"id": "a/b", "load_kwargs": {"torch_dtype": "float16"}}, "write model.dtype=float16"),
        ({"id": "a/b", "load_kwargs": {"device_map": "auto"}, "device": "cuda"}, "device_map are both given"),
        ({"id": "a/b", "trust_remote_code": "yes"}, "must be true or false"),
        ({"fetched": "smollm3"}, "smollm2-135m"),
        ({"id": "a/b", "revision": 1.1}, r"model.revision was read as the float 1.1.*quote it"),
        ({"id": "a/b", "revision": 1000}, r"model.revision was read as the int 1000"),
        ({"random": {**TINY, "num_hidden_layers": 0}}, "model.random.num_hidden_layers=0 must be a whole number"),
        ({"random": {**TINY, "hidden_size": -8}}, "model.random.hidden_size=-8 must be a whole number"),
        ({"random": {**TINY, "vocab_size": "many"}}, "model.random.vocab_size='many' must be a whole number"),
        ({"random": {**TINY, "seed": "abc"}}, "model.random.seed='abc' must be a whole number of at least 0"),
    ],
)
def test_a_node_that_cannot_be_used(node: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        describe(model_spec(node))


def test_what_the_user_gives_wins_over_the_default() -> None:
    default = {"name": None, "fetched": "smollm2-135m", "id": None, "path": None, "load_kwargs": {}}
    assert model_spec(default).name == "smollm2-135m"
    given = model_spec({**default, "id": "org/Model-1.5B"})
    assert (given.name, given.id, given.fetched, given.source) == ("org/Model-1.5B", "org/Model-1.5B", None, "hub")
    given = model_spec({**default, "path": "/models/Model-1.5B"})
    assert (given.name, given.fetched, given.source) == ("Model-1.5B", None, "folder")
    given = model_spec({**default, "path": "m/model-1.5b.Q4_0.gguf"})
    assert (given.name, given.source) == ("model-1.5b.Q4_0", "gguf")


def test_a_fetch_not_done_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    for step in (load_tokenizer, describe, load_model):
        with pytest.raises(UserError, match=r"python -m kvbench\.fetch smollm2-135m$"):
            step(model_spec({"fetched": "smollm2-135m"}))


# --- random weights


def test_random_weights_follow_the_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = load_model(model_spec({"random": TINY, "device": "cpu"}))
    assert torch.equal(before, torch.get_rng_state())
    again = load_model(model_spec({"random": {**TINY, "seed": 0}, "device": "cpu"}))
    other = load_model(model_spec({"random": {**TINY, "seed": 1}, "device": "cpu"}))
    weights = [m.model.lm_head.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.revision != other.revision
    assert (first.source, first.tokenizer, first.name) == ("random", None, "random-llama")
    assert (first.dtype, first.device) == (torch.float32, torch.device("cpu"))
    assert not first.model.training and not any(p.requires_grad for p in first.model.parameters())


def test_dtype_and_device_are_the_users() -> None:
    given = load_model(model_spec({"random": TINY, "device": "cpu", "dtype": "bfloat16"}))
    assert given.dtype == torch.bfloat16 and given.model.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"model\.device=tpu9 is not known"):
        load_model(model_spec({"random": TINY, "device": "tpu9"}))
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UserError, match="CUDA devices; write auto or cpu"):
        load_model(model_spec({"random": TINY, "device": missing}))


# --- folders


@pytest.fixture
def folder(tmp_path: Path, smollm2_folder: Path) -> Path:
    """A small model with the real tokenizer, as a checkpoint folder."""
    saved = tmp_path / "small-v1.5"
    random_llama(2, 1, 16, vocab=49152, dtype=torch.float32).save_pretrained(saved)
    for file in smollm2_folder.glob("tokenizer*"):
        shutil.copy(file, saved)
    return saved


def load_folder(folder: Path, **node: Any) -> LoadedModel:
    return load_model(model_spec({"path": str(folder), "device": "cpu", **node}))


def test_a_folder_loads_and_its_revision_follows_its_content(folder: Path) -> None:
    first = load_folder(folder)
    assert (first.name, first.source, first.arch, first.head_dim) == ("small-v1.5", "folder", "mqa", 16)
    assert first.tokenizer("The capital").input_ids == [504, 3575]
    copy = shutil.copytree(folder, folder.parent / "copy")
    assert load_folder(copy).revision == first.revision
    changed = AutoModelForCausalLM.from_pretrained(copy)
    changed.model.norm.weight.data += 1
    changed.save_pretrained(copy)
    assert load_folder(copy).revision != first.revision


PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.parametrize("where", ["auto", "whole", "parts", "disk"])
def test_a_device_map_spreads_a_model_and_its_caches_follow(folder: Path, tmp_path: Path, where: str) -> None:
    """With accelerate's hooks on every part, and with weights that wait on disk."""
    placed: Any = {
        "auto": "auto",
        "whole": {"": "cpu"},
        "parts": dict.fromkeys(PARTS, "cpu"),
        "disk": dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk"},
    }[where]
    arguments = {"device_map": placed} | ({"offload_folder": str(tmp_path)} if where == "disk" else {})
    spread = load_model(model_spec({"path": str(folder), "load_kwargs": arguments}))
    plain = load_folder(folder)
    prompt = torch.arange(100, 140)[None]
    said = []
    for loaded in (plain, spread):
        cache = build_cache(loaded.model, Method("h2o", H2O(16), PerToken(group_size=16)), prompt, 8)
        assert loaded.device.type == "cpu"
        said.append(generate(loaded.model, None, cache, 8))
    assert said[0].equal(said[1])


def test_load_kwargs_reach_from_pretrained(folder: Path) -> None:
    loaded = load_folder(folder, load_kwargs={"attn_implementation": "eager"})
    assert loaded.model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match="load_kwargs holds a key .*'colour'"):
        load_folder(folder, load_kwargs={"colour": "red"})


@pytest.mark.parametrize(
    "damage", ["truncated", "no weights", "lacking weights", "no config", "torn config", "no tokenizer"]
)
def test_a_damaged_folder_is_one_line(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = 3
        text = json.dumps(config)
        (folder / "config.json").write_text(text if damage == "lacking weights" else text[:50])
        if damage == "no config":
            (folder / "config.json").unlink()
    with pytest.raises(UserError) as refused:
        load_folder(folder)
    assert "\n" not in str(refused.value) and "small-v1.5" in str(refused.value)


@pytest.mark.parametrize("damage", ["pointer", "safetensors pointer", "truncated", "empty", "not a pickle"])
def test_a_damaged_pytorch_file_is_one_line(folder: Path, damage: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    binary = folder / "pytorch_model.bin"
    if damage == "safetensors pointer":
        binary = folder / "model.safetensors"
    else:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), binary)
    whole = binary.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    content = {"truncated": whole[: len(whole) // 2], "empty": b"", "not a pickle": b"hello"}.get(damage, pointer)
    binary.write_bytes(content)
    with pytest.raises(
        UserError, match="git-lfs pointer" if "pointer" in damage else "damaged or truncated"
    ) as refused:
        load_folder(folder)
    assert "\n" not in str(refused.value)


def test_a_config_of_other_shapes_is_one_line(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UserError, match="other shapes than config.json says") as refused:
        load_folder(folder)
    assert "\n" not in str(refused.value)


def test_fp8_blocks_that_do_not_divide_a_weight_are_one_line(folder: Path) -> None:
    """64 rows in blocks of 24, as in a checkpoint with an odd number of rows."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        rows, columns = (-(-size // 24) for size in weights[name].shape)
        weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(rows, columns)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [24, 24], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UserError, match="shapes do not fit config.json's quantization_config") as refused:
        load_folder(folder)
    assert "\n" not in str(refused.value)


def test_weights_that_the_model_has_no_place_for_are_a_fact_of_the_model(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    assert load_folder(folder).unused_weights == ()
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.extra.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    loaded = load_folder(folder)
    assert loaded.unused_weights == ("model.extra.weight",)
    assert "1 weights of the checkpoint are not used, as model.extra.weight" in (loaded.remark or "")
    text = Text("essays", "", "")
    assert [base_row(model, text, 0, ()).flags for model in (loaded, replace(loaded, unused_weights=()))] == [
        "unused_weights",
        None,
    ]


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_that_kvbench_does_not_run_on_is_one_line(device: str) -> None:
    with pytest.raises(UserError, match=rf"model\.device={device}: kvbench runs on cpu and cuda"):
        load_model(model_spec({"random": TINY, "device": device}))


def test_remote_code_stays_off(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"add model\.trust_remote_code=true"):
        load_folder(folder)


@pytest.mark.parametrize("path", ["absent", "file.txt", "file.gguf", ""])
def test_a_path_that_is_no_model(tmp_path: Path, path: str) -> None:
    for name in ("file.txt", "file.gguf"):
        (tmp_path / name).write_text("not a model")
    with pytest.raises(UserError, match="does not exist|is a file but|is not a GGUF file|is no model folder"):
        load_folder(tmp_path / path)


# --- the hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty local hub cache, and no hub. Returns the cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_reachable.cache_clear()
    yield tmp_path / "hub"
    hub_reachable.cache_clear()


def test_a_hub_model_that_is_not_here_is_one_line(offline: Path) -> None:
    with pytest.raises(UserError, match="hub cannot be reached.*hf download org/absent.*smollm2-135m"):
        load_model(model_spec({"id": "org/absent"}))


def test_a_hub_model_in_the_local_cache_loads_offline(offline: Path, folder: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = offline / "models--org--small"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = load_model(model_spec({"id": "org/small", "device": "cpu"}))
    assert (loaded.name, loaded.source, loaded.revision) == ("org/small", "hub", commit)


def test_an_id_that_is_also_a_path_is_not_guessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(UserError, match=r"write model\.path=small-v1\.5"):
        load_model(model_spec({"id": "small-v1.5"}))


# --- the offline model


def test_smollm2_is_what_it_should_be(smollm2: LoadedModel) -> None:
    shape = (smollm2.arch, smollm2.n_layers, smollm2.query_heads, smollm2.kv_heads, smollm2.head_dim)
    assert shape == ("gqa", 30, 9, 3, 64)
    assert (smollm2.max_positions, smollm2.sliding_layers, smollm2.dtype) == (8192, 0, torch.float32)
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = smollm2.model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
    assert smollm2.tokenizer.decode(answer) == " Paris."


def test_smollm2_takes_every_digit_by_itself_before_the_spaces(smollm2: LoadedModel) -> None:
    tokens = smollm2.tokenizer.tokenize("  12,345 in 2021")
    assert tokens == ["ĠĠ", "1", "2", ",", "3", "4", "5", "Ġin", "Ġ", "2", "0", "2", "1"]
    assert smollm2.tokenizer("x").input_ids == smollm2.tokenizer("x", add_special_tokens=False).input_ids


def test_smollm2_perplexity_on_an_essay(smollm2: LoadedModel, essays_folder: Path) -> None:
    ids = tokenize(load_text({"path": str(essays_folder / "worked.txt")}), smollm2.tokenizer)
    assert 22 < perplexity(smollm2, ids[:512]) < 26


@pytest.mark.slow
def test_smollm2_perplexity_on_a_longer_piece(smollm2: LoadedModel, essays_folder: Path) -> None:
    ids = tokenize(load_text({"path": str(essays_folder / "worked.txt")}), smollm2.tokenizer)
    assert 22 < perplexity(smollm2, ids[:2048]) < 26


@pytest.mark.slow
def test_the_converted_folder_is_the_gguf(smollm2: LoadedModel, smollm2_folder: Path) -> None:
    """Every weight of the folder is the GGUF's rounded to bf16, the tokens are the same, the logits close."""
    gguf = next((smollm2_folder / "gguf").glob("*.gguf"))
    loaded = load_model(model_spec({"path": str(gguf), "device": "cpu"}))
    assert (loaded.source, loaded.arch, loaded.n_layers, loaded.max_positions) == ("gguf", "gqa", 30, 8192)
    text = "Paris,  1889: <|im_start|>user\n  naïve café — 12,345 €\t😀<|im_end|>\n"
    for special in (True, False):
        encoded = [m.tokenizer(text, add_special_tokens=special).input_ids for m in (loaded, smollm2)]
        assert encoded[0] == encoded[1]
    ids = torch.tensor(encoded[0])[None]
    exact, rounded = (torch.log_softmax(m.model(ids).logits, -1) for m in (loaded, smollm2))
    kl = (exact.exp() * (exact - rounded)).sum(-1)
    assert kl.mean() < 1e-3
    converted = smollm2.model.state_dict()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(converted[name], weight.bfloat16().float()), name
