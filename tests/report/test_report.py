"""Tables, warnings, plots and the page, from synthetic rows: complete, partial and failed ones."""

from __future__ import annotations

import csv
import io
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from rich.console import Console

from kvbench.report import units
from kvbench.report.__main__ import main
from kvbench.report.candidates import groups_of
from kvbench.report.curves import memory_context, tpot_context
from kvbench.report.findings import find_all, remarks
from kvbench.report.heatmap import needle_maps
from kvbench.report.lines import baseline_of, lines_of
from kvbench.report.names import config_of, display_name, labels
from kvbench.report.overview import overview
from kvbench.report.panels import styled
from kvbench.report.pareto import perplexity_bytes
from kvbench.report.plots import draw_all
from kvbench.report.style import PALETTE, styles
from kvbench.report.table import Table, to_latex
from kvbench.report.tables import build_tables, terminal_table
from kvbench.results.folder import RunFolder
from kvbench.results.row import GRAPH, Row, frame_of, rows_of
from tests.shared.paths import ROOT
from tests.shared.rows import BASE, METHODS, rows

SHIPPED = (
    "recompute",
    "kivi8",
    "kivi4",
    "kivi2",
    "h2o",
    "streaming_llm",
    "random",
    "snapkv",
    "tova",
    "knorm",
    "expected_attention",
    "adakv",
)
OOM = replace(BASE, method="h2o", store="dense", budget=4096, measure="latency", status="oom", note="tried 2 GiB")


@pytest.fixture(autouse=True)
def paper() -> Iterator[None]:
    with styled():
        yield
    plt.close("all")


def table(made: Sequence[Row], name: str) -> Table:
    return next(found for found in build_tables(made) if found.name == name)


def column(found: Table, key: str) -> list[str]:
    return next(column.full for column in found.columns if column.key == key)


def keys(found: Table) -> list[str]:
    return [column.key for column in found.columns]


def kinds(made: Sequence[Row]) -> list[str]:
    return [finding.kind for finding in find_all(made)]


def sweep() -> list[Row]:
    """h2o and streaming_llm at four budgets, beside full and kivi4."""
    fixed = [method for method in METHODS if method[0] in ("full", "kivi4")]
    swept = [
        (name, "dense", {"budget": budget}, 22.4 + scale / budget, budget / 1024)
        for name, scale in (("h2o", 300), ("streaming_llm", 500))
        for budget in (64, 128, 256, 512)
    ]
    return rows([*fixed, *swept])


# names


@pytest.mark.parametrize(
    ("method", "store", "shown"),
    [
        ("full", None, "full"),
        ("full", "dense", "full"),
        ("full", "int4", "full+int4"),
        ("h2o", "dense", "h2o"),
        ("h2o", "int4", "h2o+int4"),
        ("kivi4", "kivi4", "kivi4"),
        ("kivi4", "kivi", "kivi4"),
        ("kivi", "kivi2", "kivi2"),
    ],
)
def test_display_name(method: str, store: str | None, shown: str) -> None:
    assert display_name(Row(method=method, store=store)) == shown


def test_labels_tell_only_what_varies() -> None:
    made = [
        Row(method="kivi2", store="kivi2", bits=2),
        Row(method="kivi4", store="kivi4", bits=4),
        Row(method="h2o", budget=256, knobs='{"pool": 7, "heads": 1}'),
        Row(method="h2o", budget=0.25, knobs='{"pool": 5, "heads": 1}'),
        Row(method="streaming_llm", budget=256, sinks=4),
    ]
    found = labels(made)
    assert [found[config_of(row)] for row in made] == [
        "kivi2",
        "kivi4",
        "h2o 256, pool=7",
        "h2o 25%, pool=5",
        "streaming_llm",
    ]


def test_labels_are_unique() -> None:
    made = sweep()
    found = labels(made)
    assert len(set(found.values())) == len(found) == len({config_of(row) for row in made})


# tables


