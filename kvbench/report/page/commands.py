"""The command that measures one line of a table again, from what its run recorded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.report.compare.declared import shipped_measures, shipped_settings
from kvbench.report.compare.method_settings import COLUMNS, method_settings
from kvbench.results.row import Row

LEFT_OUT = (*COLUMNS, "method", "store", "compare", "measure", "seed", "rerun", "results_dir", "sweep")
"""Settings of a sweep that the command for one line sets itself or does not need."""
CONTEXT_SETTINGS = ("context", "contexts", "lengths")
"""Names under which a measure's settings give the prompt lengths."""


@dataclass(frozen=True)
class RecordedRun:
    """The command of a run and its resolved config, {} if unknown."""

    command: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, key: str) -> Any:
        """A resolved setting by its dotted name; of a group (`model`) its choice. None if it is not known."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node.get("name") if isinstance(node, Mapping) else node

    @property
    def measures(self) -> frozenset[str]:
        """Root settings that belong to one measure: those that the run or kvbench's config lists as measures."""
        known = self.config.get("measure")
        return frozenset(shipped_measures()) | frozenset(map(str, known) if isinstance(known, list) else ())

    def context_setting(self, measure: str) -> tuple[str, bool] | None:
        """Dotted name of the setting with a measure's prompt lengths, and whether it is a list; None without one."""
        node = self.config.get(measure)
        known = {*shipped_settings(measure), *(node if isinstance(node, Mapping) else ())}
        found = next((name for name in CONTEXT_SETTINGS if name in known), None)
        return None if found is None else (f"{measure}.{found}", found != "context")


def command_of(row: Row, run: RecordedRun) -> str | None:
    """`python -m kvbench method=h2o budget=256 'measure=[perplexity]' ...`; None if the run's command is unknown.

    A row that stands for several measures names them in one: `perplexity,needle`.
    """
    try:
        words = shlex.split(run.command)
    except ValueError:  # a quote that is never closed
        return None
    if row.method is None or row.measure is None or "kvbench" not in words:
        return None
    others = run.measures - set(row.measure.split(","))
    kept = [word for word in words[words.index("kvbench") + 1 :] if _is_needed(word, others)]
    settings = dict(word.split("=", 1) for word in kept)
    for key, value in settings.items():
        if re.search(r",(?![^\[]*\])", value) and (one := run.setting(key)) is not None:
            settings[key] = str(one)  # of the values of a sweep the one that this run had
    if row.context is not None and (found := run.context_setting(row.measure)) is not None:
        name, is_list = found
        settings[name] = f"[{row.context}]" if is_list else str(row.context)
    method = method_settings(row)
    rest = [f"{key}={value}" for key, value in settings.items() if key not in method]
    if "experiment" in settings:
        rest.append("compare=null")  # else the experiment's list replaces the method
    chosen = [f"{key}={value}" for key, value in method.items()]
    return shlex.join(["python", "-m", "kvbench", *chosen, f"measure=[{row.measure}]", *rest])


def _is_needed(word: str, other_measures: frozenset[str]) -> bool:
    """Whether a word of the sweep's command is a setting that the line depends on."""
    key = word.split("=", 1)[0].lstrip("+")
    root = key.split(".", 1)[0]
    return "=" in word and root not in LEFT_OUT and not root.startswith("hydra") and root not in other_measures
