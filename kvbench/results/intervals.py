"""The interval of a share, for measures and for the report. Imports neither numpy nor torch."""

from __future__ import annotations

import math

Z95 = 1.959964
"""Standard normal quantile of a two-sided 95% interval."""


def wilson(hits: float, n: int) -> tuple[float, float]:
    """95% interval of the share `hits` / `n` (E. B. Wilson, 1927, JASA 22), within 0 and 1."""
    share, spread = hits / n, Z95 * math.sqrt(hits / n * (1 - hits / n) / n + Z95 * Z95 / (4 * n * n))
    middle, scale = share + Z95 * Z95 / (2 * n), 1 + Z95 * Z95 / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
