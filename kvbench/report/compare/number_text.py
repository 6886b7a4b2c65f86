"""Numbers as text: significant digits, one unit for a column, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Format = Callable[[float], str]
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def significant(value: float, digits: int = 3) -> str:
    """1234.5 -> `1,234`, 22.31 -> `22.3`, 0.01234 -> `0.0123`; an exponent below 1e-5 and from 1e8 on."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-5 <= abs(value) < 1e8:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def small(value: float) -> str:
    """For values that span many decades, as KL: `0.0026` down to 0.001, below it `2.6e-05`."""
    if value == 0:
        return "0"
    return significant(value, 2) if abs(value) >= 1e-3 else f"{value:.1e}"


def signed(value: float) -> str:
    """A difference with its sign: `+0.0123`, `-2.6e-05`."""
    return ("+" if value > 0 else "") + (small(value) if abs(value) < 1e-3 else significant(value))


def percent(value: float) -> str:
    """A share between 0 and 1 as `97.3%`; exactly 1 prints as 100% and exactly 0 as 0%."""
    if abs(value) >= 1000:
        return f"{significant(100 * value)}%"
    text = f"{100 * value:.1f}%"
    if text == "100.0%" and value < 1:
        return ">99.9%"
    if text == "0.0%" and value > 0:
        return "<0.1%"
    return {"100.0%": "100%", "0.0%": "0%"}.get(text, text)


def count(value: float) -> str:
    """A count: `3,072`, or `256.5` where it is a mean over heads."""
    if abs(value) >= 1e9:
        return significant(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def fixed(decimals: int, suffix: str = "") -> Callable[[Sequence[float]], tuple[str, Format]]:
    """A column with a fixed number of decimals; numbers from 1,000 on have none."""
    return lambda values: ("", lambda value: fixed_text(value, decimals) + suffix)


def fixed_text(value: float, decimals: int) -> str:
    """`24.01`, `17,165`, `1.23e+09`"""
    if abs(value) >= 1e8:
        return significant(value)
    return f"{value:,.{decimals if abs(value) < 1000 else 0}f}"


def plainly(form: Format, unit: str = "") -> Callable[[Sequence[float]], tuple[str, Format]]:
    """A column whose numbers are formatted one by one."""
    return lambda values: (unit, form)


def byte_unit(values: Sequence[float]) -> tuple[float, str]:
    """Divisor and name of one unit for a column or an axis of bytes: the unit of its largest value."""
    largest = max((abs(value) for value in values), default=0)
    return next(((size, name) for size, name in UNITS if largest >= size), UNITS[-1])


def in_bytes(values: Sequence[float]) -> tuple[str, Format]:
    """A column of bytes in one binary unit."""
    size, name = byte_unit(values)
    return name, lambda value: significant(value / size) if size > 1 else count(round(value))


def interval(value: str, low: str, high: str) -> str:
    """`22.3 [22.1, 22.6]`"""
    return f"{value} [{low}, {high}]"


def within(form: Format, low: float | None, high: float | None) -> Format:
    """`form`; for a difference with an interval as many decimals as show two digits of its half width: `+0.053`."""
    half = 0.0 if low is None or high is None else (high - low) / 2
    if form is not signed or half < 1e-5:
        return form
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return lambda value: f"{value:+,.{decimals}f}" if abs(value) < 1e6 else signed(value)
