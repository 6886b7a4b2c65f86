"""The command that measures what a line of the answer card lacks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvbench.report.compare.declared import shipped_file, shipped_names
from kvbench.report.compare.method_settings import method_settings
from kvbench.report.compare.methods import Group
from kvbench.report.compare.texts import texts_of
from kvbench.results.paired import rounded_up
from kvbench.results.row import Row

PROMISING = "compare=[full,kivi8,kivi4,full+int8,full+int4,h2o,h2o+int4,snapkv]"
"""What is compared where nothing is known yet."""
WINDOWS = 32
"""Windows from which a verdict is likely."""
DEFAULT_TEXT = "essays"
SAMPLES = 17
"""Needles at each of three depths, so that 51 are hidden."""


def on_windows(group: Group, row: Row | None, windows: int | None = None, data: str | None = None) -> str:
    """Measures the loss of one method (row None: of several) over windows; windows: at least WINDOWS.

    data: the setting of the text; None for the text that the group was scored on.
    """
    context = group.contexts.get("perplexity")
    settings = [f"perplexity.context={context}"] if context else []
    settings.append(f"perplexity.windows={max(WINDOWS, rounded_up(windows or 0))}")
    own = data_setting(group.dataset) if data is None else data
    return _command(group, row, "perplexity", [*([own] if own else []), *settings])


def data_setting(dataset: str | None) -> str | None:
    """`data=mixed` for the texts of a data set that ships with kvbench; None for any other, and for the default."""
    texts = list(texts_of(dataset))
    for name in shipped_names("data"):
        known = shipped_file("data", name).get("texts")
        if texts and (known == texts or (known is None and texts == [name])):
            return None if name == DEFAULT_TEXT else f"data={name}"
    return None


def on_code(group: Group, row: Row | None, windows: int | None = None) -> str:
    """As `on_windows`, on source code: the text that ships with kvbench, else a file to name."""
    known = [name for name in shipped_names("data") if "code" in name]
    return on_windows(group, row, windows, f"data={known[0]}" if known else "data.path=code.txt")


def on_needles(group: Group, row: Row | None, needles: int | None = None) -> str:
    """Measures the needles that one method (row None: several) finds, 51 or more, and its loss."""
    lengths = [f"needle.lengths=[{group.lengths[-1]}]"] if group.lengths else []
    samples = max(SAMPLES, -(-(needles or 0) // 3))
    windows = f"perplexity.windows={WINDOWS}"
    return _command(group, row, "perplexity,needle", [*lengths, f"needle.samples={samples}", windows])


def in_16_bits(command: str, group: Group) -> str:
    """The command with the model in 16 bits, where its run held more: then rules that drop tokens save more."""
    return f"{command} model.dtype=bfloat16" if str(group.row.dtype) in ("float32", "float64") else command


def _command(group: Group, row: Row | None, measures: str, settings: Sequence[str]) -> str:
    method = [PROMISING, "budget=256"]
    if row is not None:
        method = [f"{name}={value}" for name, value in method_settings(row).items()]
    return shlex.join(["python", "-m", "kvbench", *_model(group.row), *method, f"measure=[{measures}]", *settings])


def _model(row: Row) -> list[str]:
    """Names the model; empty for random weights or converted heads, where kvbench's own model serves."""
    name = row.model or ""
    if row.weights not in (None, "trained") or row.converted:
        return []
    if name in shipped_names("model"):
        return [f"model={name}"]
    return ["model=hub", f"model.id={name}"] if name.count("/") == 1 and not name.startswith((".", "/", "~")) else []
