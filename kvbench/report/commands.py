"""The command that measures one line of a table again, from what its run recorded."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvbench.results.row import KNOBS, Row
from kvbench.results.run_files import CONFIG

COLUMNS = tuple(name for name in KNOBS if name not in ("method", "store", "knobs"))
# Settings of a sweep that a single cell does not need.
LEFT_OUT = (*COLUMNS, "method", "store", "compare", "measure", "seed", "rerun", "results_dir", "sweep")
MEASURES = ("perplexity", "needle", "tasks", "fidelity", "memory", "latency", "paging")
CONTEXTS = {"perplexity": "context", "needle": "lengths", "memory": "contexts", "latency": "contexts"}


def read_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run folder; {} where there is none or it cannot be read."""
    try:
        content = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass
class Recorded:
    """The command of a run, and its config, read only if the command alone does not tell."""

    command: str
    folder: Path | None = None
    _config: dict[str, Any] | None = field(default=None, repr=False)

    def setting(self, key: str) -> Any:
        """A resolved setting by its dotted name; of a group (`model`) its choice. None if it is not known."""
        if self._config is None:
            self._config = read_config(self.folder) if self.folder is not None else {}
        node: Any = self._config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node.get("name") if isinstance(node, Mapping) else node


def command_of(row: Row, recorded: Recorded) -> str | None:
    """`python -m kvbench method=h2o budget=256 'measure=[perplexity]' ...`; None if it cannot be told.

    A row that stands for several measures names them in one: `perplexity,needle`.
    """
    try:
        words = shlex.split(recorded.command)
    except ValueError:  # a quote that is never closed
        return None
    if row.method is None or row.measure is None or "kvbench" not in words:
        return None
    measures = row.measure.split(",")
    kept = [word for word in words[words.index("kvbench") + 1 :] if _belongs(word, measures)]
    told = dict(word.split("=", 1) for word in kept)
    for key, value in told.items():
        if re.search(r",(?![^\[]*\])", value) and (one := recorded.setting(key)) is not None:
            told[key] = str(one)  # swept over: what this run had
    if row.context is not None and row.measure in CONTEXTS:
        name = CONTEXTS[row.measure]
        told[f"{row.measure}.{name}"] = str(row.context) if name == "context" else f"[{row.context}]"
    own = _method(row)
    settings = [f"{key}={value}" for key, value in told.items() if key not in own]
    if "experiment" in told:
        settings.append("compare=null")  # the preset's list gives way to the one method
    entry = [f"{key}={value}" for key, value in own.items()]
    return shlex.join(["python", "-m", "kvbench", *entry, f"measure=[{row.measure}]", *settings])


def _belongs(word: str, measures: Sequence[str]) -> bool:
    key = word.split("=", 1)[0].lstrip("+")
    root = key.split(".", 1)[0]
    if "=" not in word or root in LEFT_OUT or root.startswith("hydra"):
        return False
    return root not in MEASURES or root in measures


def _method(row: Row) -> dict[str, str]:
    """The method and every knob that made it, as settings of the command line."""
    told: dict[str, Any] = {"method": row.method}
    if row.store not in (None, "dense", row.method):
        told["store"] = row.store
    for name in COLUMNS:
        value = getattr(row, name)
        if value is not None and not (name in ("k_bits", "v_bits") and value == row.bits):
            told[name] = value
    others = json.loads(row.knobs) if row.knobs else {}
    told |= {key: value for key, value in others.items() if key in _root_settings() and value is not None}
    if row.seed:
        told.setdefault("seed", row.seed)
    return {key: f"{value:.10g}" if isinstance(value, float) else str(value) for key, value in told.items()}


@functools.cache
def _root_settings() -> frozenset[str]:
    """The keys of conf/config.yaml, which is where a knob is set."""
    text = resources.files("kvbench.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    return frozenset(yaml.safe_load(text))
