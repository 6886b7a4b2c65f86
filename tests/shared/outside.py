"""A folder with configs and classes of a user's own, as `--config-dir` and `hydra.searchpath=` find them."""

from __future__ import annotations

import sys
from pathlib import Path

MODULE = '''
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, KeepRule
from kvbench.cache.store import DenseStore

BUILT_FROM = []


@dataclass(frozen=True)
class EveryNth(KeepRule):
    """Keeps the newest token and as many multiples of `stride` as there is room for."""

    stride: int = 2

    def initial_scores(self, record: LayerRecord) -> None:
        if record.index == 0:
            BUILT_FROM.append(record.key.data_ptr())

    def priority(self, scores: Tensor, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        return torch.where(position == newest, KEEP, (position % self.stride == 0) * 1e6 + position.float())


@dataclass(frozen=True)
class RoundedStore(DenseStore):
    """Keys and values rounded to `dtype`."""
'''

EVERY_NTH = """# @package _global_
# keeps every n-th token: budget=, every_stride= (2)
every_stride: 2   # distance between kept tokens
method:
  name: {name}
  rule:
    _target_: {module}.EveryNth
    budget: ${{budget}}
    stride: ${{every_stride}}
"""

ROUNDED = """# @package _global_
# keys and values rounded to another type: rounded_to=
rounded_to: bfloat16   # bfloat16 | float16
store:
  name: rounded
  slots:
    _target_: {module}.RoundedStore
    dtype: ${{rounded_to}}
"""

MODEL = """# a model of the user's own
defaults:
  - random-tiny
name: mine-tiny
"""


def write_outside(folder: Path, module: str) -> Path:
    """Write the module into `folder` and the configs below `folder/own`, whose path is returned.

    `module` must be new in each test: Python imports a name once.
    """
    (folder / f"{module}.py").write_text(MODULE)
    own = folder / "own"
    files = {
        "method/every.yaml": EVERY_NTH.format(name="every", module=module),
        "store/rounded.yaml": ROUNDED.format(module=module),
        "model/mine-tiny.yaml": MODEL,
    }
    for name, text in files.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    return own


def forget_outside(module: str, folder: Path) -> None:
    """Undo what importing the module left in this process."""
    sys.modules.pop(module, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(folder)]
