"""Published numbers beside ours: which row is held against which number, and the presets that name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.config import method_configs
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.measures.perplexity import Perplexity
from kvbench.report.__main__ import main as report
from kvbench.report.tables.published import Published, published_of, published_table
from kvbench.results.loading import find_runs, load
from kvbench.results.row import Row
from kvbench.sweep.plan import measures_of
from tests.shared.text import light

PRESETS = ("streaming_sinks", "streaming_400k", "llama2_wikitext2", "llama2_wikitext2_4096")
STREAM = Row(
    model="org/llama",
    dtype="float16",
    method="streaming_llm",
    store="dense",
    sinks=4,
    budget=1024,
    measure="perplexity",
    metric="ppl",
    protocol="stream",
    n=65536,
)
NODE: dict[str, Any] = {
    "source": "a paper",
    "settings": {"model": "org/llama", "n": 65536, "budget": 1024},
    "numbers": [
        {"method": "streaming_llm", "sinks": sinks, "metric": "ppl", "value": value}
        for sinks, value in ((0, 5158), (4, 5.40))
    ],
}


def published(**changed: Any) -> Published:
    found = published_of(NODE | changed)
    assert found is not None
    return found


def test_each_number_stands_beside_its_own_row() -> None:
    ours, nll = replace(STREAM, value=5.5), replace(STREAM, metric="nll", value=1.7)
    rows = [replace(STREAM, sinks=0, value=5000.0), ours, nll]
    table = published_table(published(), rows)
    assert table is not None
    assert table.caption == ["a paper"]
    assert {column.key: column.full for column in table.columns} == {
        "method": ["streaming_llm sinks=0", "streaming_llm sinks=4"],
        "metric": ["ppl", "ppl"],
        "published": ["5,158", "5.40"],
        "measured": ["5,000", "5.50"],
        "difference": ["-158.00", "+0.1000"],
    }
    assert [record["measured"] for record in table.records] == [5000.0, 5.5]


def test_what_was_measured_otherwise_is_said_and_what_was_not_measured_stays_open() -> None:
    table = published_table(published(), [replace(STREAM, model="tiny", n=64, value=9.0)])
    assert table is not None
    assert table.caption[1:] == ["not the published setting (in brackets): model tiny (org/llama), n 64 (65536)"]
    assert table.columns[3].full == ["–", "9.00"]
    assert published_table(published(), [replace(STREAM, metric="nll", value=9.0)]) is None
    assert published_table(published(), [replace(STREAM, value=None, status="oom")]) is None


def test_of_several_rows_the_one_with_the_published_setting_counts_then_the_latest() -> None:
    near, far = replace(STREAM, value=5.41), replace(STREAM, n=64, value=9.0)
    for rows in ([near, far], [far, near], [far, replace(near, value=7.0), near]):
        table = published_table(published(), rows)
        assert table is not None
        assert table.columns[3].full == ["–", "5.41"]


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("5.4", "lists no numbers"),
        ({"numbers": []}, "lists no numbers"),
        ({"numbers": ["ppl"]}, "lists no numbers"),
        (NODE | {"settings": {"modle": "x"}}, "modle is no column"),
        ({"numbers": [{"metric": "ppl"}]}, "value (a number)"),
        ({"numbers": [{"metric": "ppl", "value": "low"}]}, "value (a number)"),
        ({"numbers": [{"value": 5.4}]}, "metric and value"),
        ({"numbers": [{"metric": "ppl", "value": 1, "x": 2}]}, "x is"),
    ],
)
def test_a_node_that_cannot_be_used_is_refused_in_one_line(node: Any, said: str) -> None:
    with pytest.raises(UserError, match="published") as caught:
        published_of(node)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_compose_and_name_what_they_measure(name: str) -> None:
    """Each published number has a method of the preset, and the settings are the preset's own."""
    words = [f"experiment={name}"]
    config = BUILT_IN.composed(words)
    methods = method_configs(config, words)
    found = published_of(config.published)
    assert found is not None and found.source
    (setting,) = measures_of(config)
    assert isinstance(setting, Perplexity)
    told = {
        "model": config.model.id,
        "dtype": config.model.dtype,
        "dataset": config.data.name,
        "protocol": setting.protocol_name,
        "n": setting.windows * setting.tokens,
        "budget": config.budget,
        "context": 0 if setting.protocol == "stream" else setting.context,
        "bos": "first" if config.data.bos == "auto" else config.data.bos,
    }
    assert found.settings == {key: told[key] for key in found.settings}
    for number in found.numbers:
        knobs = {key: value for key, value in number.of.items() if key not in ("method", "store", "metric")}
        assert any(method.name == number.of["method"] and knobs.items() <= method.columns.items() for method in methods)


