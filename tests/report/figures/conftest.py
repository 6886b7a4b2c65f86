"""Figures are drawn in the style of a report and closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import pytest

from kvbench.report.figures.layout import styled


@pytest.fixture(autouse=True)
def report_style() -> Iterator[None]:
    with styled():
        yield
    plt.close("all")
