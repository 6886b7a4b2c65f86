"""kvbench: what each way of shrinking a KV cache costs in quality and gives in memory and speed.

For a prompt of your own: `load_model`, `load_method`, `prefill`, `build_cache`, `generate`; for results: `load`.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import load_method, load_model
    from kvbench.cache.build import Method, build_cache, prefill
    from kvbench.cache.calibrate import calibrate
    from kvbench.cache.decode import generate
    from kvbench.cache.observe import Observation
    from kvbench.cache.rule import KEEP, KeepRule
    from kvbench.cache.store import Store
    from kvbench.harness.adapter import KVBenchLM
    from kvbench.measures.measure import Measure, setting
    from kvbench.measures.result import Result
    from kvbench.results.headline import Headline
    from kvbench.results.loading import load

__version__ = "0.1.0"
__all__ = [
    "KEEP",
    "Headline",
    "KVBenchLM",
    "KeepRule",
    "Measure",
    "Method",
    "Observation",
    "Result",
    "Store",
    "build_cache",
    "calibrate",
    "generate",
    "load",
    "load_method",
    "load_model",
    "prefill",
    "setting",
]

# torch's threads spin for a millisecond at every barrier before they sleep. Where another process has one of the cores
# that costs each decode step several times its work; a shorter spin costs nothing elsewhere. Read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# `kvbench.methods` and `kvbench.conf` lie beside this folder in a checkout, inside it once installed.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "methods").is_dir() and (_checkout / "conf").is_dir():
    __path__.append(str(_checkout))

_HOMES = {
    "Method": "kvbench.cache.build",
    "build_cache": "kvbench.cache.build",
    "prefill": "kvbench.cache.build",
    "KEEP": "kvbench.cache.rule",
    "KeepRule": "kvbench.cache.rule",
    "Observation": "kvbench.cache.observe",
    "Store": "kvbench.cache.store",
    "calibrate": "kvbench.cache.calibrate",
    "generate": "kvbench.cache.decode",
    "load_method": "kvbench.api",
    "load_model": "kvbench.api",
    "load": "kvbench.results.loading",
    "KVBenchLM": "kvbench.harness.adapter",
    "Measure": "kvbench.measures.measure",
    "setting": "kvbench.measures.measure",
    "Result": "kvbench.measures.result",
    "Headline": "kvbench.results.headline",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for:

    `import kvbench` alone must not cost torch's seconds.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
