"""Whatever rows a sweep holds, running, failed or degenerate: the report is whole, silent, and draws no nonsense."""

from __future__ import annotations

import io
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from kvbench.errors import SkippedFile
from kvbench.report.__main__ import main
from kvbench.report.advice.answer_card import answer_card
from kvbench.report.advice.banner import banner
from kvbench.report.advice.summary import summary
from kvbench.report.compare.comparison import is_baseline
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.warnings import find_warnings, remarks
from kvbench.report.compare.window_samples import WindowSample, read_samples
from kvbench.report.compare.window_verdicts import NO_EVIDENCE
from kvbench.report.figures.all_figures import FIGURES
from kvbench.report.figures.bars import bandwidth_bars
from kvbench.report.figures.layout import styled
from kvbench.report.figures.method_panels import loss_by_window
from kvbench.report.page.commands import RecordedRun, command_of
from kvbench.report.page.table_files import written_forms
from kvbench.report.tables.changes import changes, changes_table
from kvbench.report.tables.measure_tables import build_tables, terminal_table
from kvbench.report.tables.method_tables import overview, traits_table
from kvbench.results.row import KINDS, Row, frame_of, rows_of
from tests.report.synthetic import run_of
from tests.shared.rows import BASE, METHODS, rows

Rows = Sequence[Row]
Change = Callable[[Rows], Rows]
# What a number that is none looks like once it was printed.
NONSENSE = re.compile(r"(?<![\w.])([-+]?(inf|Infinity)\b|NaN\b|None\b(?! of)|\[nan|nan\])")
NOT_DRAWABLE = (math.nan, math.inf, -math.inf, None)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings.catch_warnings(), styled():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", SkippedFile)
        yield
    plt.close("all")


def small() -> list[Row]:
    """Four methods, one of them at two budgets, with every kind of row there is."""
    made = rows(
        [*METHODS[:2], METHODS[3], METHODS[4], ("h2o", "dense", {"budget": 64}, 25.0, 0.1)],
        contexts=(512, 1024),
        lengths=(512, 1024),
        depths=(0.1, 0.9),
    )
    at = [row for row in made if row.metric == "kl" and row.value]
    return made + [replace(row, metric="kl_at", position=1024 + 16 * i) for row in at for i in range(4)]


def setting(**values: object) -> Change:
    return lambda made: [replace(row, **values) for row in made]  # type: ignore[arg-type]


def only(**values: object) -> Change:
    return lambda made: [row for row in made if all(getattr(row, name) in (v, None) for name, v in values.items())]


def equal_to_full(made: Rows) -> Rows:
    """Every number is the full cache's: KL 0, as in the first cells of a sweep that still runs."""
    full = {(row.measure, row.metric, row.context, row.depth): row.value for row in made if is_baseline(row)}
    known = [replace(row, value=full.get((row.measure, row.metric, row.context, row.depth), 0.0)) for row in made]
    return [replace(row, low=row.value, high=row.value) if row.low is not None else row for row in known]


def reversed_intervals(made: Rows) -> Rows:
    return [replace(row, low=row.high, high=row.low) for row in made]


def long_names(made: Rows) -> Rows:
    name = "a_method_whose_name_is_longer_than_any_axis_or_legend_can_hold_{}_with_its_end"
    return [row if is_baseline(row) else replace(row, method=name.format(row.method)) for row in made]


def two_of_one_name(made: Rows) -> Rows:
    return [*made, *setting(model="another/Toy-135M")(made)]


def many(made: Rows) -> Rows:
    methods = [(f"method_{i}", "int4" if i % 2 else "dense", {"budget": 2.0**i}, 23.0 + i, 0.5) for i in range(5, 25)]
    return rows([METHODS[0], *methods], contexts=(512,), lengths=(1024,), depths=(0.5,))


def failed(made: Rows) -> Rows:
    return [replace(row, status="failed", metric=None, value=None, low=None, high=None) for row in made]


CASES: dict[str, Change] = {
    "as they are": lambda made: made,
    "nothing": lambda made: [],
    "equal to full": equal_to_full,
    "no baseline": lambda made: [row for row in made if not is_baseline(row)],
    "one method": only(method="h2o"),
    "one context": only(context=1024),
    "one row a method": lambda made: [row for row in made if row.metric in ("ppl", "held_bytes")][::3],
    "all zero": setting(value=0.0, low=0.0, high=0.0),
    "all one": setting(value=1.0, low=1.0, high=1.0),
    "all negative": setting(value=-1.0, low=-2.0, high=0.0),
    "all huge": setting(value=1e12, low=1e11, high=1e13),
    "all beyond": setting(value=1e300, low=-1e300, high=1e300),
    "all nan": setting(value=math.nan, low=math.nan, high=math.inf),
    "no intervals": setting(low=None, high=None),
    "intervals reversed": reversed_intervals,
    "intervals infinite": setting(low=-math.inf, high=math.inf),
    "no bytes": lambda made: [replace(row, value=0.0) if "bytes" in str(row.metric) else row for row in made],
    "long names": long_names,
    "two models of one name": two_of_one_name,
    "many methods": many,
    "failed": failed,
    "no settings": setting(model=None, dtype=None, device=None, kernel=None, batch=None, n=None, dataset=None),
    "no context": setting(context=None),
    "no method": lambda made: [replace(row, method=None) if i % 3 == 0 else row for i, row in enumerate(made)],
}
WORDS_ONLY = (
    "as they are",
    "one context",
    "one row a method",
    "intervals reversed",
    "all one",
    "all beyond",
    "no intervals",
    "intervals infinite",
    "failed",
    "no settings",
)
DRAWN = tuple(name for name in CASES if name not in WORDS_ONLY)