def test_baseline_is_on_top_of_every_table() -> None:
    made = rows()
    shuffled = made[len(made) // 2 :] + made[: len(made) // 2]
    for found in build_tables(shuffled):
        assert column(found, "method")[0] == "full"


def test_constants_go_to_the_caption_and_varying_settings_to_columns() -> None:
    found = table(rows(), "perplexity")
    assert keys(found) == ["method", "ppl", "nll_minus_full", "kl", "top1", "engaged", "kept_tokens"]
    assert {"model Toy-135M", "budget 256", "context 1,024", "positions 128"} <= set(found.caption)
    two_models = rows() + rows(base=replace(BASE, model="org/Other", arch="mha"))
    found = table(two_models, "perplexity")
    assert keys(found)[:2] == ["model", "method"]
    assert column(found, "model")[0] == "Toy-135M" and column(found, "method")[len(METHODS)] == "full"


def test_best_is_marked_among_caches_of_as_many_heads_only() -> None:
    heads = [
        replace(row, kv_heads=1, converted=True, value=row.value / 3 if row.unit == "bytes" else row.value)
        for row in rows(METHODS[:4], ["memory"], contexts=[512])
        if row.value is not None
    ]
    found = table([*rows(METHODS[:4], ["memory"], contexts=[512]), *heads], "memory")
    held = next(c for c in found.columns if c.key == "held_bytes")
    assert held.best == {3, 7} and column(found, "converted") == ["no"] * 4 + ["yes"] * 4


def test_budgets_of_a_method_stand_together() -> None:
    made = sweep()
    found = table([row for budget in (None, 256, 64, 512, 128) for row in made if row.budget == budget], "perplexity")
    assert column(found, "budget") == ["–", "–", *["64", "128", "256", "512"] * 2]


def test_budget_is_a_column_where_it_varies() -> None:
    found = table(sweep(), "perplexity")
    assert column(found, "budget") == ["–", "–", *["64", "128", "256", "512"] * 2]
    assert "bits" not in keys(found)


def test_intervals_stand_in_the_cells() -> None:
    found = table(rows(), "perplexity")
    assert column(found, "ppl")[0] == "22.31 [21.42, 23.43]"
    assert column(found, "nll_minus_full")[3] == "+0.069 [+0.059, +0.079]"
    assert "±" in next(c for c in found.columns if c.key == "ppl").compact[0]


def test_latency_and_memory_have_a_line_per_context_and_share_the_slope() -> None:
    found = table(rows(), "latency")
    assert len(column(found, "method")) == 3 * len(METHODS)
    assert column(found, "slope_ms_per_1k")[0] == column(found, "slope_ms_per_1k")[len(METHODS)] == "6.00"
    # A slope over contexts knows no context, kernel or batch of its own.
    made = [
        replace(row, kernel=None, batch=None) if row.metric == "slope_ms_per_1k" else row
        for row in rows(measures=["latency"])
    ]
    assert column(table(made, "latency"), "slope_ms_per_1k") == column(found, "slope_ms_per_1k")
    held = next(c for c in table(rows(), "memory").columns if c.key == "held_bytes")
    assert held.header == "held MiB" and held.full[0] == "22.5"
    assert "held_bytes.codes" in keys(table(rows(), "memory_parts"))


def test_needle_counts_hits_once_although_a_row_pools_the_depths() -> None:
    found = table(rows(), "needle")
    assert column(found, "hits")[0] == "24/24"
    grid = table(rows(), "needle_grid")
    assert [key for key in keys(grid) if key.startswith("depth")] == ["depth_0.1", "depth_0.5", "depth_0.9"]
    assert column(grid, "rate")[0] == "100% [70%, 100%]"
    single = [found.name for found in build_tables(rows(lengths=[1024], measures=["needle"]))]
    assert single == ["needle"]


def test_a_later_run_replaces_what_an_earlier_one_measured() -> None:
    old = rows(measures=["perplexity"])
    new = [replace(row, run="later", value=30.0, low=29.0, high=31.0) for row in old if row.metric == "ppl"]
    found = table([*old, *new], "perplexity")
    assert column(found, "ppl")[0] == "30.00 [29.00, 31.00]"
    assert len(column(found, "ppl")) == len(METHODS)
    assert any("measured again" in part for part in found.caption)
    failed = replace(new[0], value=None, status="failed", note="lost")
    assert column(table([*old, *new, failed], "perplexity"), "ppl")[0] == "30.00 [29.00, 31.00]"


def test_failed_cells_stay_in_the_table() -> None:
    found = table([*rows(), OOM], "latency")
    assert column(found, "status").count("oom") == 1
    position = column(found, "status").index("oom")
    assert column(found, "tpot_p50_ms")[position] == "–"


def test_an_unknown_measure_gets_a_table_of_its_own() -> None:
    made = [replace(BASE, method="full", measure="fidelity", metric="length_ratio", value=1.25)]
    assert column(table(made, "fidelity"), "length_ratio") == ["1.25"]


def test_baseline_is_looked_for_in_the_same_setting() -> None:
    made = rows(measures=["perplexity"]) + rows(measures=["perplexity"], base=replace(BASE, dtype="bfloat16"))
    lines = lines_of(made, "perplexity")
    for line in lines:
        base = baseline_of(line, lines)
        assert base is not None and base.baseline and base.row.dtype == line.row.dtype
    assert baseline_of(lines[1], [line for line in lines if not line.baseline]) is None


def test_what_a_step_reads_stands_beside_its_time() -> None:
    made = [
        replace(BASE, method="full", measure="latency", metric=metric, value=value, unit=unit)
        for metric, value, unit in (("tpot_p50_ms", 12.5, "ms"), ("bytes_per_s", 3 * 2**30, "bytes/s"))
    ]
    assert column(table(made, "latency"), "bytes_per_s") == ["3.00"]


# Metrics whose columns no file lists, and those of the paging measure.
STORED = [
    replace(BASE, method="full", store="dense"),
    replace(BASE, method="full", store="paged", bits=4, k_bits=4, v_bits=4, knobs='{"inner": "int4"}'),
]
UNLISTED = [
    replace(base, measure="speed_of_light", metric=f"metric_{n}_bytes", unit="bytes", value=1e6 + n)
    for n in range(9)
    for base in STORED
]
PAGING = [
    replace(base, measure="paging", metric=metric, unit="bytes", value=1e6 + n)
    for base in STORED
    for n, metric in enumerate(
        (
            "contiguous_bytes",
            "contiguous_waste_bytes",
            "paged_bytes",
            "paged_waste_bytes",
            "shared_bytes",
            "saved_bytes",
            "positions_saved",
        )
    )
]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(
    "made", [rows(), sweep(), [*rows(), OOM], rows(contexts=[2048], lengths=[1024]), UNLISTED, PAGING]
)
def test_terminal_table_fits_without_cutting_a_number(made: list[Row], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(frame_of(made)))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = set(text.split())
    for found in build_tables(made):
        for shown in found.columns:
            if found.terminal and not shown.left and shown.rank == 0:
                assert {word for cell in shown.compact for word in cell.split()} <= words


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_compiles_and_no_table_is_wider_than_the_page(tmp_path: Path) -> None:
    found = [*build_tables([*sweep(), OOM]), overview(groups_of(rows()))]
    odd = replace(table(rows(), "memory"), name="odd", title="50% & $x_1 ~ #\\{}^ <a>", caption=["±", "Δ–†"])
    body = "\n".join(to_latex(one) for one in [*found, odd] if one is not None)
    packages = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    (tmp_path / "all.tex").write_text(rf"{packages}{body}\end{{document}}", encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_terminal_table_of_nothing_and_of_failures_only() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table(frame_of([])))
    console.print(terminal_table(frame_of([OOM])))
    assert "tried 2 GiB" in console.export_text()


def test_frame_and_rows_are_the_same_thing() -> None:
    made = [*rows(), OOM, Row(knobs="{}", converted=True)]
    assert rows_of(frame_of(made)) == made


# warnings


def test_a_sound_comparison_has_no_warnings() -> None:
    assert kinds(rows()) == []


@pytest.mark.parametrize("engaged", [0.0, None])
def test_what_did_not_engage_is_named(engaged: float | None) -> None:
    h2o = [method for method in METHODS if method[:2] in (("full", "dense"), ("h2o", "dense"))]
    made = [
        replace(row, value=engaged) if row.metric == "engaged" and row.method == "h2o" else row
        for row in rows(h2o, measures=["perplexity"])
    ]
    (finding,) = find_all(made)
    assert finding.kind == "did not engage" and finding.text.startswith("h2o, perplexity at context 1,024")


def test_hardly_engaged() -> None:
    made = [replace(row, value=0.1) if row.metric == "engaged" and row.value else row for row in rows()]
    assert set(kinds(made)) == {"hardly engaged"}


def test_better_than_full_only_beyond_the_interval() -> None:
    made = rows(measures=["perplexity"])
    better = [
        replace(row, value=-0.02, low=-0.03, high=-0.01)
        if row.metric == "nll_minus_full" and row.method == "kivi2"
        else row
        for row in made
    ]
    assert kinds(better) == ["better than full"]
    within = [replace(row, high=0.01) if row.value == -0.02 else row for row in better]
    assert kinds(within) == []


def test_more_needles_than_full_beyond_the_interval() -> None:
    made = [
        replace(row, value=0.3, low=0.2, high=0.4)
        if row.metric == "hit_rate" and row.method == "full"
        else replace(row, low=0.5, high=1.0)
        if row.metric == "hit_rate" and row.method == "kivi8"
        else row
        for row in rows(measures=["needle"], lengths=[1024])
    ]
    better = [finding.text for finding in find_all(made) if finding.kind == "better than full"]
    assert sum(text.startswith("kivi8, needle at context 1,024") for text in better) == 4  # three depths, and all
    assert not any(text.startswith("full,") for text in better)


def test_uninformative_needles_are_marked() -> None:
    made = [
        replace(row, value=0.25 if row.metric == "hit_rate" else 1.0)
        if row.measure == "needle"
        and row.method == "full"
        and (row.context, row.depth) == (2048, 0.5)
        and row.metric in ("hit_rate", "hits")
        else row
        for row in rows(measures=["needle"])
    ]
    assert kinds(made) == ["uninformative"]
    (said,) = find_all([replace(row, protocol="niah_single_1") for row in made])
    assert said.text.startswith("needle niah_single_1 at length 2048, depth 0.5: the full cache itself finds 1/")
    grid = table(made, "needle_grid")
    marked = [cell for cell in column(grid, "depth_0.5") if cell.endswith("†")]
    assert len(marked) == len(METHODS)


def test_failures_missing_numbers_and_notes() -> None:
    made = rows(measures=["perplexity"])
    made = [replace(row, value=None) if row.metric == "kl" and row.method == "kivi2" else row for row in made]
    made.append(replace(OOM, note="line one\nline two"))
    made.append(replace(OOM, method="random", status="skipped", note=None))
    found = find_all(made)
    assert [finding.kind for finding in found] == ["not a number", "oom", "skipped"]
    assert found[1].text.endswith("line one line two") and found[2].text.endswith("no reason recorded")
    assert [finding.kind for finding in find_all([], {"run": {"status": "failed", "error": "boom"}})] == ["run failed"]
    assert [finding.kind for finding in find_all([], {"run": {"status": "running"}})] == ["still running"]
    assert find_all([], {"run": {"status": "ok"}}) == []


def test_notes_are_warnings_unless_the_baseline_carries_them_too() -> None:
    made = [replace(row, note="4 windows") for row in rows(measures=["perplexity"])]
    assert kinds(made) == [] and len(remarks(made)) == 1
    made = [replace(row, note="float32 angles") if row.method == "streaming_llm" else row for row in rows()]
    (finding,) = find_all(made)
    assert finding.kind == "note" and finding.text.count("streaming_llm (") == 4


def test_eager_steps_beside_captured_ones_are_named() -> None:
    def timed(**kernels: str) -> list[Row]:
        made = rows(measures=["latency"], base=replace(BASE, device="cuda"))
        return [replace(row, kernel=kernels.get(str(row.method), "triton" + GRAPH)) for row in made]

    (finding,) = find_all(timed(h2o="reference", random="triton"))
    assert finding.kind == "eager beside captured" and finding.text.startswith("h2o, h2o+int4, random: ")
    assert "latency.graph=false" in finding.text
    assert find_all(timed()) == find_all([replace(row, kernel="triton") for row in timed()]) == []
    on_cpu = [replace(row, device="cpu", kernel="cpu-c++") for row in timed()]
    assert find_all([*timed(), *on_cpu]) == []
    assert "triton, graph" in column(table(timed(h2o="reference"), "latency"), "kernel")


def test_needle_without_a_baseline_says_so() -> None:
    made = [row for row in rows(measures=["needle"]) if row.method != "full"]
    assert kinds(made) == ["no baseline"]


def test_what_is_said_of_many_methods_is_one_warning() -> None:
    made = rows(measures=["latency"], contexts=[512])
    steady = [
        replace(row, metric="steady", value=0.0, note="unsteady: it drifted")
        for row in made
        if row.metric == "tpot_p50_ms"
    ]
    (finding,) = find_all([*made, *steady])
    assert finding.text.startswith("full, kivi8, kivi4, ") and finding.text.endswith("at context 512: it drifted")


# looks


def test_colours_are_distinct_and_stable_for_twelve_methods() -> None:
    found = styles(["full", *SHIPPED])
    assert len({found[name].colour for name in ("full", *SHIPPED)}) == 13
    for name in SHIPPED:  # the colour does not depend on who else is there
        assert styles([name])[name] == styles([name, "full", "h2o+int4"])[name] == found[name]


def test_any_24_methods_are_distinguishable() -> None:
    names = [f"method_{index}+int4" for index in range(24)]
    found = styles(names)
    assert len({(found[name].colour, found[name].marker, found[name].hollow) for name in names}) == 24
    assert len({found[name].colour for name in names[: len(PALETTE)]}) <= len(PALETTE)


def test_units() -> None:
    assert [units.significant(value) for value in (0, 1234.5, 22.31, 0.01234, float("inf"))] == [
        "0",
        "1,234",
        "22.3",
        "0.0123",
        "inf",
    ]
    assert [units.percent(value) for value in (1, 0.9999, 0.0001, 0, 0.5)] == ["100%", ">99.9%", "<0.1%", "0%", "50.0%"]
    assert [units.signed(value) for value in (0.0123, -2.6e-5, 0)] == ["+0.0123", "-2.6e-05", "0"]
    bounds = ((0.1, 0.17), (-0.005, 0.008), (0.0, 2e-6), (None, None))
    assert [units.within(units.signed, low, high)(0.00152) for low, high in bounds] == [
        "+0.002",
        "+0.0015",
        "+0.00152",
        "+0.00152",
    ]
    assert [units.fixed_text(value, 2) for value in (24.014, 17165.3, 1e12)] == ["24.01", "17,165", "1.00e+12"]
    assert [units.significant(value) for value in (1e-12, 2.5e20)] == ["1.00e-12", "2.50e+20"]
    assert units.in_bytes([2**20, 3 * 2**30])[0] == "GiB"
    assert units.in_bytes([])[0] == "B"


# plots


def boxes_of_texts(figure: Figure, axes: Axes) -> list[tuple[str, Bbox]]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    annotations = [child for child in axes.texts if isinstance(child, Annotation) and child.get_text()]
    return [(label.get_text(), Text.get_window_extent(label, renderer)) for label in annotations]


@pytest.mark.parametrize("made", [rows(), sweep(), rows() + rows(base=replace(BASE, model="org/Other"))])
def test_labels_beside_points_overlap_neither_each_other_nor_a_point(made: list[Row]) -> None:
    figure = perplexity_bytes(made)
    assert figure is not None
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = boxes_of_texts(figure, axes)
        texts = {text for text, _ in boxes}
        assert {"full", "kivi4"} <= texts and any(text.startswith("h2o") for text in texts)
        for (_, one), (_, other) in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        frame = axes.get_window_extent()
        for _, box in boxes:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        marked = [line for line in axes.get_lines() if line.get_marker() not in ("None", "", None)]
        for line in marked:
            for point in axes.transData.transform(line.get_xydata()):
                assert not any(box.contains(*point) for _, box in boxes)


def test_a_crowded_sweep_still_names_every_method() -> None:
    swept = [
        (name, store, {"budget": budget}, ppl + 100 / budget, budget / 1024)
        for name, store, _, ppl, _ in METHODS
        if name in ("h2o", "streaming_llm", "random")
        for budget in (64, 96, 128, 192, 256, 384, 512, 640, 768, 896)
    ]
    made = rows([*METHODS[:4], *swept])
    figure = perplexity_bytes([*made, *(replace(row, model="org/Other") for row in made)])
    assert figure is not None
    figure.canvas.draw()
    for axes in figure.axes:
        shown = {text for text, _ in boxes_of_texts(figure, axes)}
        assert {method for method, *_ in METHODS[:4]} <= shown
        assert {f"{name} 896" for name in ("h2o", "h2o+int4", "streaming_llm", "random")} <= shown


def test_every_label_that_is_a_method_is_written() -> None:
    figure = perplexity_bytes(rows())
    assert figure is not None
    figure.canvas.draw()
    shown = {text for text, _ in boxes_of_texts(figure, figure.axes[0])}
    assert shown == {display_name(Row(method=method, store=store)) for method, store, *_ in METHODS}


@pytest.mark.parametrize("draw", [needle_maps, tpot_context, memory_context])
@pytest.mark.parametrize("made", [rows(), sweep(), rows(contexts=[64, 512, 1024, 2048, 32768], lengths=[1024])])
def test_tick_labels_and_legend_overlap_nothing(draw: object, made: list[Row]) -> None:
    figure = draw(made)  # type: ignore[operator]
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]
            ticks = [box for box in ticks if box.width and box.height]
            for one, other in itertools.pairwise(ticks):
                assert not one.overlaps(other)
        for legend in figure.legends:
            assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent())
    for legend in figure.legends:
        box, page = legend.get_window_extent(renderer), figure.bbox
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


