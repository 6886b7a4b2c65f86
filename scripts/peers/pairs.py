"""Which of kvbench's methods stands beside which of kvpress's, and what differs by definition. No torch, no kvpress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOW = 32


@dataclass(frozen=True)
class Pair:
    """One method of both.

    name: of the line. entry, knobs: as `kvbench.api.load_method` takes them. press: an expression over kvpress's names
    and `ratio`, the share of tokens to drop. differs: what differs by definition, empty where nothing should. eager:
    whether the press needs attention matrices. masks: whether the press masks pairs instead of dropping them.
    """

    name: str
    entry: str
    press: str
    knobs: dict[str, Any] = field(default_factory=dict)
    differs: str = ""
    eager: bool = False
    masks: bool = False


def snapkv(kernel: int) -> str:
    """kvpress's SnapKV with a pooling width."""
    return f"SnapKVPress(ratio, window_size={WINDOW}, kernel_size={kernel})"


NO_POOLING = {"window": WINDOW, "pool": 1}
NEWEST = "the newest token stays in kvbench only"

PAIRS = (
    Pair("streaming_llm", "streaming_llm", "StreamingLLMPress(ratio)", {"variant": "absolute", "decode": "append"}),
    Pair("tova", "tova", "TOVAPress(ratio)", {"decode": "append"}),
    Pair("snapkv pool=1", "snapkv", snapkv(1), NO_POOLING),
    Pair(
        "snapkv",
        "snapkv",
        snapkv(7),
        {"window": WINDOW},
        "kvpress pools by the mean of neighbours, kvbench and the authors' repository by the maximum",
    ),
    Pair(
        "pyramid pool=1",
        "pyramid",
        f"PyramidKVPress(ratio, window_size={WINDOW}, kernel_size=1)",
        NO_POOLING,
        "kvpress gives all layers the same budget where the highest layer's would be smaller than the window, as here",
    ),
    Pair("adakv pool=1", "adakv", f"AdaKVPress({snapkv(1)})", NO_POOLING, masks=True),
    Pair(
        "critical pool=1",
        "critical",
        f"CriticalKVPress({snapkv(1)})",
        NO_POOLING,
        "kvpress counts the window among the first half of the budget, kvbench halves what the window leaves",
    ),
    Pair(
        "chunkkv",
        "chunkkv",
        f"ChunkKVPress({snapkv(1)}, chunk_length=20)",
        {"window": WINDOW, "chunk": 20},
        "kvpress picks chunks for all heads of a layer together, cuts the window into chunks too and keeps whole ones "
        "only; in kvbench each head picks, the window stays and the budget is filled",
    ),
    Pair("expected_attention", "expected_attention", "ExpectedAttentionPress(ratio)", differs=NEWEST),
    Pair("keydiff", "keydiff", "KeyDiffPress(ratio)", differs=NEWEST),
    Pair("knorm", "knorm", "KnormPress(ratio)", {"decode": "append"}, NEWEST),
    Pair(
        "lagkv",
        "lagkv",
        "LagKVPress(ratio, n_sink=4, lag_size=64)",
        {"block": 64},
        "ranks tie between blocks: kvpress leaves the choice to topk, kvbench gives up the older token",
    ),
    Pair(
        "h2o",
        "h2o",
        "ObservedAttentionPress(ratio)",
        {"decode": "append"},
        "kvpress averages over the queries that see a token and protects no recent tokens; kvbench sums, and half of "
        "the budget is recent, as in the paper",
        eager=True,
    ),
    Pair(
        "kvzip",
        "kvzip",
        "KVzipPress(ratio)",
        differs="another instruction before the replay, and 4 sinks that kvpress always keeps",
        masks=True,
    ),
)


def chosen(names: str | None) -> list[Pair]:
    """The pairs whose method is among the comma-separated names; None: all. Raises SystemExit for an unknown name."""
    if names is None:
        return list(PAIRS)
    wanted = [name.strip() for name in names.split(",")]
    known = {pair.entry for pair in PAIRS}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--methods {unknown[0]} has no counterpart; choose from {', '.join(sorted(known))}")
    return [pair for pair in PAIRS if pair.entry in wanted]
