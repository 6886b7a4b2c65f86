"""ITL: the intervals between the tokens of a greedy generation, over a fixed length and to the natural end."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvbench.cache.build import build_cache
from kvbench.cache.graph import WARM_UP, decoder_for
from kvbench.cache.record import PrefillRecord, clock
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.latency import GENERATED, Latency
from kvbench.measures.statistics import bounds, median_interval
from kvbench.models.load import end_tokens
from kvbench.results.row import Row

FIXED = 16
"""Intervals of the fixed length."""


@dataclass(frozen=True)
class Generation:
    """The times at which each token of a batch was known, in seconds after the cache was built.

    doubt: why its steps were no replays of a graph, where a graph was wanted. untimed: first intervals that no ITL
    counts, because a graph is captured in them. natural: tokens to the end of the last row's text, or to the most that
    was asked for; 0 where nobody asked. ended: rows that came to an end by themselves within them.
    """

    method: MethodRun
    context: int
    batch: int
    kernel: str
    doubt: str | None
    at: list[float]
    untimed: int
    natural: int
    ended: int

    def rows(self, seed: int) -> Iterator[Row]:
        """itl_p50_ms over the fixed length; natural_itl_p50_ms, natural_tokens and natural_ms where asked for."""
        base = replace(
            self.method.row,
            measure="latency",
            context=self.context,
            batch=self.batch,
            kernel=self.kernel,
            protocol="interleaved",
            unit="ms",
        )
        intervals, first = 1e3 * np.diff(self.at), self.untimed
        doubt = () if self.doubt is None else (self.doubt,)
        note = "; ".join(("greedy, each token fed back", *doubt))
        yield from _median(base, "itl_p50_ms", intervals[first : first + FIXED], note, seed)
        if not self.natural:
            return
        ended = f"{self.ended} of {self.batch} ended by themselves"
        note = "; ".join(("greedy, to the natural end", ended, *doubt))
        yield from _median(base, "natural_itl_p50_ms", intervals[first : self.natural - 1], note, seed)
        yield replace(base, metric="natural_ms", value=1e3 * self.at[self.natural - 1], n=1, note=note)
        yield replace(base, metric="natural_tokens", value=float(self.natural), unit="tokens", n=1, note=note)


def _median(base: Row, metric: str, values: np.ndarray, note: str, seed: int) -> Iterator[Row]:
    if len(values):
        yield replace(
            base,
            metric=metric,
            value=float(np.median(values)),
            n=len(values),
            note=note,
            **bounds(median_interval(values, seed)),
        )


def generation(context: RunContext, settings: Latency, method: MethodRun, record: PrefillRecord) -> Generation:
    """Generate from a cache of the record's prompts: FIXED intervals, or until all rows end, `tokens_natural` at most.

    A token is known when the host has read it, since a reader waits for it and the loop decides by it.
    """
    model, device, ends = context.loaded.model, record.ids.device, set(end_tokens(context.loaded))
    natural = stop = settings.tokens_natural
    cache = build_cache(model, method.method, record, max_new_tokens=max(GENERATED, natural), kernel=context.kernel)
    decoder = decoder_for(model, cache, settings.graph)
    untimed = WARM_UP + 1 if decoder.is_graph else 0
    least, at = untimed + FIXED + 1, list[float]()
    logits = cache.last_logits
    finished, ended = [False] * logits.shape[0], 0
    started = clock(device)
    while True:
        token = logits.argmax(-1)
        finished = [done or int(i) in ends for done, i in zip(finished, token.tolist(), strict=True)]
        at.append(clock(device) - started)
        stop = min(stop, len(at)) if all(finished) else stop
        ended = sum(finished) if len(at) <= natural else ended
        if len(at) >= max(least, stop):
            break
        logits = decoder.feed(token[:, None])[:, -1]
    return Generation(
        method, record.prompt_tokens, logits.shape[0], decoder.kernel_name, decoder.note, at, untimed, stop, ended
    )