def test_plots_are_written_twice_and_hold_something(tmp_path: Path) -> None:
    drawn = draw_all(rows(), tmp_path)
    assert [plot.file for plot in drawn] == [
        "perplexity_bytes.png",
        "quality_bytes.png",
        "needle.png",
        "latency_context.png",
        "bandwidth.png",
        "memory_context.png",
    ]
    for plot in drawn:
        image = plt.imread(tmp_path / plot.file)
        assert image.shape[1] > 1000 and image[..., :3].std() > 0.05
        assert (tmp_path / plot.file).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert plot.caption in plot.alt


@pytest.mark.parametrize(
    ("measures", "files"),
    [
        (["perplexity"], []),
        (["needle"], ["needle"]),
        (["latency"], ["latency_context", "bandwidth"]),
        (["memory"], ["memory_context"]),
        ([], []),
    ],
)
def test_each_plot_only_if_its_rows_exist(tmp_path: Path, measures: list[str], files: list[str]) -> None:
    assert [plot.file for plot in draw_all(rows(measures=measures), tmp_path)] == [f"{file}.png" for file in files]
    assert {file.stem for file in tmp_path.iterdir()} == set(files)


def test_bytes_come_from_the_perplexity_run_itself_if_it_counted_them() -> None:
    made = rows(measures=["perplexity"])
    counted = [replace(row, metric="held_bytes", value=2.0**20, batch=4) for row in made if row.metric == "ppl"]
    figure = perplexity_bytes([*[replace(row, batch=4) for row in made], *counted])
    assert figure is not None
    marked = [line for line in figure.axes[0].get_lines() if line.get_marker() not in ("None", "", None)]
    held = np.concatenate([np.asarray(line.get_xydata())[:, 0] for line in marked])
    assert set(held.tolist()) == {256.0}  # KiB per sequence


