"""The names of the config that kvbench itself declares: knobs of methods and stores, and the groups of yaml files."""

import difflib
from collections.abc import Mapping
from typing import Any

KNOBS = ("budget", "bits", "k_bits", "v_bits", "group", "residual", "sinks", "window", "variant", "seed")
"""Root keys that methods and stores read by interpolation; each is a column of the row."""

OTHER_KNOBS = (
    "decode",
    "merge",
    "ema",
    "pool",
    "buffer",
    "mix_lambda",
    "threshold",
    "chunk",
    "block",
    "beta",
    "future",
    "floor",
    "allocation",
    "skip_layers",
    "ties",
    "inner",
    "k_axis",
    "v_axis",
    "rank",
    "energy",
    "protect_first",
    "protect_last",
)
"""Root keys likewise, kept in the row's `knobs`."""

PREFILL_CHUNK = "prefill.chunk"
"""Setting of a method that is no root key; its column of the row is `prefill_chunk`."""

GROUPS = ("method", "store", "model", "data")
"""Config groups of which a run has one choice each."""

MEASURES = "measures"
"""The config group with one yaml file a measure; a run chooses several with `measure=[...]`."""

PRESETS = "experiment"
"""The config group of presets: settings of a whole run."""


def did_you_mean(word: str, known: Mapping[str, Any] | list[str]) -> str:
    """` (did you mean h2o?)`, or nothing where no known name is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
