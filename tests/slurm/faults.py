"""Methods that are slow or run out of memory, for tests of what a sweep survives. Found through hydra.searchpath.

How long and how much comes from the environment, not from the config: the same command can fail once and succeed later.
"""

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord
from kvbench.methods.full import Full


@dataclass(frozen=True)
class Slow(Full):
    """The full cache, built `KVBENCH_TEST_SLEEP` seconds late. `tag` makes one cell different from the next."""

    tag: int = 0

    def initial_scores(self, record: LayerRecord) -> Tensor | None:
        if record.index == 0:
            time.sleep(float(os.environ.get("KVBENCH_TEST_SLEEP", "0")))
        return None


@dataclass(frozen=True)
class Greedy(Full):
    """The full cache, until a prompt is longer than `KVBENCH_TEST_ROOM` tokens."""

    tag: int = 0

    def initial_scores(self, record: LayerRecord) -> Tensor | None:
        if record.key.shape[2] > int(os.environ.get("KVBENCH_TEST_ROOM", "1000000")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")
        return None


@dataclass(frozen=True)
class Hungry(Full):
    """The full cache, built beside `KVBENCH_TEST_BYTES` bytes a prompt token of real memory."""

    tag: int = 0

    def initial_scores(self, record: LayerRecord) -> Tensor | None:
        wanted = int(os.environ.get("KVBENCH_TEST_BYTES", "0")) * record.key.shape[2]
        torch.zeros(wanted, dtype=torch.uint8).fill_(1)
        return None
