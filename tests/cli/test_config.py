"""From words to methods: every form of compare, the baseline, knobs that are read and knobs that are not."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.words import sweep_words
from kvbench.config import (
    KNOBS,
    OTHER_KNOBS,
    MethodConfig,
    chosen_measures,
    did_you_mean,
    entry_overrides,
    method_configs,
)
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.measures.measure import read_measure
from kvbench.measures.memory import Memory
from kvbench.results.resume_key import resume_key
from kvbench.results.row import COLUMNS
from kvbench.sweep.plan import measures_of


def compose(*words: str) -> DictConfig:
    return BUILT_IN.composed(words)


def found(*words: str) -> list[MethodConfig]:
    return method_configs(compose(*words), list(words))


def labels(*words: str) -> list[str]:
    return [method.label for method in found(*words)]


def one(*words: str) -> MethodConfig:
    """The method beside the baseline."""
    (_, method) = found(*words)
    return method


# the list of methods


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["full"]),
        (["method=full"], ["full"]),
        (["method=h2o", "budget=16"], ["full", "h2o"]),
        (["method=h2o", "store=int4", "budget=16"], ["full", "h2o+int4"]),
        (["store=int4"], ["full", "full+int4"]),
        (["method=kivi4"], ["full", "kivi4"]),
        (["compare=[h2o]", "budget=16"], ["full", "h2o"]),
        (["compare=h2o", "budget=16"], ["full", "h2o"]),
        (["compare=[h2o,full]", "budget=16"], ["full", "h2o"]),
        (["compare=[full,kivi4,h2o+int4,full+int8]", "budget=16"], ["full", "kivi4", "h2o+int4", "full+int8"]),
        (["compare=[ h2o , full ]", "budget=16"], ["full", "h2o"]),
        (["compare=[h2o,h2o,full,full,h2o+dense]", "budget=16"], ["full", "h2o"]),
        (["compare=[kivi+kivi]"], ["full", "kivi"]),
        (['compare=["method=h2o store=int4 budget=256",full]'], ["full", "h2o+int4"]),
        (["compare=['method=h2o budget=256',\"method=h2o  budget=512\"]"], ["full", "h2o", "h2o"]),
        (['compare=["method=h2o budget=16",random]', "budget=16"], ["full", "h2o", "random"]),
        # Two ways of saying the same are one.
        (['compare=["method=h2o budget=16",h2o]', "budget=16"], ["full", "h2o"]),
        (['compare=["method=kivi bits=4","method=kivi k_bits=4 v_bits=4",kivi]'], ["full", "kivi"]),
    ],
)
def test_forms_of_compare(words: list[str], expected: list[str]) -> None:
    assert labels(*words) == expected


def test_an_entry_overrides_what_holds_for_all() -> None:
    methods = found('compare=[h2o,"method=h2o budget=64"]', "budget=16", "window=4")
    assert [method.columns.get("budget") for method in methods] == [None, 16, 64]
    assert [method.columns.get("window") for method in methods] == [None, 4, 4]


def test_settings_of_one_method_do_not_reach_the_baseline() -> None:
    method = one("method=h2o", "budget=16", "method.rule.recent=3")
    assert method.rule["recent"] == 3
    assert found("method=h2o", "budget=16", "method.rule.recent=3")[0].effective == found()[0].effective
    assert one("store=int4", "store.slots.group_size=16").slots["group_size"] == 16


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("h2o", ["method=h2o"]),
        ("h2o+int4", ["method=h2o", "store=int4"]),
        ("method=h2o budget=0.25", ["method=h2o", "budget=0.25"]),
        ("  method=h2o   store=int4 ", ["method=h2o", "store=int4"]),
        ("budget=16 method=h2o", ["budget=16", "method=h2o"]),
    ],
)
def test_entry_overrides(entry: str, expected: list[str]) -> None:
    assert entry_overrides(entry) == expected


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "+int4",
        "h2o+",
        "h2o int4",
        "h2o+int4+int8",
        "h2o,full",
        "budget=16",
        "method=h2o model=hub",
        "method=h2o perplexity.context=64",
        "method=h2o compare=[full]",
    ],
)
def test_entries_that_are_none(entry: str) -> None:
    with pytest.raises(UserError, match="compare entry"):
        entry_overrides(entry)


# knobs


def test_knobs_that_are_read_are_columns_and_the_others_are_gone() -> None:
    method = one("method=h2o", "budget=16", "bits=4", "sinks=3", "residual=64", "group=16")
    assert method.columns == {"budget": 16, "window": None, "variant": "sum"}
    assert method.others == {"decode": "evict"}
    assert one("method=snapkv", "budget=64", "decode=evict", "pool=5").others == {
        "decode": "evict",
        "pool": 5,
        "ties": "older",
    }
    assert one("method=streaming_llm", "budget=16").columns == {"budget": 16, "sinks": 4, "variant": "in_cache"}
    assert one("method=random", "budget=16", "seed=3").columns == {"budget": 16, "sinks": 4, "window": None, "seed": 3}
    kivi = one("method=kivi4", "budget=16")
    assert kivi.columns == {"k_bits": 4, "v_bits": 4, "bits": 4, "group": 32, "residual": 128}
    uneven = one("method=kivi", "k_bits=8", "v_bits=2").columns
    assert (uneven["bits"], uneven["k_bits"], uneven["v_bits"]) == (None, 8, 2)
    assert one("method=h2o", "store=int4", "budget=16").columns.keys() >= {"budget", "bits", "group"}
    assert set(KNOBS) <= set(COLUMNS)


def test_every_root_key_that_a_method_or_store_reads_is_a_knob_that_an_entry_may_set() -> None:
    read = {
        name
        for group in ("method", "store")
        for file in resources.files("kvbench.conf").joinpath(group).iterdir()
        for name in re.findall(r"\$\{(\w+)\}", file.read_text())
    }
    assert read == {*KNOBS, *OTHER_KNOBS}
    for knob in (*KNOBS, *OTHER_KNOBS):
        assert entry_overrides(f"method=h2o {knob}=1") == ["method=h2o", f"{knob}=1"]


def key(method: MethodConfig) -> str:
    return resume_key(model_revision="m", config=method.effective, data_fingerprint="d", protocol="p", dtype="float32")


def test_a_budget_that_nothing_reads_changes_nothing() -> None:
    unread = [found("method=full", f"budget={budget}")[0] for budget in (256, 1000)]
    assert unread[0].effective == unread[1].effective == found()[0].effective
    assert key(unread[0]) == key(unread[1])
    assert one("method=kivi4", "budget=16").effective == one("method=kivi4").effective
    read = [one("method=h2o", f"budget={budget}") for budget in (256, 1000, 0.25)]
    assert len({key(method) for method in read}) == 3


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("method=h2o", ["budget=32", "window=4", "variant=max", "store=int8"]),
        ("method=streaming_llm", ["budget=32", "sinks=2", "variant=absolute", "store=int8"]),
        ("method=random", ["budget=32", "seed=1"]),
        ("method=kivi", ["bits=2", "k_bits=8", "v_bits=8", "group=16", "residual=64"]),
        ("store=int4", ["group=16"]),
    ],
)
def test_every_knob_that_can_change_a_number_changes_the_key(method: str, changes: list[str]) -> None:
    keys = [key(one(method, *([] if change.startswith("budget") else ["budget=16"]), change)) for change in changes]
    plain = key(one(method, "budget=16"))
    assert len({plain, *keys}) == 1 + len(changes)


def test_every_method_composes_with_its_own_store_and_says_its_name() -> None:
    for name in BUILT_IN.files("method"):
        methods = found(f"method={name}", "budget=64")
        assert methods[-1].name == name
        assert methods[0].is_baseline
        assert methods[-1].rule["_target_"].startswith("kvbench.methods.")
    for name in BUILT_IN.files("store"):
        if not name.startswith(("kivi", "hf_")):
            assert found("method=full", f"store={name}")[-1].store == name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=kivi4", "store=int4"], "method=kivi4 brings its own store (kivi4); leave store=int4 away"),
        (["method=kivi4", "bits=8"], "bits=8 contradicts kivi4, which is 4 bits; leave bits away"),
        (["compare=[kivi8,kivi4]", "bits=8"], "another of the kivi family"),
        (["method=h2o", "store=int4", "k_bits=2"], "k_bits=2 contradicts int4"),
        (["compare=[full]", "method=full"], "put the method into the list"),
        (["compare=[full]", "store=dense"], "write h2o+int4 in the list"),
    ],
)
def test_contradictions(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        found(*words)
    assert says in str(refusal.value)


def test_bits_that_agree_with_the_name_are_no_contradiction() -> None:
    assert one("method=kivi4", "bits=4").effective == one("method=kivi4").effective


def test_a_setting_that_no_method_has_is_refused_in_every_entry() -> None:
    with pytest.raises(HydraException, match="recent"):
        found("compare=[h2o,streaming_llm]", "budget=16", "method.rule.recent=3")


# presets, sweeps, measures

FIRST_LIGHT = [
    "compare=[full,kivi8,kivi4,kivi2,h2o,streaming_llm,random]",
    "budget=256",
    "measure=[perplexity,needle]",
    "perplexity.context=1024",
    "perplexity.tokens=128",
    "perplexity.windows=4",
    "needle.lengths=[1024]",
    "needle.depths=[0.1,0.5,0.9]",
    "needle.samples=4",
]


def test_first_light_is_the_command_spelled_out() -> None:
    preset, spelled = compose("experiment=first_light"), compose(*FIRST_LIGHT)
    assert OmegaConf.to_container(preset, resolve=True) == OmegaConf.to_container(spelled, resolve=True)
    assert [m.effective for m in found("experiment=first_light")] == [m.effective for m in found(*FIRST_LIGHT)]
    assert len(found("experiment=first_light")) == 7


def test_a_preset_can_be_changed() -> None:
    methods = found("experiment=first_light", "budget=64", "compare=[h2o]")
    assert [(m.label, m.columns.get("budget")) for m in methods] == [("full", None), ("h2o", 64)]


def test_defaults_are_those_of_the_design() -> None:
    config = compose("method=h2o", "budget=1000")
    assert chosen_measures(config) == ["perplexity", "needle", "memory", "latency"]
    perplexity, needle, memory, latency = map(lambda measure: measure.settings(), measures_of(config))
    assert (perplexity["context"], perplexity["tokens"], perplexity["windows"]) == (3072, 128, 2)
    assert (needle["lengths"], needle["depths"]) == ([2048], [0.1, 0.5, 0.9])
    assert (needle["samples"], needle["question"]) == (4, ["after"])
    assert memory["contexts"] == latency["contexts"] == [512, 2048, 4096]
    assert (config.seed, config.kernel, config.threads) == (0, "auto", None)


@pytest.mark.parametrize(
    ("words", "packed"),
    [
        (["-m", "method=full,h2o", "budget=16"], ["-m", "compare=[full,h2o]", "budget=16"]),
        (["-m", "method=h2o", "budget=16,32"], ["-m", "method=h2o", "budget=16,32"]),
        (["-m", "method=full,h2o", "sweep.pack=methods"], ["-m", "compare=[full,h2o]"]),
        (["-m", "method=full,h2o", "sweep.pack=none"], ["-m", "method=full,h2o"]),
        (["-m", "method=full,h2o", "store=int4,int8"], ["-m", "method=full,h2o", "store=int4,int8"]),
        (["-m", "compare=[full],[h2o]"], ["-m", "compare=[full],[h2o]"]),
        (["-m", "method=full,h20"], ["-m", "method=full,h20"]),
    ],
)
def test_packing(words: list[str], packed: list[str]) -> None:
    assert sweep_words(words, BUILT_IN) == packed


def test_measures() -> None:
    def chosen(measure: Any) -> list[str]:
        return chosen_measures(OmegaConf.create(dict(compose()) | {"measure": measure}))

    assert chosen("memory") == ["memory"]
    assert chosen(["memory", "latency", "memory"]) == ["memory", "latency"]
    known = "error, fidelity, latency, memory, needle, paging, perplexity, stream, tasks, turns"
    for nothing in (None, [], "", ["memory", "speed"], [3], 3, [["memory"]]):
        with pytest.raises(UserError, match=f"choose from {known}"):
            chosen(nothing)
    with pytest.raises(UserError, match="is not a list; type measure="):
        chosen({"a": 1})


# settings of measures


def read(name: str, **settings: Any) -> dict[str, Any]:
    """The settings of a measure whose yaml file is changed by `settings`."""
    return read_measure(name, BUILT_IN.content("measures")[name] | settings).settings()


def test_yaml_files_of_measures_show_the_defaults_of_their_classes() -> None:
    for name, node in BUILT_IN.content("measures").items():
        assert read(name) == read_measure(name, {"_target_": node["_target_"]}).settings()


def test_settings_take_one_value_for_a_list_and_count_each_once() -> None:
    node = {"_target_": "kvbench.measures.memory.Memory", "contexts": 64, "tokens": 2}
    assert read_measure("memory", node) == Memory([64], 2)
    assert read("memory", contexts=[64, 32, 64])["contexts"] == [64, 32]
    assert read("needle", depths=[0, 0.0, 1])["depths"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"contexts": None}, "memory.contexts=None is not a whole number"),
        ({"contexts": []}, "memory.contexts=[] lists nothing"),
        ({"contexts": [True]}, "memory.contexts=True is not a whole number"),
        ({"contexts": ["64"]}, "memory.contexts=64 is not a whole number"),
        ({"tokens": 0}, "memory.tokens=0 is not a whole number of at least 1; type memory.tokens=16"),
        ({"tokens": 2.0}, "memory.tokens=2.0"),
        ({"token": 2}, "memory.token is no setting; choose from contexts, tokens"),
    ],
)
def test_settings_of_a_wrong_kind(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        read("memory", **change)
    assert says in str(refusal.value)


@pytest.mark.parametrize("depth", [-0.1, 1.1, "deep", True, float("nan"), None])
def test_depths_of_a_wrong_kind(depth: Any) -> None:
    with pytest.raises(UserError, match="is not a number from 0 to 1"):
        read("needle", depths=[depth])


def test_no_warm_up_is_allowed() -> None:
    assert read("latency", warmup=0)["warmup"] == 0


@pytest.mark.parametrize(("word", "near"), [("h20", "h2o"), ("H2O", "h2o"), ("kivi3", "kivi"), ("zzz", "")])
def test_did_you_mean(word: str, near: str) -> None:
    said = did_you_mean(word, ["full", "h2o", "kivi"])
    assert said == (f" (did you mean {near}?)" if near else "")


def test_yaml_files_say_what_they_are() -> None:
    """The name inside a file is the name by which it is chosen: rows carry the one, commands the other."""
    from importlib import resources

    for group, key in (("method", "method"), ("store", None)):
        for name in BUILT_IN.files(group):
            content = yaml.safe_load(resources.files("kvbench.conf").joinpath(group, f"{name}.yaml").read_text())
            assert content.get(key, content)["name"] == name


def test_a_chunked_prefill_is_a_setting_of_the_method() -> None:
    full, plain, chunked = found("compare=[h2o,'method=h2o prefill.chunk=512']", "budget=16")
    assert (full.is_baseline, plain.prefill_chunk, chunked.prefill_chunk) == (True, None, 512)
    assert "prefill_chunk" not in plain.columns and chunked.columns["prefill_chunk"] == 512
    assert chunked.effective == plain.effective | {"prefill_chunk": 512}  # so the resume keys differ


def test_the_baseline_reads_prompts_in_one_piece() -> None:
    full, h2o = found("method=h2o", "budget=16", "prefill.chunk=512")
    assert (full.is_baseline, full.prefill_chunk, h2o.prefill_chunk) == (True, None, 512)
    one_piece, chunked = found("method=full", "prefill.chunk=512")
    assert (one_piece.prefill_chunk, chunked.prefill_chunk, chunked.is_baseline) == (None, 512, False)
