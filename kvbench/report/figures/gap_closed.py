"""How much of the gap between random eviction and hindsight each keep rule closes, one panel for each metric."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from kvbench.report.compare.comparison import Line, config_of, lines_of
from kvbench.report.compare.names import SEES_FUTURE, labels
from kvbench.report.figures import layout
from kvbench.report.figures.layout import Plot, setting_of, titled
from kvbench.report.figures.method_panels import extremes
from kvbench.report.figures.style import FAINT, INK, mark_of
from kvbench.results.row import Row

METRICS = {"gap_closed_kl": "gap closed in KL", "gap_closed_nll": "gap closed in NLL"}
MOST = 40
"""Rules that fit a page: those that close most."""
REACH = (-1.0, 1.5)
"""Shares that the axis holds. Intervals end at its edges, and so do values beyond."""


def gap_closed_dots(rows: Sequence[Row]) -> Plot | None:
    """0%: random eviction; 100%: hindsight. Rules sorted by the first metric; None without such rows."""
    lines = [line for line in lines_of(rows, "perplexity") if any(_known(line, metric) for metric in METRICS)]
    if not lines:
        return None
    same = [line for line in lines if setting_of(line.row) == setting_of(lines[0].row)]
    metrics = [metric for metric in METRICS if any(_known(line, metric) for line in same)]
    same = sorted(same, key=lambda line: -(line.value(metrics[0]) or 0))[:MOST]
    names = labels([line.row for line in same])
    figure, axes_list = layout.figure_of(len(metrics), 0.8 + 0.19 * len(same))
    says = []
    for axes, metric in zip(axes_list, metrics, strict=True):
        values = {names[config_of(line.row)]: line.value(metric) or 0 for line in same if _known(line, metric)}
        _panel(axes, same, metric)
        axes.set_yticks(range(len(same)), [layout.shortened(names[config_of(line.row)], 28) for line in same])
        axes.tick_params(axis="y", length=0, labelleft=axes is axes_list[0])
        says.append(f"{METRICS[metric]}: {extremes(values, lambda value: f'{100 * value:.0f}%')}.")
    return Plot(titled(figure, same[0].row, [line.row for line in lines]), f"{len(same)} keep rules. " + " ".join(says))


def _known(line: Line, metric: str) -> Row | None:
    row = line.get(metric)
    return row if row is not None and row.value is not None and abs(row.value) < float("inf") else None


def _panel(axes: Axes, lines: Sequence[Line], metric: str) -> None:
    drawn = [0.0, 1.0]
    for y, line in enumerate(lines):
        row = _known(line, metric)
        if row is None or row.value is None:
            continue
        low, high = (row.value if bound is None else bound for bound in (row.low, row.high))
        ends = [100 * min(max(bound, REACH[0]), REACH[1]) for bound in (low, row.value, high)]
        drawn += [end / 100 for end in ends]
        axes.plot([ends[0], ends[2]], [y, y], color=mark_of(line.row)["color"], linewidth=1.1, alpha=0.6)
        axes.plot([ends[1]], [y], linestyle="none", markersize=5, clip_on=False, **mark_of(line.row))
    for share, style in ((0, (0, (4, 3))), (100, "-")):
        axes.axvline(share, color=FAINT if share == 0 else INK, linewidth=0.8, linestyle=style, zorder=1)
    axes.set_xlim(100 * min(drawn) - 5, 100 * max(drawn) + 5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axes.set_xlabel(f"{METRICS[metric]}\n0%: random\n100%: hindsight ({SEES_FUTURE})", fontsize=8)
