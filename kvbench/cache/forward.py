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
        raise UserError(
            f"ids is a {type(ids).__name__}; give an int64 tensor [batch, tokens], all rows of one length "
            f'(of a tokenizer: tokenizer(text, return_tensors="pt").input_ids)'
        )
    if ids.ndim != 2 or ids.dtype != torch.int64 or ids.shape[1] == 0:
        raise UserError(f"ids is {ids.dtype} {list(ids.shape)}; give int64 [batch, tokens] with at least one token")


def check_prompt(model: PreTrainedModel, ids: object) -> None:
    """Raise UserError unless ids is a batch as `check_ids` wants it, of the model's vocabulary and without padding.

    Padding cannot be told from text by its ids alone; a row that begins with the pad token is refused, unless that
    token also begins or ends texts.
    """
    check_ids(ids)
    assert isinstance(ids, Tensor)
    check_known(model, ids)
    config = model.config.get_text_config()
    pad = getattr(config, "pad_token_id", None)
    others = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    if pad is None or any(pad in other if isinstance(other, list) else pad == other for other in others):
        return
    padded = (ids[:, 0] == pad).nonzero().flatten().tolist()
    if padded:
        raise UserError(
            f"row {padded[0]} of ids begins with the pad token {pad}, and padding would be taken for text; "
            "give prompts of one length without padding, or one prompt at a time as ids[:1]"
        )


def check_known(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise UserError for a token that has no row in the model's embedding. On a GPU this waits for the device."""
    size = model.get_input_embeddings().weight.shape[0]
    smallest, largest = (int(end) for end in torch.stack(ids.aminmax()).tolist())
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise UserError(f"ids has the token {wrong}, and this model's tokens are 0 to {size - 1}; tokenize for it")
