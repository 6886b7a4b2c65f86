"""The y axis of a quality metric: which values it holds, and where clipped ones stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvbench.report.figures.style import FAINT
from kvbench.results.paired import MARGIN

HOPELESS = 0.5
"""Nats: 1.65 times the perplexity. Methods with a larger loss stand at the upper edge."""
LOWEST_KL = 1e-4
"""Nats. Smaller values, zero included, stand at the lower edge of a logarithmic axis."""
LOWEST_DIFFERENCE = -2 * MARGIN
"""Nats. Intervals that reach further down end at the lower edge."""


@dataclass(frozen=True)
class LossAxis:
    """kind: log, symlog, or share. bottom, top: limits; inf where nothing is clipped there."""

    kind: str
    bottom: float
    top: float
    clips: bool

    def beyond(self, value: float) -> bool:
        """The value is larger than the axis holds, so its point stands at the upper edge."""
        return self.clips and value > self.top

    def below(self, value: float) -> bool:
        """The value is smaller than the axis holds, so its point stands at the lower edge."""
        return self.kind == "log" and value < self.bottom

    def place(self, value: float) -> float:
        """Where a value is drawn: itself, or the edge of the axis."""
        return min(max(value, self.bottom), self.top)

    def apply(self, axes: Axes) -> None:
        """Set scale, limits and ticks."""
        if self.kind == "share":
            axes.set_ylim(self.bottom, self.top)
            axes.yaxis.set_major_locator(FixedLocator(_share_ticks(self.bottom)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
            return
        if self.kind == "log":
            axes.set_yscale("log")
            first, last = math.ceil(math.log10(self.bottom) - 1e-9), math.floor(math.log10(self.top) + 1e-9)
            ticks = [10.0**power for power in range(first, last + 1)]
            if len(ticks) < 3:
                ticks = [step * 10.0**power for power in range(first - 1, last + 1) for step in (1, 2, 5)]
        else:
            axes.set_yscale("symlog", linthresh=MARGIN, linscale=0.6)
            ticks = _symlog_ticks(self.bottom, self.top)
            axes.axhline(0, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
            axes.axhspan(0, MARGIN, color="#EEF3EE", zorder=0, linewidth=0)
        axes.set_ylim(self.bottom, self.top)
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if self.bottom <= tick <= self.top]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(better: str, values: Sequence[tuple[float, float, float]], *, logarithmic: bool) -> LossAxis:
    """The axis for (value, low, high) of every point of a panel."""
    middle = [value for value, *_ in values]
    ends = [bound for one in values for bound in one if math.isfinite(bound)]
    if better == "high":
        low = min(ends)
        room = 0.06 * max(1 - low, 0.01)  # above 100%, for labels
        return LossAxis("share", max(0.0, low - room), 1 + room, clips=False)
    clips = any(value > HOPELESS for value in middle) and sum(value <= HOPELESS for value in middle) > 1
    largest = max(ends)
    if logarithmic and any(value > 0 for value in middle):
        lowest = min((bound for bound in ends if bound > LOWEST_KL), default=LOWEST_KL)
        some_below = any(value < lowest for value in middle)
        top = HOPELESS if clips else max(largest, 10 * LOWEST_KL) * 1.4
        return LossAxis("log", LOWEST_KL if some_below else lowest / 1.5, top, clips)
    top = HOPELESS if clips else max(largest * 1.3, 1.5 * MARGIN)
    lowest = min(min(middle) * 1.3, max(min(ends) * 1.1, LOWEST_DIFFERENCE))
    return LossAxis("symlog", min(-0.3 * MARGIN, lowest), top, clips)


def _symlog_ticks(bottom: float, top: float) -> list[float]:
    """Zero, decades from the margin on, and between them 2 and 5 where few decades are drawn."""
    steps = (1, 2, 5) if top <= 1 else (1,)
    decades = range(round(math.log10(MARGIN)), math.ceil(math.log10(max(top, -bottom))) + 1)
    stride = math.ceil(len(decades) / 7)
    above = [step * 10.0**power for power in decades[::stride] for step in steps]
    return [*(-(10.0**power) for power in decades[::stride]), 0.0, *above]


def _share_ticks(bottom: float) -> list[float]:
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if (1 - bottom) / step <= 6)
    return [1 - step * place for place in range(int((1 - bottom) / step + 1e-9) + 1)][::-1]