def test_undefined_and_infinite_numbers_break_no_plot(tmp_path: Path) -> None:
    made = rows(measures=["perplexity", "memory", "latency"], contexts=[1024])
    made = [replace(row, value=float("inf")) if row.metric == "ppl" and row.method == "random" else row for row in made]
    made = [replace(row, value=None) if row.metric == "tpot_p90_ms" else row for row in made]
    assert len(draw_all(made, tmp_path)) == 5


# the command


def run_of(where: Path, made: Sequence[Row], status: str = "ok") -> RunFolder:
    run = RunFolder.create(where, "test", {}, {"command": "python -m kvbench 'compare=[full,h2o]'", "packages": {}})
    if made:
        run.add(made)
    if status != "running":
        run.finish(status, error=None if status == "ok" else "it broke")
    return run


def test_report_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, rows())
    assert main([str(run.path)]) == 0
    page = run.path / "report" / "report.md"
    assert capsys.readouterr().out.strip() == str(page.with_suffix(".html"))
    text = page.read_text()
    assert text.startswith("# KV cache comparison: Toy-135M\n")
    assert "python -m kvbench 'compare=[full,h2o]'" in text and "None: every method engaged" in text
    linked = [word.split(")")[0] for word in text.split("](")[1:]]
    assert linked and all((page.parent / name).stat().st_size > 0 for name in linked)
    with open(page.parent / "perplexity.csv") as file:
        records = list(csv.DictReader(file))
    assert float(records[0]["ppl"]) == 22.31 and records[0]["model"] == "org/Toy-135M"
    assert {record["method_shown"] for record in records} == {"full", "h2o+int4", *(m for m, *_ in METHODS)}
    assert main([str(run.path)]) == 0  # and again over the old one, which is no run


