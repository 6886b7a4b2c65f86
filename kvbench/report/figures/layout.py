"""Layout of figures: panels of comparable lines, axes, legends, and texts that fit."""

from __future__ import annotations

import math
import textwrap
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

from kvbench.report.compare.comparison import COMPARED, Line, config_of, layout_of
from kvbench.report.compare.names import heads_text, labels, short_model
from kvbench.report.figures.style import RC, WIDTH
from kvbench.results.row import Row

LONGEST = 46
"""Characters of a name in a legend below the panels or on an axis."""
CHARACTER = 0.6
"""Mean width of a character, as a share of the font size."""
ARCHITECTURE = ("kv_heads", "converted")
ONE_SETTING = (*COMPARED, "context")
"""Columns that are equal throughout a figure of one setting."""
FINE = ("kernel", "protocol", "threads", "revision", "kv_heads", "converted", "seed")
"""Columns that are added to a label where two lines of one panel would have the same one."""


@dataclass(frozen=True)
class Plot:
    """A figure, and sentences with its main numbers for readers who do not see it."""

    figure: Figure
    says: str


@dataclass(frozen=True)
class Drawn:
    """A line with the label that it is drawn under."""

    line: Line
    label: str


def grouped(
    lines: Sequence[Line], *, by_context: bool = False, join_architectures: bool = False, any_batch: bool = False
) -> dict[str, list[Drawn]]:
    """Lines that may be compared share a panel; the key is the panel's title and names only what differs.

    by_context: a panel for each context. join_architectures: KV heads and MLA layouts of one model share a panel and
    differ in their labels. any_batch: batch sizes share a panel too, for quality, which does not depend on them.
    """
    names = labels([line.row for line in lines])
    joined = [*(ARCHITECTURE if join_architectures else ()), *(["batch"] if any_batch else [])]
    columns = [name for name in (*COMPARED, *(["context"] if by_context else [])) if name not in joined]
    varying = [name for name in columns if len({getattr(line.row, name) for line in lines}) > 1]
    models = {line.row.model for line in lines}
    layouts = not join_architectures and len({layout_of(line.row) for line in lines}) > 1
    groups: dict[str, list[Line]] = {}
    for line in lines:
        words = _words(varying, line.row, models) + ([f"mla {layout_of(line.row)}"] if layouts else [])
        groups.setdefault(", ".join(words), []).append(line)
    result = {}
    for title, members in groups.items():
        fine = [name for name in FINE if _differs(name, members)]
        result[title] = [
            Drawn(line, " ".join([names[config_of(line.row)], *_words(fine, line.row)])) for line in members
        ]
    return result


def _differs(name: str, lines: Sequence[Line]) -> bool:
    """True if one config at one context was measured under several values of this column."""
    seen: dict[object, set[object]] = {}
    for line in lines:
        seen.setdefault((config_of(line.row), line.row.context), set()).add(getattr(line.row, name))
    return any(len(values) > 1 for values in seen.values())


def _words(names: Sequence[str], row: Row, models: Iterable[str | None] = ()) -> list[str]:
    """Values of these columns as words, without those that are empty."""
    return [word for name in names if (word := _word(name, row, models))]


def _word(name: str, row: Row, models: Iterable[str | None]) -> str:
    value = getattr(row, name)
    if name == "model":
        return short_model(value, models)
    if name in ("dtype", "device", "kernel", "dataset", "protocol", "question"):
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


def setting_of(row: Row) -> tuple[object, ...]:
    """Equal for rows that a figure of one setting may show together."""
    return (*(getattr(row, name) for name in ONE_SETTING), layout_of(row))


def titled(figure: Figure, row: Row, rows: Iterable[Row], *shown: str) -> Figure:
    """Names the setting above the figure if the rows of its measure hold several. shown: columns on an axis."""
    known = [other for other in rows if other.measure == row.measure and other.method is not None]
    columns = (name for name in ONE_SETTING if name not in shown)
    varying = [name for name in columns if len({getattr(other, name) for other in known}) > 1]
    if words := _words(varying, row, {other.model for other in known}):
        figure.suptitle(fitted(", ".join(words), WIDTH), fontsize=9)
    return figure


def styled() -> AbstractContextManager[None]:
    """Context in which every figure is made and saved."""
    return plt.rc_context(RC)  # type: ignore[arg-type]


def plain_log(axes: Axes, which: str, values: Sequence[float], most: int = 12) -> None:
    """A logarithmic axis with at most `most` round numbers as ticks, written out: 20, not 2 x 10^1."""
    low, high = min(values), max(values)
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if high < 1.2 * low:  # by default the axis would span two decades
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


def tokens(lengths: Sequence[int | None]) -> list[str]:
    """Lengths as tick labels: `512 1,024 2,048`, or `512 1k 16k` for more than three that reach 4,096."""
    known = [length for length in lengths if length is not None]
    short = len(known) > 3 and max(known) >= 4096 and all(n % 1024 == 0 for n in known if n > 1024)
    return ["?" if n is None else f"{n // 1024}k" if short and n >= 1024 else f"{n:,}" for n in lengths]


def fitted(text: str, inches: float, size: float = 9) -> str:
    """The text in at most two lines of this width at this font size; a longer second line loses its middle."""
    most = max(8, int(inches * 72 / (CHARACTER * size)))
    if len(text) <= most:
        return text
    cut = max((text.rfind(sign, 0, most) for sign in (" ", "_", "+", "/", "-")), default=-1) + 1 or most
    return f"{text[:cut].rstrip()}\n{shortened(text[cut:].lstrip(), most)}"


def wrapped(text: str, inches: float, size: float = 9) -> str:
    """The text in as many lines of this width at this font size as it needs."""
    return "\n".join(textwrap.wrap(text, max(20, int(inches * 72 / (0.53 * size)))))


def shortened(text: str, most: int = LONGEST) -> str:
    """`an_exceedingly_long_name` -> `an_exceed…name`: no more than this many characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[len(text) - tail :]}"


def legend_below(figure: Figure, entries: Sequence[Artist]) -> None:
    """One legend below all panels, in as many columns as the names allow; the figure grows by its height."""
    names = [shortened(str(entry.get_label())) for entry in entries]
    columns = max(1, min(6, int(WIDTH / (0.5 + 0.062 * max(map(len, names))))))
    figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(names) / columns))
    figure.legend(entries, names, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.0)
