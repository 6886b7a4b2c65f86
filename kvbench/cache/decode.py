"""Decoding through a compressed cache: one step, and greedy generation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import AnyCache, PrefixCache
from kvbench.cache.forward import check_ids, forward
from kvbench.errors import UserError


@torch.inference_mode()
def step(model: PreTrainedModel, ids: Tensor, cache: AnyCache, logits_to_keep: int = 1) -> Tensor:
    """Feed ids [B, q] and return the logits of the last `logits_to_keep` of them, [B, n, V]; 0 returns all.

    The method evicts or quantises afterwards. Raises UserError for ids that do not continue the cache's batch, and
    kvbench.cache.layer.CacheFull past what the cache was built for; the cache is as before then.
    """
    check_ids(ids)
    with kvbench_attention(model):
        if isinstance(cache, PrefixCache):
            cache.ids = torch.cat([cache.ids, ids], dim=1)
            cache.positions_processed += cache.ids.shape[1]
            return forward(model, cache.ids, None, logits_to_keep or ids.shape[1])
        cache.check_room(ids)
        logits = forward(model, ids, cache, logits_to_keep)
        cache.positions_processed += ids.shape[1]
        return logits


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    ids: Tensor | None,
    cache: AnyCache,
    max_new_tokens: int = 32,
    eos_token_id: int | Sequence[int] | None = None,
) -> Tensor:
    """Greedy continuation of what the cache holds, then `ids`: new tokens [B, n], n <= max_new_tokens.

    Args:
        ids: [B, q], fed through the cache first (a question, say); None to go on from the prompt itself.
        eos_token_id: what ends a text, one token or any of several: stop once every row has produced one; later tokens
            of a finished row repeat it (the first of several).

    Raises UserError for max_new_tokens below 1, and for ids=None where the cache has moved on from its prompt.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}; type max_new_tokens=1 or more")
    if ids is None and cache.seen > cache.prompt_tokens:
        raise UserError("the cache has been fed since its prompt; give the ids that follow, the last new token first")
    logits = cache.last_logits if ids is None else step(model, ids, cache)[:, -1]
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    tokens: list[Tensor] = []
    finished = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    with kvbench_attention(model):
        while True:
            token = logits.argmax(-1)
            if ends:
                token = token.masked_fill(finished, ends[0])
                finished |= torch.isin(token, token.new_tensor(ends))
            tokens.append(token)
            if len(tokens) == max_new_tokens or (ends and bool(finished.all())):
                return torch.stack(tokens, dim=1)
            logits = step(model, token[:, None], cache)[:, -1]
