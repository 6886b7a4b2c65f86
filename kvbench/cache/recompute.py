"""The cache of a method that keeps nothing: the ids so far, run through the model at every step."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.forward import forward
from kvbench.cache.record import PrefillRecord
from kvbench.cache.slots import Buffer


class RecomputeCache(DecodeCache):
    """ids: [B, T], the prompt and every token fed after it. No keys and values are held."""

    recomputes = True
    replaces_tensors = True
    not_captured = "without a cache every step is as long as the prefix"

    def __init__(self, ids: Tensor, last_logits: Tensor) -> None:
        self.ids = ids
        self.last_logits = last_logits
        self.prompt_tokens = self.positions_processed = ids.shape[1]

    @property
    def seen(self) -> int:
        return self.ids.shape[1]

    @property
    def kept_tokens(self) -> float:
        return 0.0

    @property
    def has_compressed(self) -> bool:
        return False

    def buffers(self) -> Iterator[Buffer]:
        """No buffer: ids are not cached keys and values."""
        return iter(())

    def run(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int) -> Tensor:
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.positions_processed += self.ids.shape[1]
        return forward(model, self.ids, None, logits_to_keep or ids.shape[1])

    def predictions(self, model: PreTrainedModel, targets: Tensor, size: int) -> Iterator[tuple[Tensor, bool]]:
        """Logits [B, V] for each of targets [B, n], from one forward over the prompt and all targets.

        Step by step the logits would be the same and take n forwards; `size` plays no part.
        """
        ids = torch.cat([self.ids, targets[:, :-1]], dim=1)
        self.positions_processed += ids.shape[1]
        for logits in forward(model, ids, None, targets.shape[1]).unbind(1):
            yield logits, False


def recompute_cache(record: PrefillRecord) -> RecomputeCache:
    """The cache of the record's prompts; copies from the record."""
    return RecomputeCache(record.ids.clone(), record.logits.clone())
