"""How close a score that is measured again must come, and why.

**To the bit** where the source, torch, transformers, the processor, its kernel and the number of threads are the same:
a batch is run again with the same windows, so every sum is taken in the same order.

**Within a tolerance** otherwise. Other orders of summation move float32 logits by about 1e-5. That alone moves an NLL
by as much; but a keep rule that ranks tokens may rank two nearly equal ones the other way round, and a store may round
a value to the next code. Both then hold another cache, a few tokens or codes apart. `NLL` and `KL` are allowed to move
by an absolute part and a share of the score; they were chosen above what the published folders show between four
versions of the source, and far below what separates methods. Bytes and tokens are counted and must be equal always.
Retrieval hits must be equal always; answers may differ in words where the hit is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvbench.method_runs import device_name
from kvbench.results.provenance import package_version, source_hash
from kvbench.results.row import Row
from kvbench.verify.rebuilt import Rebuilt
from kvbench.verify.recorded import Recorded

ABSOLUTE = {"nll": 2e-3, "kl": 2e-3, "kl_reverse": 2e-3, "top1": 0.02, "top5": 0.02}
"""Largest difference of a window's mean, in nats or as a share of its tokens."""
RELATIVE = {"nll": 1e-3, "kl": 0.05, "kl_reverse": 0.05}
"""And this share of the recorded score on top."""
SOURCE = "the source"
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Tolerance:
    """differs: what is not as it was when the folder was measured; empty: scores must be equal to the bit."""

    differs: list[str]

    @property
    def exact(self) -> bool:
        return not self.differs

    @property
    def same_source(self) -> bool:
        return SOURCE not in self.differs

    def notes(self) -> list[str]:
        """What is not as it was, and what may differ for that."""
        if self.exact:
            return []
        allowed = "NLL and KL may move by 0.002 nats and a share of the score, top-1 and top-5 by 0.02"
        return [f"not as when it was measured: {', '.join(self.differs)}; so {allowed}; bytes and hits must be equal"]

    def accepts(self, name: str, recorded: Any, found: Any) -> bool:
        """Whether a score that was found may stand for the one recorded; null is nan."""
        if recorded == found or (_undefined(recorded) and _undefined(found)):
            return True
        if self.exact or _undefined(recorded) or _undefined(found):
            return False
        if name == "answer":
            return True
        if name not in ABSOLUTE:
            return False
        return bool(abs(found - recorded) <= ABSOLUTE[name] + RELATIVE.get(name, 0.0) * abs(recorded))


def tolerance_for(recorded: Recorded, rebuilt: Rebuilt) -> Tolerance:
    """What the machine and the code that verify share with those that measured."""
    here = rebuilt.context.baseline.row
    differs = []
    if recorded.provenance.get("source_hash") != source_hash():
        differs.append(SOURCE)
    packages = recorded.provenance.get("packages") or {}
    differs += [name for name in PACKAGES if packages.get(name) != package_version(name)]
    names = {row.device for row in recorded.rows}
    if names != {device_name(rebuilt.context.loaded.device)}:
        differs.append("the processor")
    if any(row.threads != here.threads for row in recorded.rows):
        differs.append("the number of threads")
    if not {row.kernel for row in recorded.rows} <= _kernels(rebuilt):
        differs.append("the kernel")
    return Tolerance(differs)


def _kernels(rebuilt: Rebuilt) -> set[str | None]:
    rows: list[Row] = [method.row for method in rebuilt.methods.values()]
    return {row.kernel for row in rows}


def _undefined(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
