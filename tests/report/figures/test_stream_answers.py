"""Answers by length: which tasks count, and that chunked prefills are methods of their own."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.lines import Line2D

from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.method_settings import method_settings
from kvbench.report.compare.names import labels
from kvbench.report.figures.stream_answers import answers_by_length
from kvbench.report.tables.measure_tables import build_tables
from kvbench.results.row import Row
from tests.shared.rows import BASE

STREAM = replace(BASE, measure="stream", metric="answer_rate", dataset="synthetic", unit="share", n=4)


def rate(method: str, task: str, length: int, value: float, **columns: object) -> Row:
    return replace(
        STREAM,
        method=method,
        store="dense",
        protocol=task,
        context=length,
        value=value,
        **columns,  # type: ignore[arg-type]
    )


ROWS = [
    rate(method, task, length, value, budget=None if method == "full" else 64)
    for method, task, values in (
        ("full", "list_copy", (0.9, 0.7)),
        ("full", "running_sum", (0.6, 0.2)),
        ("h2o", "list_copy", (0.5, 0.3)),
        ("h2o", "running_sum", (0.3, 0.2)),
    )
    for length, value in zip((256, 512), values, strict=True)
]


def test_a_point_is_the_mean_over_tasks_that_the_full_cache_can_do() -> None:
    plot = answers_by_length(ROWS)
    assert plot is not None
    curves = {
        tuple(map(float, line.get_ydata())) for axes in plot.figure.axes for line in axes.get_lines() if _own(line)
    }
    assert curves == {(75.0, 70.0), (40.0, 30.0)}
    assert plot.says == "Right answers of 2 methods after 512 tokens: h2o 30% (lowest), full 70% (highest)."


def _own(line: Line2D) -> bool:
    return line.get_linewidth() > 1


def test_nothing_is_drawn_for_one_length_or_for_tasks_that_the_full_cache_cannot_do() -> None:
    assert answers_by_length([row for row in ROWS if row.context == 256]) is None
    assert answers_by_length([row for row in ROWS if row.protocol == "running_sum"]) is None
    assert answers_by_length([row for row in ROWS if row.method != "full"]) is None


def test_a_chunked_prefill_is_a_setting_of_its_own() -> None:
    """Never averaged with a prefill in one piece: another label, another line, another command, no baseline."""
    one = replace(BASE, method="h2o", store="dense", budget=64, measure="perplexity", metric="ppl", value=20.0)
    chunked = replace(one, prefill_chunk=512, value=21.0)
    assert sorted(labels([one, chunked]).values()) == ["h2o", "h2o prefill by 512"]
    assert method_settings(chunked) == {"method": "h2o", "budget": "64", "prefill.chunk": "512"}
    table = next(table for table in build_tables([one, chunked]) if table.name == "perplexity")
    assert len(table.rows) == 2 and "prefill_chunk" in [column.key for column in table.columns]
    full = replace(one, method="full", budget=None)
    assert is_baseline(full) and not is_baseline(replace(full, prefill_chunk=512))
