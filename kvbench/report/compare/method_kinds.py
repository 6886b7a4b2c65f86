"""Families of methods: quantised stores, keep rules, mixtures of both, and references that no method competes with."""

from __future__ import annotations

from kvbench.report.compare.comparison import config_of, is_baseline, sees_future
from kvbench.report.compare.declared import shrinks
from kvbench.results.row import KNOBS, Row

FAMILIES = {
    "quantised": "quantised store",
    "score": "keep rule by score",
    "position": "keep rule by position",
    "mixed": "rule + quantised store",
    "other": "low rank or stock cache",
    "reference": "reference",
}
"""Families in the order of legends and filters, with the words that name them."""
BY_POSITION = ("streaming_llm",)
REFERENCES = ("full", "recompute", "random")
"""Methods that bound the others, beside those that see the future: the full cache, no cache, random eviction."""
SIXTEEN_BITS = ("bf16", "fp16")
"""Stores that hold kept tokens in 16 bits: a rule with one of them is no mixture."""
STOCK = "hf_"
"""Begins the names of caches that come with transformers."""
BUDGET = KNOBS.index("budget")


def family_of(row: Row) -> str:
    """The key in FAMILIES of a method, from what its yaml declares; of an undeclared one from its knobs."""
    method, store = row.method or "", row.store or "dense"
    if is_baseline(row) or sees_future(row) or (method.startswith(REFERENCES[1:]) and _is_plain(row)):
        return "reference"
    if method.startswith(STOCK) or store.startswith(STOCK):
        return "other"
    keeps = row.budget is not None or (shrinks("method", method) or "").startswith("tokens")
    if keeps and not _is_plain(row):
        return "mixed"
    if keeps:
        return "position" if method in BY_POSITION else "score"
    declared = shrinks("store", store) or shrinks("store", method)
    return "quantised" if declared == "bits" or (declared is None and row.bits is not None) else "other"


def _is_plain(row: Row) -> bool:
    """The store holds numbers as the model made them or in 16 bits, as models are served, or is the method's own."""
    return row.store in (None, "dense", "paged", *SIXTEEN_BITS, row.method)


def series_of(row: Row) -> tuple[object, ...]:
    """Equal for settings of one method that differ in nothing but the budget: what a line in a figure may join."""
    config = config_of(row)
    return (*config[:BUDGET], *config[BUDGET + 1 :])
