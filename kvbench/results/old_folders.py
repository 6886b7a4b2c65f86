"""Fills the columns `weights` and `flags` of run folders that were written before these columns existed.

Such folders say the same in their notes. No other module reads a note to decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

NOTED_FLAGS = {"better than full": "better_than_full", "uninformative": "uninformative", "unsteady": "unsteady"}
"""How a part of an old note begins (parts are joined by semicolons), and the flag that it stands for."""
FEW_WINDOWS = "of these windows alone"
RANDOM = "random weights"
REPEATED = "same logits"


def fill_missing_columns(frame: pd.DataFrame, stored: Sequence[str]) -> pd.DataFrame:
    """The frame with `weights` and `flags` filled where the file has no such columns. stored: the file's columns."""
    if "weights" not in stored:
        frame = frame.assign(weights=_weights(frame).astype(frame["weights"].dtype))
    if "flags" not in stored:
        frame = frame.assign(flags=_flags(frame).astype(frame["flags"].dtype))
    return frame


def _weights(frame: pd.DataFrame) -> pd.Series:
    """trained, repeated, pooled or random for each row; rows of one model and number of KV heads get the same."""
    note = frame["note"].fillna("")
    models = [frame["model"].fillna(""), frame["kv_heads"].fillna(-1), frame["converted"].fillna(False)]
    random = note.str.contains(RANDOM, regex=False).fillna(False).astype(bool).groupby(models).transform("any")
    repeated = note.str.contains(REPEATED, regex=False).fillna(False).astype(bool).groupby(models).transform("any")
    converted = frame["converted"].fillna(False).astype(bool)
    weights = pd.Series("trained", index=frame.index, dtype=object)
    weights[converted] = "pooled"
    weights[converted & repeated] = "repeated"
    weights[random] = "random"
    return weights


def _flags(frame: pd.DataFrame) -> pd.Series:
    """Flags from the note, and from the number where it tells by itself."""
    known = {note: _noted(note) for note in frame["note"].dropna().unique()}
    idle = (frame["metric"] == "engaged") & (frame["value"] == 0) & (frame["method"] != "full")
    drifting = (frame["metric"] == "steady") & (frame["value"] == 0)
    flags = []
    for note, is_idle, drifts in zip(frame["note"], idle.fillna(False), drifting.fillna(False), strict=True):
        names = set(known.get(note, ())) if isinstance(note, str) else set()
        names |= {"not_engaged"} if is_idle else set()
        names |= {"unsteady"} if drifts else set()
        flags.append(" ".join(sorted(names)) or None)
    return pd.Series(flags, index=frame.index, dtype=object)


def _noted(note: str) -> set[str]:
    parts = note.split("; ")
    found = {flag for start, flag in NOTED_FLAGS.items() if any(part.startswith(start) for part in parts)}
    return found | ({"few_windows"} if FEW_WINDOWS in note else set())
