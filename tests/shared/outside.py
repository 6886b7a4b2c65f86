"""A folder with configs and classes of a user's own, as `--config-dir` and `hydra.searchpath=` find them."""

from __future__ import annotations

import sys
from pathlib import Path

MODULE = '''
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench import Headline, Measure, Result, setting
from kvbench.cache.decode import step
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KEEP, KeepRule
from kvbench.cache.store import DenseStore
from kvbench.measures.fallbacks import each_cache

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


@dataclass(frozen=True)
class Entropy(Measure):
    """Entropy of the prediction after `context` tokens, in nats, the mean over `tokens` decoded ones."""

    name: ClassVar[str] = "entropy"
    headlines: ClassVar = (Headline("entropy", "entropy", "fixed2"),)

    context: int = setting(64)
    tokens: int = setting(8)

    def needed_tokens(self):
        return "entropy.context", self.context + self.tokens

    def run(self, context):
        ids = context.window(0, self.context + self.tokens)[None].to(context.loaded.device)
        rows = {}

        def use(method, cache):
            logits = [step(context.loaded.model, ids[:, t : t + 1], cache) for t in range(self.context, ids.shape[1])]
            entropy = torch.distributions.Categorical(logits=torch.cat(logits, 1).float()).entropy()
            found = {"measure": "entropy", "context": self.context, "n": self.tokens, "protocol": "prefill_decode"}
            row = replace(method.row, metric="entropy", value=float(entropy.mean()), unit="nats", **found)
            rows[method.label] = row

        each_cache(context, ids[:, : self.context], use, self.tokens, 1, "entropy", context=self.context)
        yield Result(list(rows.values()))
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

ENTROPY = """# entropy of the predictions after a prompt
_target_: {module}.Entropy
context: 64   # tokens of prompt
tokens: 8     # tokens decoded after it
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
        "measures/entropy.yaml": ENTROPY.format(module=module),
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
