"""Paging: requests of different lengths in blocks of one pool, against one padded batch; then with shared prefixes.

The requests begin with the same tokens. Each is admitted, then all decode in turns. Nothing is computed from a formula
that could be counted: bytes are those of storages, positions those that went through the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.build import Method, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.decode import step
from kvbench.cache.paged import PagedStore
from kvbench.cache.prefix import PrefixPool, blocks_needed, slots_of
from kvbench.cache.store import SlotShape, Store
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.paging import Paging
from kvbench.measures.result import Result
from kvbench.results.row import Row

NOTE = "paging is memory management, not compression: tokens are held as they were"


@dataclass(frozen=True)
class Served:
    """What a batch of requests took: bytes of pools and block tables, and of slots in them that hold no token;
    positions run; every request's logits after its prompt and each token, [n, 1 + T, V]."""

    held: int
    waste: float
    positions: int
    logits: Tensor


def measure_pages(context: RunContext, settings: Paging) -> Iterator[Result]:
    """One result a method: contiguous_bytes and its waste; for pages paged_bytes, its waste, and with shared prefixes
    shared_bytes, saved_bytes, positions_processed and positions_saved."""
    prompt = settings.prefix + max(settings.own)
    with context.progress.phase(f"paging {prompt}", len(context.methods)) as advance:
        for method in context.methods:
            with context.guarded(method, "paging", context=prompt):
                base = replace(
                    method.row,
                    measure="paging",
                    context=prompt,
                    batch=len(settings.own),
                    n=1,
                    protocol=f"{settings.prefix} tokens in common",
                    note=NOTE,
                )
                yield Result(list(_rows(context, method, settings, base)))
            advance()


def _rows(context: RunContext, method: MethodRun, settings: Paging, base: Row) -> Iterator[Row]:
    store = method.method.store
    found: list[tuple[str, float, str]] = []
    lengths = [settings.prefix + own + settings.tokens for own in settings.own]
    contiguous = contiguous_bytes(context, store.inner if isinstance(store, PagedStore) else store, lengths)
    found += [
        ("contiguous_bytes", contiguous, "bytes"),
        ("contiguous_waste_bytes", contiguous * (1 - sum(lengths) / (max(lengths) * len(lengths))), "bytes"),
    ]
    if isinstance(store, PagedStore):
        alone, together = (serve(context, method.method, settings, share) for share in (False, True))
        found += [
            ("paged_bytes", alone.held, "bytes"),
            ("paged_waste_bytes", alone.waste, "bytes"),
            ("shared_bytes", together.held, "bytes"),
            ("saved_bytes", alone.held - together.held, "bytes"),
            ("positions_processed", together.positions, "positions"),
            ("positions_saved", alone.positions - together.positions, "positions"),
            ("logit_difference", float((alone.logits - together.logits).abs().max()), "logits"),
        ]
    for metric, value, unit in found:
        yield replace(base, metric=metric, value=float(value), unit=unit)


def contiguous_bytes(context: RunContext, store: Store, lengths: list[int]) -> int:
    """Bytes of one batch for all requests, with room for the longest in every row: allocated a layer at a time."""
    record = prefill(context.loaded.model, context.tokens[:1].unsqueeze(0).to(context.loaded.device))
    total = 0
    for layer in record.layers:
        shape = SlotShape(
            len(lengths),
            layer.key.shape[1],
            layer.key.shape[-1],
            layer.value.shape[-1],
            max(lengths),
            1,
            layer.key.dtype,
            layer.key.device,
        )
        total += held_bytes(store.for_layer(layer.index).allocate(shape).buffers(0)).held
    return total


@torch.inference_mode()
def serve(context: RunContext, method: Method, settings: Paging, share: bool) -> Served:
    """Admit every request, decode all in turns, and look at the pool then."""
    loaded, prompts, tokens = context.loaded, *requests(context, settings)
    pool = PrefixPool(
        loaded.model, method, blocks_needed(prompts, settings.tokens, share), loaded.revision, share, context.kernel
    )
    caches = [pool.admit(loaded.model, method, ids, settings.tokens, loaded.revision) for ids in prompts]
    logits = [[cache.last_logits] for cache in caches]
    for t in range(settings.tokens):
        for i, cache in enumerate(caches):
            logits[i].append(step(loaded.model, tokens[i : i + 1, t : t + 1], cache)[:, -1])
    held = held_bytes(buffer for cache in caches for slots in slots_of(cache) for buffer in slots.buffers(slots.length))
    pools = held_bytes(pool.buffers()).held
    return Served(
        held.held,
        pools * _empty_share(caches),
        sum(cache.positions_processed for cache in caches),
        torch.stack([torch.cat(rows) for rows in logits]).to(torch.float32),
    )


def requests(context: RunContext, settings: Paging) -> tuple[list[Tensor], Tensor]:
    """Prompts [1, T], the same in their first tokens, and what follows each: int64 [n, tokens].

    Behind the prefix request i goes on i + 1 tokens further on in the text.
    """
    device, text = context.loaded.device, context.tokens
    prompts, following = [], []
    for i, own in enumerate(settings.own):
        start = settings.prefix + i + 1
        prompts.append(torch.cat([text[: settings.prefix], text[start : start + own]]).unsqueeze(0).to(device))
        following.append(text[start + own : start + own + settings.tokens])
    return prompts, torch.stack(following).to(device)


def _empty_share(caches: list[KVCache]) -> float:
    """Share of the slots of all blocks taken that hold no token: behind the last one of every sequence."""
    filled: dict[int, int] = {}
    size = 1
    for cache in caches:
        slots = slots_of(cache)[0]  # every layer's blocks are filled alike
        size = slots.pool.block_size
        for i, block in enumerate(slots.held[0]):
            filled[block] = max(filled.get(block, 0), min(size, slots.length - i * size))
    return 1 - sum(filled.values()) / (len(filled) * size)
