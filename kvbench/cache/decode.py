"""Decoding through a compressed cache: one step, and greedy generation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.decode_cache import DecodeCache
from kvbench.errors import UserError


def step(model: PreTrainedModel, ids: Tensor, cache: DecodeCache, logits_to_keep: int = 1) -> Tensor:
    """Feed ids [B, q] and return the logits of the last `logits_to_keep` of them; see `DecodeCache.step`."""
    return cache.step(model, ids, logits_to_keep)


@dataclass(frozen=True)
class Continuation:
    """tokens: int64 [B, n]. engaged: of each of the n, whether the cache had been compressed before it was predicted.
    finite: bool [B, n], whether the logits that predicted it were finite; a vocabulary entry of -inf is ruled out and
    counts as finite."""

    tokens: Tensor
    engaged: list[bool]
    finite: Tensor


def generate(
    model: PreTrainedModel,
    ids: Tensor | None,
    cache: DecodeCache,
    max_new_tokens: int = 32,
    eos_token_id: int | Sequence[int] | None = None,
) -> Tensor:
    """Greedy continuation of the cache's text, followed by `ids`: new tokens [B, n], n <= max_new_tokens.

    Args:
        ids: [B, q], fed through the cache first (a question, say); None to go on from the prompt itself.
        eos_token_id: the token that ends a text, or several such tokens: generation stops once every row has produced
            one. Later tokens of a finished row repeat it (the first of several).

    Raises UserError for max_new_tokens below 1, and for ids=None where the cache has moved on from its prompt.
    """
    return continuation(model, ids, cache, max_new_tokens, eos_token_id).tokens


@torch.inference_mode()
def continuation(
    model: PreTrainedModel,
    ids: Tensor | None,
    cache: DecodeCache,
    max_new_tokens: int = 32,
    eos_token_id: int | Sequence[int] | None = None,
) -> Continuation:
    """What `generate` returns, with what each token was predicted from; arguments and errors as there."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}; type max_new_tokens=1 or more")
    if ids is None and cache.seen > cache.prompt_tokens:
        raise UserError("the cache has been fed since its prompt; give the ids that follow, the last new token first")
    # The prompt's own logits come before any compression, unless the prompt was read in chunks.
    engaged = [cache.compressed_before_last_logits if ids is None else cache.has_compressed]
    logits = cache.last_logits if ids is None else step(model, ids, cache)[:, -1]
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    tokens: list[Tensor] = []
    finite: list[Tensor] = []
    finished = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    with kvbench_attention(model):
        while True:
            token = logits.argmax(-1)
            finite.append(logits.float().logsumexp(-1).isfinite())
            if ends:
                token = token.masked_fill(finished, ends[0])
                finished |= torch.isin(token, token.new_tensor(ends))
            tokens.append(token)
            if len(tokens) == max_new_tokens or (ends and bool(finished.all())):
                return Continuation(torch.stack(tokens, dim=1), engaged, torch.stack(finite, dim=1))
            engaged.append(cache.has_compressed)
            logits = step(model, token[:, None], cache)[:, -1]
