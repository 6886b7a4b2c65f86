"""The prefill that the methods of a measure share, and what is done where memory does not hold it.

There are four ways, each taken where the one before runs out of memory: one record for all methods; the same with the
record in the host's memory (on a GPU); a prefill for each method, with nothing observed but what it asks for; and that
with its record in the host's memory. A method fails where the last one fails. Quality is the same to the bit. Times and
peaks are not, so `Bench.ways` says which way it was, for the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import build_cache, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.record import PrefillRecord
from kvbench.measures.context import Bench, Entry, give_memory_back, is_out_of_memory


@dataclass(frozen=True)
class Way:
    """together: one record for all methods. on_host: it waits in the host's memory."""

    together: bool
    on_host: bool

    @property
    def note(self) -> str | None:
        """What rows say of it; nothing where all went as planned."""
        where = "its record in the host's memory" if self.on_host else ""
        if self.together:
            return f"one prefill for all methods, {where}: the device could not hold it" if self.on_host else None
        alone = "a prefill of its own: memory did not hold one for all methods"
        return f"{alone}, and {where}" if where else alone


def ways_of(device: torch.device, methods: int) -> list[Way]:
    """The ways for that many methods, in the order in which they are tried."""
    places = (False, True) if device.type == "cuda" else (False,)
    return [Way(together, on_host) for together in ((True, False) if methods > 1 else (True,)) for on_host in places]


def fits(work: Callable[[], None]) -> bool:
    """Whether work() gets through without running out of memory; where it does not, what it held is given back."""
    try:
        work()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    give_memory_back()  # out here, where nothing refers to the frames that held it any more
    return False


def announce(bench: Bench, way: Way) -> None:
    """Say what is tried next, once a measure."""
    if way.note not in bench.ways.values():
        bench.progress.say(f"note: out of memory; next: {way.note}")


class Prefills:
    """The records of one batch of prompts, ids [B, T]: one as long as it fits, then one after another."""

    def __init__(self, bench: Bench, entries: list[Entry], ids: Tensor) -> None:
        self.bench, self.entries, self.ids = bench, entries, ids
        self.ways, self.at = ways_of(ids.device, len(entries)), 0
        self.shared: PrefillRecord | None = None

    def begin(self) -> None:
        """Run the prefill that all share, if that can be."""
        self._down(self._share)

    def use(self, entry: Entry, use: Callable[[Entry, AnyCache], None], max_new_tokens: int, max_step: int) -> None:
        """use(entry, cache), with the entry's cache of the prompts."""
        apart = (i for i, way in enumerate(self.ways) if not way.together)
        self.at = min(self.at, next(apart, self.at))  # what the method before had to do is none of this one's
        self._down(partial(self._use, entry, use, max_new_tokens, max_step))
        if (note := self.ways[self.at].note) is not None:
            self.bench.ways[entry.label] = note

    def _down(self, work: Callable[[], None]) -> None:
        """work(), on the first way from the present one on that memory is enough for. Raises what the last one does."""
        while self.at + 1 < len(self.ways):
            if fits(work):
                return
            self.shared = None
            self.at += 1
            announce(self.bench, self.ways[self.at])
        work()

    def _share(self) -> None:
        way = self.ways[self.at]
        if way.together and self.shared is None:
            self.shared = self._record(self.entries, way)

    def _use(self, entry: Entry, use: Callable[[Entry, AnyCache], None], max_new_tokens: int, max_step: int) -> None:
        self._share()
        record = self.shared or self._record([entry], self.ways[self.at])
        cache = build_cache(self.bench.loaded.model, entry.method, record, max_new_tokens, max_step, self.bench.kernel)
        del record  # where it is the method's own, its cache is all that is left
        use(entry, cache)

    def _record(self, entries: list[Entry], way: Way) -> PrefillRecord:
        return prefill(self.bench.loaded.model, self.ids, [entry.method.rule for entry in entries], way.on_host)


def each_cache(
    bench: Bench,
    ids: Tensor,
    use: Callable[[Entry, AnyCache], None],
    max_new_tokens: int,
    max_step: int,
    measure: str,
    **where: Any,
) -> None:
    """use(entry, cache) for each method that is alive, with its cache of the prompts ids [B, T]; each a cell by itself.

    `use` may be called again for a method whose first cache ran out of memory: it hands over what it found at its end.
    max_new_tokens, max_step: as `build_cache` takes them. where: columns of the row that a failure leaves.
    """
    prefills = Prefills(bench, bench.alive(measure, **where), ids)
    if prefills.entries:
        with bench.shared(prefills.entries, measure, **where):
            prefills.begin()
    for entry in bench.alive(measure, **where):
        with bench.cell(entry, measure, **where):
            prefills.use(entry, use, max_new_tokens, max_step)
