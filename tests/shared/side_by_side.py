"""A compressed cache and the slow model's histories, fed the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.decode import step
from tests.shared.slow_llama import SlowLlama


def side_by_side(
    model: PreTrainedModel, cache: Any, histories: list[Any], ids: Tensor, schedule: Sequence[int], atol: float
) -> Iterator[tuple[Any, Any]]:
    """Each layer with its history, after every forward. Fails where logits differ by more than `atol`.

    ids: [B, T]; the cache and the histories know the first ones, and `schedule` feeds the others, so many at a time;
    0 feeds nothing, for a look before the first forward.
    """
    reference, at = SlowLlama(model), ids.shape[1] - sum(schedule)
    for q in schedule:
        if q:
            chunk = ids[:, at : at + q]
            got = step(model, chunk, cache, logits_to_keep=0)
            torch.testing.assert_close(got, reference(chunk, histories), atol=atol, rtol=0)
            at += q
        yield from zip(cache.layers, histories, strict=True)
