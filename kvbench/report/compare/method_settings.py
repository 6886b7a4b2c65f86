"""A method with all its knobs as settings of the command line."""

from __future__ import annotations

from typing import Any

from kvbench.report.compare.comparison import other_knobs
from kvbench.report.compare.declared import shipped_config
from kvbench.results.row import KNOBS, Row

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))


def method_settings(row: Row) -> dict[str, str]:
    """`{"method": "h2o", "store": "int4", "budget": "256"}`"""
    settings: dict[str, Any] = {"method": row.method}
    if row.store not in (None, "dense", row.method):
        settings["store"] = row.store
    for name in COLUMNS:
        value = getattr(row, name)
        if value is not None and not (name in ("k_bits", "v_bits") and value == row.bits):
            settings[name] = value
    if "prefill_chunk" in settings:
        settings["prefill.chunk"] = settings.pop("prefill_chunk")
    settings |= {key: value for key, value in other_knobs(row).items() if key in shipped_config() and value is not None}
    if row.seed:
        settings.setdefault("seed", row.seed)
    return {key: f"{value:.10g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