def test_report_of_a_sweep_with_failed_and_running_cells(tmp_path: Path) -> None:
    run_of(tmp_path / "sweep", rows(measures=["perplexity"]))
    run_of(tmp_path / "sweep", [OOM], status="failed")
    run_of(tmp_path / "sweep", [], status="running")
    assert main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    for expected in ("3 runs", "**run failed**", "it broke", "**still running**", "**oom**", "tried 2 GiB", "22.31"):
        assert expected in text


def test_report_of_runs_without_any_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, [], status="failed")
    assert main([str(run.path)]) == 0
    assert "it broke" in (run.path / "report" / "report.md").read_text()


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    run = run_of(tmp_path, [replace(OOM, note="<script> | **x** [a](b) `c`")])
    assert main([str(run.path)]) == 0
    text = (run.path / "report" / "report.md").read_text()
    assert "<script>" not in text.replace("\\<script>", "") and "[a](b)" not in text


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "runs", rows(measures=["memory"]))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        ([], "PATH"),
        ([tmp_path / "nowhere"], "no such file or folder"),
        ([tmp_path / "empty"], "no run folder in"),
        ([tmp_path / "file"], "neither a run folder nor"),
        ([run.path, run.path], "--out DIR"),
        ([run.path, "--out", tmp_path / "file"], "is a file"),
        ([run.path, "--pdf"], "--pdf"),
    ):
        assert main([str(word) for word in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_module_call_without_arguments_and_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.report"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "python -m kvbench.report" in done.stderr
    run = run_of(tmp_path, rows())
    code = (
        "import sys; from kvbench.report.__main__ import main\n"
        f"assert main([{str(run.path)!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_ten_thousand_rows_are_read_and_tabled(tmp_path: Path) -> None:
    seeds = [rows(base=replace(BASE, seed=seed, model=f"org/Model-{seed}")) for seed in range(20)]
    made = list(itertools.chain(*seeds))
    assert len(made) > 10_000
    tables = build_tables(made)
    assert len(column(next(found for found in tables if found.name == "latency"), "method")) == 20 * 3 * len(METHODS)
