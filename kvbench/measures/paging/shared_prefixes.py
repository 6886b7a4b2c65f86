"""Paging: requests of different lengths in blocks of one pool, against one rectangle; then with shared prefixes.

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
from kvbench.errors import UserError
from kvbench.measures.context import Bench, Entry, Finding
from kvbench.measures.settings import Paging
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


def check_paging(method: Method) -> None:
    """Raise UserError for a method that does not keep every token."""
    if method.rule.budget is not None or method.recomputes:
        raise UserError(
            f"measure=paging compares memory where every token stays, and method={method.name} gives some "
            "up; leave it out, or type method=full store=paged"
        )


def paging(bench: Bench, settings: Paging) -> Iterator[Finding]:
    """One finding a method: contiguous_bytes and its waste; for pages paged_bytes, its waste, and with shared prefixes
    shared_bytes, saved_bytes, positions_processed and positions_saved."""
    context = settings.prefix + max(settings.own)
    with bench.progress.phase(f"paging {context}", len(bench.entries)) as advance:
        for entry in bench.entries:
            with bench.cell(entry, "paging", context=context):
                base = replace(
                    entry.row,
                    measure="paging",
                    context=context,
                    batch=len(settings.own),
                    n=1,
                    protocol=f"{settings.prefix} tokens in common",
                    note=NOTE,
                )
                yield Finding(list(_rows(bench, entry, settings, base)))
            advance()


def _rows(bench: Bench, entry: Entry, settings: Paging, base: Row) -> Iterator[Row]:
    store = entry.method.store
    found: list[tuple[str, float, str]] = []
    lengths = [settings.prefix + own + settings.tokens for own in settings.own]
    contiguous = contiguous_bytes(bench, store.inner if isinstance(store, PagedStore) else store, lengths)
    found += [
        ("contiguous_bytes", contiguous, "bytes"),
        ("contiguous_waste_bytes", contiguous * (1 - sum(lengths) / (max(lengths) * len(lengths))), "bytes"),
    ]
    if isinstance(store, PagedStore):
        alone, together = (serve(bench, entry.method, settings, share) for share in (False, True))
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


def contiguous_bytes(bench: Bench, store: Store, lengths: list[int]) -> int:
    """Bytes of one batch for all requests, with room for the longest in every row: allocated a layer at a time."""
    record = prefill(bench.loaded.model, bench.tokens[:1].unsqueeze(0).to(bench.loaded.device))
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
def serve(bench: Bench, method: Method, settings: Paging, share: bool) -> Served:
    """Admit every request, decode all in turns, and look at the pool then."""
    loaded, prompts, tokens = bench.loaded, *requests(bench, settings)
    pool = PrefixPool(
        loaded.model, method, blocks_needed(prompts, settings.tokens, share), loaded.revision, share, bench.kernel
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


def requests(bench: Bench, settings: Paging) -> tuple[list[Tensor], Tensor]:
    """Prompts [1, T], the same in their first tokens, and what follows each: int64 [n, tokens].

    Behind the prefix request i goes on i + 1 tokens further on in the text.
    """
    device, text = bench.loaded.device, bench.tokens
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
