"""The one place where the model is called."""

import inspect
from collections.abc import Callable
from functools import cache as cache_results

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.errors import UserError
from kvbench.models.frequencies import frequency_change, refuse_crossing


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache | None,
    logits_to_keep: int = 0,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Logits [B, q, V] of ids [B, q] after what the cache holds; the last `logits_to_keep` only, 0 for all.

    position_ids: [B, q], where the cache's count of tokens seen is not to be asked. Raises UserError where the tokens
    cross the length at which the model's rotary frequencies change.
    """
    arguments: dict[str, object] = {"use_cache": cache is not None, "logits_to_keep": logits_to_keep}
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    if cache is not None:
        change = frequency_change(model.config.get_text_config())
        if change is not None:
            refuse_crossing(change, type(model).__name__, int(cache.get_seq_length()), ids.shape[1])
        arguments[cache_argument(type(model).forward)] = cache
    logits: Tensor = model(input_ids=ids, **arguments).logits
    return logits


@cache_results
def cache_argument(model_forward: Callable[..., object]) -> str:
    """transformers 5.24 calls the cache `cache`; before, it was `past_key_values`. Looked up once, not every step."""
    return "cache" if "cache" in inspect.signature(model_forward).parameters else "past_key_values"


def n_layers(model: PreTrainedModel) -> int:
    """Decoder layers of the (text) model."""
    return int(model.config.get_text_config().num_hidden_layers)


def check_ids(ids: object) -> None:
    """Raise UserError unless ids is an int64 [B, T] batch of one length with at least one token."""
    if not isinstance(ids, Tensor):
        raise UserError(f"ids is a {type(ids).__name__}; give an int64 tensor [batch, tokens], all rows of one length")
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.shape[1] == 0:
        raise UserError(f"ids is {ids.dtype} {list(ids.shape)}; give int64 [batch, tokens] with at least one token")
