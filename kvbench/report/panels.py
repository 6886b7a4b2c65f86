"""What all plots share: figures of one or more panels, one panel for each setting that may be compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")  # before pyplot: reports are built on machines without a display

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from kvbench.report.columns import heads_text, short_model
from kvbench.report.lines import Line
from kvbench.report.names import config_of, labels
from kvbench.report.style import FAINT, RC, WIDTH
from kvbench.results.row import Row

# Lines of one panel share these; KV heads do not tell panels apart, so that architectures stand beside each other.
SETTING = ("model", "dataset", "question", "batch", "dtype", "device")
WIDEST = 28  # characters of a name in a legend beside the panels
LONGEST = 46  # characters of a name in a legend or on an axis
CHARACTER = 0.6  # mean width of one, as a share of the font size
# What a figure that shows one setting only holds fixed.
PLACE = ("model", "kv_heads", "converted", "dataset", "context", "dtype", "device")
# Where two lines of one panel would carry one label, what tells them apart.
FINE = ("kernel", "protocol", "threads", "revision", "kv_heads", "converted", "seed")


@dataclass(frozen=True)
class Drawn:
    """A line with the label and the display name it is drawn under."""

    line: Line
    label: str
    name: str


def grouped(lines: Sequence[Line], axes: Sequence[str] = SETTING) -> dict[str, list[Drawn]]:
    """Lines by comparable setting; the key is the panel's title and says only what differs between panels."""
    names = labels([line.row for line in lines])
    varying = [name for name in axes if len({getattr(line.row, name) for line in lines}) > 1]
    models = {line.row.model for line in lines}
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(", ".join(_words(varying, line.row, models)), []).append(line)
    result = {}
    for title, members in groups.items():
        fine = [name for name in FINE if _tells(name, members)]
        result[title] = [
            Drawn(line, " ".join([names[config_of(line.row)], *_words(fine, line.row)]), line.name) for line in members
        ]
    return result


def _tells(name: str, lines: Sequence[Line]) -> bool:
    """True if the same config was measured under several values of this column."""
    seen: dict[object, set[object]] = {}
    for line in lines:
        seen.setdefault((config_of(line.row), line.row.context), set()).add(getattr(line.row, name))
    return any(len(values) > 1 for values in seen.values())


def _words(names: Sequence[str], row: Row, models: Iterable[str | None] = ()) -> list[str]:
    """What the row's columns of these names say, those that say nothing left out."""
    return [said for name in names if (said := _said(name, row, models))]


def _said(name: str, row: Row, models: Iterable[str | None]) -> str:
    value = getattr(row, name)
    if name == "model":
        return short_model(value, models)
    if name in ("dtype", "device", "kernel", "dataset", "protocol"):
        return str(value)
    if name == "converted":
        return "converted" if value else ""
    if name == "kv_heads":
        return heads_text(value)
    return f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name} {value}"


def figure_of(count: int, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page's text with `count` panels, each `height` inches high."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False)
    flat = list(grid.flat)
    for spare in flat[count:]:
        spare.remove()
    return figure, flat[:count]


def width(count: int, columns: int = 2) -> float:
    """Inches of each of `count` panels, as `figure_of` sets them."""
    return WIDTH / min(columns, count) - 0.5


def place_of(row: Row) -> tuple[object, ...]:
    """What a figure of one setting holds fixed."""
    return tuple(getattr(row, name) for name in PLACE)


def titled(figure: Figure, row: Row, rows: Iterable[Row]) -> Figure:
    """The figure of one setting, which is named above it if the rows hold several."""
    known = list(rows)
    told = [name for name in PLACE if len({getattr(other, name) for other in known}) > 1]
    if words := _words(told, row, {other.model for other in known}):
        figure.suptitle(fitted(", ".join(words), WIDTH), fontsize=9)
    return figure


def styled() -> AbstractContextManager[None]:
    """Context under which every figure is made and saved."""
    return plt.rc_context(RC)  # type: ignore[arg-type]


def plain_log(axes: Axes, which: str, values: Sequence[float], most: int = 12) -> None:
    """A logarithmic axis with a few round numbers, at most `most`, written out, never 2 x 10^1."""
    low, high = min(values), max(values)
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if high < 1.2 * low:  # left to itself the axis would span two decades
        (axes.set_xlim if which == "x" else axes.set_ylim)(low / 1.5, high * 1.5)
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low * 0.8 <= tick <= high * 1.25]
        if len(ticks) >= min(4, most - 1):
            break
    ticks = ticks[:: math.ceil(len(ticks) / most)]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def context_axis(axes: Axes, contexts: Sequence[int], panels: int) -> bool:
    """The x axis of everything that is plotted against context, each measured length written out.

    Linear as long as the ticks have room, because what grows with context grows linearly. True if it had to
    be logarithmic.
    """
    ticks = sorted(set(contexts))
    width = (WIDTH - 1.5) / min(panels, 2) - 0.5  # inches, next to a legend
    gaps = [width * (after - before) / (ticks[-1] - ticks[0]) for before, after in itertools.pairwise(ticks)]
    logarithmic = min(gaps, default=width) < 0.4
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, tokens(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context, tokens")
    return logarithmic


def tokens(lengths: Sequence[int | None]) -> list[str]:
    """Lengths as tick labels: `512 1,024 2,048`, or `512 1k 16k` where many or large ones have to fit."""
    known = [length for length in lengths if length is not None]
    short = len(known) > 3 and max(known) >= 4096 and all(n % 1024 == 0 for n in known if n > 1024)
    return ["?" if n is None else f"{n // 1024}k" if short and n >= 1024 else f"{n:,}" for n in lengths]


def fitted(text: str, inches: float, size: float = 9) -> str:
    """The text in at most two lines of this width at this font size; what is longer still loses its middle."""
    most = max(8, int(inches * 72 / (CHARACTER * size)))
    if len(text) <= most:
        return text
    cut = max((text.rfind(sign, 0, most) for sign in (" ", "_", "+", "/", "-")), default=-1) + 1 or most
    return f"{text[:cut].rstrip()}\n{shortened(text[cut:].lstrip(), most)}"


def shortened(text: str, most: int = LONGEST) -> str:
    """`an_exceedingly_long_name` -> `an_exceed…name`: no more than this many characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[len(text) - tail :]}"


def draw_front(axes: Axes, front: Sequence[tuple[float, float]]) -> None:
    """A Pareto front as thin steps behind everything else: from one of its points the next is had for more bytes."""
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color=FAINT, linewidth=0.7, alpha=0.8, zorder=1)


def legend_below(figure: Figure, entries: Sequence[Artist]) -> None:
    """One legend under all panels, in as many columns as the names allow; the figure grows by its height."""
    names = [shortened(str(entry.get_label())) for entry in entries]
    columns = max(1, min(6, int(WIDTH / (0.55 + 0.075 * max(map(len, names))))))
    figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(names) / columns))
    figure.legend(entries, names, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.0)


def legend_outside(figure: Figure, entries: Sequence[Artist]) -> None:
    """One legend right of all panels, where it covers nothing; below where names are long. Labels: the artists' own."""
    names = [str(entry.get_label()) for entry in entries]
    if max(map(len, names), default=0) > WIDEST:
        return legend_below(figure, entries)
    figure.legend(entries, names, loc="outside right upper", frameon=False, handlelength=2.6)
