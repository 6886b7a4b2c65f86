"""A tiny model, its text, and run contexts for tests that score windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.measures.context import RunContext
from kvbench.measures.perplexity import Perplexity
from tests.shared.models import random_llama
from tests.shared.text import run_context_of

CONTEXT, TOKENS = 40, 10
MODEL = random_llama(4, 2, 16, dtype=torch.float32)
TEXT = torch.randint(97, (2_000,), generator=torch.Generator().manual_seed(1))


def settings(windows: int = 1, batch: int = 8, context: int = CONTEXT, tokens: int = TOKENS, **more: Any) -> Perplexity:
    return Perplexity(context, tokens, windows, batch, **more)


def bench(named: dict[str, Method], **more: Any) -> RunContext:
    return run_context_of(MODEL, named, TEXT, **more)


def plain_nll(model: Any, ids: Tensor, context: int) -> np.ndarray:
    """NLL of ids[context:] by one forward without a cache, the loss in numpy and float64."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double().numpy()
    log_p = special.log_softmax(logits[context - 1 : -1], axis=-1)
    return -log_p[np.arange(len(log_p)), ids[context:].numpy()]