def test_a_run_and_its_report_show_the_published_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "experiment=streaming_sinks",
        "model=random-tiny",
        "model.dtype=float32",
        "data=random",
        "budget=16",
        "perplexity.tokens=40",
    ]
    with light():
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert main(words) == 0  # nothing is left to measure; the numbers are told all the same
        again = capsys.readouterr().out
    frame = load("results")
    ppl = frame[(frame["metric"] == "ppl") & (frame["method"] == "streaming_llm")].set_index("sinks")["value"]
    for text in (shown, again):
        flat = " ".join(text.split())
        for sinks, value, difference in ((0, "5,158", ppl[0] - 5158), (4, "5.40", ppl[4] - 5.40)):
            sign = f"{difference:+,.0f}" if sinks == 0 else f"{difference:+,.2f}"
            assert f"streaming_llm sinks={sinks} ppl {value} {ppl[sinks]:.2f} {sign}" in flat
        assert "not the published setting (in brackets): bos none (first), budget 16 (1024)" in flat
    (run,) = find_runs("results")
    assert report([str(run), "--out", "report"]) == 0
    page = Path("report/report.md").read_text()
    assert "Beside published numbers" in page and "StreamingLLM (2309.17453)" in page
    assert "5158" in Path("report/published.csv").read_text()
    assert "Beside published numbers" in Path("report/report.html").read_text()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("kivi_coqa", ["full", "kivi2 group=32 residual=128"]),
        (
            "kivi_axes",
            [
                "full",
                *(
                    f"kivi2 group=32 k_axis={k} v_axis={v}"
                    for k, v in (("channel", "token"), ("token", "token"), ("channel", "channel"), ("token", "channel"))
                ),
            ],
        ),
    ],
)
def test_the_preset_of_a_harness_task_names_its_methods(name: str, labels: list[str]) -> None:
    words = [f"experiment={name}"]
    config = BUILT_IN.composed(words)
    methods = method_configs(config, words)
    found = published_of(config.published)
    assert found is not None and config.harness.tasks == [found.settings["dataset"]]
    assert (config.model.id, config.model.dtype) == (found.settings["model"], found.settings["dtype"])
    assert [number.label for number in found.numbers] == labels
    for number in found.numbers:
        knobs = {key: value for key, value in number.of.items() if key not in ("method", "store", "metric")}
        own = [
            method.columns | {"knobs": json.dumps(method.others, sort_keys=True)}
            for method in methods
            if method.name == number.of["method"]
        ]
        assert sum(knobs.items() <= columns.items() for columns in own) == 1


def test_a_number_of_knobs_without_a_column_stands_beside_its_row() -> None:
    knobs = {"v_axis": "token", "k_axis": "channel"}
    table = published_table(
        published(numbers=[{"method": "kivi2", "metric": "em", "knobs": knobs, "value": 0.6353}]),
        [
            Row(method="kivi2", metric="em", value=v, knobs=json.dumps(knobs | changed, sort_keys=True))
            for v, changed in ((0.6, {}), (0.1, {"v_axis": "channel"}))
        ],
    )
    assert table is not None
    assert [record["measured"] for record in table.records] == [0.6]