def loaded(made: Rows) -> list[Row]:
    return rows_of(frame_of(made))


@pytest.mark.parametrize("case", DRAWN)
def test_figures_are_not_empty_and_have_no_undefined_text(case: str) -> None:
    made = loaded(CASES[case](small()))
    for kind in FIGURES:
        plot = kind.draw(made)
        if plot is not None:
            assert faults(plot.figure) == [], kind.name
            assert plot.says and not NONSENSE.search(plot.says), kind.name
        plt.close("all")


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_a_part_of_the_rows(seed: int) -> None:
    random_rows = loaded(random.Random(seed).sample(small(), 40))
    for kind in FIGURES:
        plot = kind.draw(random_rows)
        assert plot is None or faults(plot.figure) == [], kind.name


def faults(figure: Figure) -> list[str]:
    """Absurd texts, axes without a limit, a tick or anything drawn, and what reaches over the page."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    found = [f"text {text.get_text()}" for text in texts if re.search(r"\b(nan|inf|None)\b", text.get_text())]
    page = figure.bbox.padded(2)
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        if not legend.get_texts() or not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1)):
            found.append("legend empty or over the edge")
    for axes in figure.axes:
        found += _axes_faults(axes, renderer)
        box = axes.title.get_window_extent(renderer)
        if axes.get_title() and not (page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1):
            found.append(f"title over the edge: {axes.get_title()}")
    return found


def _axes_faults(axes: Axes, renderer: object) -> list[str]:
    if axes.get_label() == "<colorbar>":
        return []
    title, frame = axes.get_title(), axes.get_window_extent()
    found = [] if np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all() else [f"no limits: {title}"]
    curves = [line for line in axes.lines if line.get_transform() == axes.transData and len(line.get_xydata())]
    points = [axes.transData.transform(line.get_xydata()) for line in curves]
    inside = any(frame.padded(1).contains(*point) for curve in points for point in curve)
    if not (inside or axes.images or axes.patches or axes.collections):
        found.append(f"empty: {title}")
    if frame.width < 20 or frame.height < 10:
        found.append(f"squeezed: {title}")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        pairs = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=False)
        ticks = [label for place, label in pairs if low <= place <= high and label.get_text() and label.get_visible()]
        boxes = [tick.get_window_extent(renderer) for tick in ticks]  # type: ignore[arg-type]
        boxes = [box for box in boxes if box.width]
        names = [tick.get_text() for tick in ticks]
        if any(one.overlaps(other) for one, other in itertools.pairwise(boxes)):
            found.append(f"ticks overlap: {names}")
        if len(set(names)) < len(names):
            found.append(f"ticks repeat: {names}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_tables_and_sentences_have_no_undefined_number(case: str) -> None:
    said_of(loaded(CASES[case](small())))


@pytest.mark.parametrize("seed", range(15))
def test_tables_and_sentences_of_random_rows(seed: int) -> None:
    pick = random.Random(seed)
    made: Rows = small()
    for _ in range(pick.randint(1, 3)):
        change = CASES[pick.choice(list(CASES))]
        column = pick.choice([name for name in KINDS if name not in ("status", "metric", "measure")])
        odd = pick.choice((*NOT_DRAWABLE, 0.0, -1.0, 1e12))
        made = pick.choice(
            (
                change(made),
                pick.sample(made, min(len(made), 30)),
                setting(**{column: None})(made),
                [replace(row, value=odd) if pick.random() < 0.3 else row for row in made],
            )
        )
    said_of(loaded(made))


def said_of(made: Rows) -> None:
    """Everything that a report says in words and tables, each of them looked at."""
    groups = groups_of(made)
    card = answer_card(groups)
    evidence = banner(made, groups, NO_EVIDENCE, {})
    lines = [] if card is None else card.lines
    sentences = [
        *summary(groups),
        *(text for one in lines for text in (one.setting, one.cost, one.smaller, one.speed, *one.reasons, *one.limits)),
        *(text for _, text in evidence.facts),
        *evidence.warnings,
        *(warning.text for warning in (*find_warnings(made), *remarks(made))),
    ]
    assert [sentence for sentence in sentences if NONSENSE.search(sentence)] == []
    against = changes_table(changes(made[: len(made) // 2], made)[0], made)
    traits = traits_table([group for group in groups if group.members])
    tables = [overview(groups), *build_tables(made), traits, against]
    for table in filter(None, tables):
        forms = written_forms(table)
        for ending in ("md", "tex"):
            assert NONSENSE.search(str(forms[ending])) is None, table.name
        assert all(len(column.full) == len(column.compact) == table.height for column in table.columns)
        numbers = [word for column in table.columns if not column.left for cell in column.full for word in cell.split()]
        assert max(map(len, numbers), default=0) <= 20, table.name
        stored = pq.read_table(io.BytesIO(forms["parquet"]))  # type: ignore[arg-type]
        assert stored.num_rows == len(table.records)
    if made:
        Console(width=100, file=io.StringIO()).print(terminal_table(frame_of(made)))
    for row in made[:20]:
        command_of(row, RecordedRun("python -m kvbench -m method=full,h2o budget=64,128 perplexity.context=64"))


def samples(difference: float) -> list[WindowSample]:
    rule = [replace(BASE, method=name, store="dense", budget=64.0, context=512) for name in ("h2o", "tova")]
    return [WindowSample(row, str(i), difference * i) for row in rule for i in range(4)]


@pytest.mark.parametrize("difference", [0.0, 1e-9, -0.5, 3.0, 1e12])
def test_differences_of_any_size(difference: float) -> None:
    plot = loss_by_window(samples(difference))
    assert plot is not None and faults(plot.figure) == []


def test_samples_ahead_of_the_rows_and_files_cut_short(tmp_path: Path) -> None:
    run = run_of(tmp_path / "sweep", [row for row in small() if row.method == "full"], status="running")
    window = {"measure": "perplexity", "context": 1024}
    for index in range(3):
        methods = [
            {"method": name, "store": "dense", "knobs": {}, "nll": nll}
            for name, nll in (("full", 3.0), ("tova", 3.5), ("h2o", math.nan))
        ]
        run.add_samples([window | {"sha256": str(index), "methods": methods}])
    file = run.path / "samples.jsonl"
    file.write_bytes(file.read_bytes() + b'{"measure": "perplexity", "methods": [{"method": "t\xc3')
    assert {(sample.row.method, sample.row.model) for sample in read_samples([run.path])} == {("tova", BASE.model)}
    for name, content in (("status.json", '{"status"'), ("config.yaml", "a: ["), ("provenance.json", "[1]")):
        (run.path / name).write_text(content)
    assert main([str(tmp_path / "sweep")]) == 0
    page = (tmp_path / "sweep" / "report" / "report.html").read_text()
    assert "run unknown" in page
    assert "window_differences" in (tmp_path / "sweep" / "report" / "details.html").read_text()


ODD_SAMPLES = """1
"x"
{"measure": "perplexity", "methods": 3}
{"measure": "perplexity", "methods": [3, {"method": "full", "nll": "a"}]}
{"measure": "perplexity", "methods": [{"method": "full", "nll": 1}, {"method": "h2o", "nll": 2, "knobs": [1]}]}
{"measure": "perplexity", "methods": [{"method": "full", "nll": 1}, {"method": "h", "nll": 2, "knobs": {"budget": ""}}]}
{"measure": "perplexity", "methods": [{"method": "full", "nll": 1}, {"method": "h", "nll": 2, "knobs": {"budget": 8}}]}
"""


def test_files_of_other_versions_and_malformed_files(tmp_path: Path) -> None:
    run = run_of(tmp_path / "sweep", small()[:60])
    stored = pq.read_table(run.path / "metrics.parquet")
    lacking = ["run", "tokenizer", "bos", "stride", "position", "kernel", "knobs", "kv_heads", "converted"]
    pq.write_table(stored.drop_columns(lacking), run.path / "metrics.parquet")
    (run.path / "samples.jsonl").write_text(ODD_SAMPLES)
    assert {sample.row.budget for sample in read_samples([run.path])} == {None, 8.0}
    (run.path / "status.json").write_text('{"cells_done": 3}')
    (run.path / "provenance.json").write_text('{"command": "python -m kvbench compare=\'[a", "packages": null}')
    assert main([str(tmp_path / "sweep")]) == 0


def test_two_models_of_one_name_are_told_apart() -> None:
    made = two_of_one_name(small())
    head = overview(groups_of(made))
    assert head is not None
    assert {cell for column in head.columns if column.key == "model" for cell in column.full} == {
        "org/Toy-135M",
        "another/Toy-135M",
    }
    titles = {axes.get_title() for axes in bandwidth_bars(made).figure.axes}  # type: ignore[union-attr]
    assert titles == {"org/Toy-135M", "another/Toy-135M"}
