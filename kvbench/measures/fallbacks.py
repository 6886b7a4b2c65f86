"""The prefill that the methods of a measure share, and the fallbacks where memory does not hold it.

Four fallbacks, each tried where the one before runs out of memory: one record for all methods; the same with the record
in host memory (on a GPU); a prefill for each method, which observes only what that method needs; the same with the
record in host memory. A method fails where the last one fails. Quality is the same to the bit. Times and peaks are not,
so `Journal.fallbacks` says which one was used, and the rows' notes repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.future import Future
from kvbench.cache.record import PrefillRecord
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.out_of_memory import with_fallback


@dataclass(frozen=True)
class Fallback:
    """together: one record for all methods. on_host: the record waits in host memory."""

    together: bool
    on_host: bool

    @property
    def note(self) -> str | None:
        """What rows say of it; None for the first, which needs no remark."""
        where = "its record in host memory" if self.on_host else ""
        if self.together:
            return f"one prefill for all methods, {where}: the device could not hold it" if self.on_host else None
        alone = "a prefill for this method alone: memory did not hold one for all methods"
        return f"{alone}, and {where}" if where else alone


def fallbacks_for(device: torch.device, methods: int) -> list[Fallback]:
    """The fallbacks for that many methods, in the order in which they are tried."""
    places = (False, True) if device.type == "cuda" else (False,)
    shared = (True, False) if methods > 1 else (True,)
    return [Fallback(together, on_host) for together in shared for on_host in places]


def announce(context: RunContext, fallback: Fallback) -> None:
    """Print which fallback is tried next, once a measure."""
    if fallback.note not in context.journal.fallbacks.values():
        context.progress.say(f"note: out of memory; next: {fallback.note}")


class Prefills:
    """The records of one batch of prompts, ids [B, T]: shared by all methods as long as memory holds it."""

    def __init__(
        self, context: RunContext, methods: Sequence[MethodRun], ids: Tensor, future: Future | None = None
    ) -> None:
        self.context, self.methods, self.ids, self.future = context, methods, ids, future
        self.fallbacks = fallbacks_for(ids.device, len(methods))
        self.current = self.fallbacks[0]
        self.shared: PrefillRecord | None = None

    def share(self) -> None:
        """Run the prefill that all methods share, where memory holds it."""
        with_fallback(self.fallbacks, self._share, self._retry)

    def use(
        self, method: MethodRun, use: Callable[[MethodRun, AnyCache], None], max_new_tokens: int, max_step: int
    ) -> None:
        """use(method, cache), with the method's cache of the prompts."""

        def work(fallback: Fallback) -> None:
            self._share(fallback)
            in_chunks = method.method.reads_in_chunks(self.ids.shape[1])
            prompt = self.ids if in_chunks else self.shared or self._record([method], fallback)
            model, kernel = self.context.loaded.model, self.context.kernel
            cache = build_cache(model, method.method, prompt, max_new_tokens, max_step, kernel)
            del prompt  # where a record is the method's own, only its cache is left
            use(method, cache)

        if not self.current.together:  # each method starts again at the first fallback without a shared record
            self.current = next(fallback for fallback in self.fallbacks if not fallback.together)
        remaining = self.fallbacks[self.fallbacks.index(self.current) :]
        if (note := with_fallback(remaining, work, self._retry).note) is not None:
            self.context.journal.fallbacks[method.label] = note

    def _retry(self, fallback: Fallback) -> None:
        self.shared, self.current = None, fallback
        announce(self.context, fallback)

    def _share(self, fallback: Fallback) -> None:
        if fallback.together and self.shared is None and self._in_one_piece(self.methods):
            self.shared = self._record(self.methods, fallback)

    def _in_one_piece(self, methods: Sequence[MethodRun]) -> list[MethodRun]:
        """Those of the methods that read these prompts in one piece, from a record."""
        return [method for method in methods if not method.method.reads_in_chunks(self.ids.shape[1])]

    def _record(self, methods: Sequence[MethodRun], fallback: Fallback) -> PrefillRecord:
        rules = [method.method.rule for method in self._in_one_piece(methods)]
        return prefill(self.context.loaded.model, self.ids, rules, fallback.on_host, self.future)


def each_cache(
    context: RunContext,
    /,  # `where` may hold a column of the same name
    ids: Tensor,
    use: Callable[[MethodRun, AnyCache], None],
    max_new_tokens: int,
    max_step: int,
    measure: str,
    future: Future | None = None,
    **where: Any,
) -> None:
    """use(method, cache) for each method that has not failed, with its cache of the prompts ids [B, T].

    `use` may be called again for a method whose first cache ran out of memory: it hands over its result at its end.
    max_new_tokens, max_step: as `build_cache` takes them. future: the tokens to come, for rules that see them. where:
    columns of the row that a failure leaves.
    """
    prefills = Prefills(context, context.remaining(measure, **where), ids, future)
    if prefills.methods:
        with context.guarded(prefills.methods, measure, **where):
            prefills.share()
    for method in context.remaining(measure, **where):
        with context.guarded(method, measure, **where):
            prefills.use(method, use, max_new_tokens, max_step)
