"""What every measure is given: the model, the methods, the text, and a journal for failures."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.caches import AnyCache
from kvbench.cache.rule import EMPTY
from kvbench.measures.out_of_memory import give_memory_back, is_out_of_memory
from kvbench.models.checkpoint import ModelSpec
from kvbench.models.load import LoadedModel
from kvbench.progress import Progress
from kvbench.results.kept_tokens import Kept
from kvbench.results.row import Row
from kvbench.texts.tokens import Stretch


@dataclass(frozen=True)
class MethodRun:
    """A method of the run, and the row that all its numbers start from. `label` is unique in the run."""

    method: Method
    label: str
    row: Row
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Whether this is the full cache that every other method is compared with."""
        return self.row.method == "full" and self.row.store == "dense" and self.row.prefill_chunk is None


@dataclass
class Journal:
    """What happened while measures ran.

    failures: label and row of the methods that failed. tracebacks: one text a failure. kept: kept tokens to be saved.
    fallbacks: by label, how a method was prefilled where memory did not hold one prefill for all.
    skipped: by label, why a method was not measured and has no rows.
    """

    failures: list[tuple[str, Row]] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """The fixed facts of a run.

    loaded: the model. methods: all of them, the full cache first. tokens: the text, int64 [N], without special tokens;
    several texts one behind the other. stretches: where each text lies; empty: there is one. bos: the tokens that
    windows and prompts begin with. kernel: as `build_cache` takes it. spec: how a subprocess can load the model; None:
    it cannot. prepared: by measure name, what `Measure.prepare` returned.
    """

    loaded: LoadedModel
    methods: Sequence[MethodRun]
    tokens: Tensor
    progress: Progress
    kernel: str = "auto"
    save_tokens: bool = False
    save_kept: bool = False
    seed: int = 0
    spec: ModelSpec | None = None
    bos: tuple[int, ...] = ()
    prepared: Mapping[str, Any] = field(default_factory=dict)
    stretches: tuple[Stretch, ...] = ()
    journal: Journal = field(default_factory=Journal)

    @property
    def baseline(self) -> MethodRun:
        """The full cache."""
        return self.methods[0]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [stretch.length for stretch in self.stretches] or [len(self.tokens)]

    @property
    def haystack(self) -> Tensor:
        """The tokens of the first text: what retrieval prompts hide their needles in."""
        return self.tokens[: self.lengths[0]]

    def window(self, start: int, length: int) -> Tensor:
        """`length` tokens of the text from `start` on, int64 [length].

        BOS tokens replace the first ones, so that the same tokens are scored with and without them.
        """
        ids = self.tokens[start : start + length]
        return torch.cat([ids.new_tensor(self.bos), ids[len(self.bos) :]]) if self.bos else ids

    def windows(self, starts: Iterable[int], length: int) -> Tensor:
        """Windows of one length as a batch on the model's device, int64 [B, length]."""
        return torch.stack([self.window(start, length) for start in starts]).to(self.loaded.device)

    def save_kept_tokens(
        self, method: MethodRun, cache: AnyCache, samples: Iterable[int], measure: str, **where: Any
    ) -> None:
        """With `save_kept`, record which tokens a method that evicts has kept.

        samples: number of each of the cache's rows. where: columns of the row (context=, question=).
        """
        if not self.save_kept or method.method.rule.budget is None:
            return
        row = replace(method.row, measure=measure, **where)
        held = cache.kept_positions()
        for b, sample in enumerate(samples):
            layers = {layer: [head[head != EMPTY].tolist() for head in rows[b]] for layer, rows in held.items()}
            self.journal.kept.append(Kept(row, sample, layers))

    @contextmanager
    def guarded(self, methods: MethodRun | Sequence[MethodRun], measure: str, **where: Any) -> Iterator[None]:
        """A block whose failure becomes a failed row of each of these methods instead of ending the run.

        where: columns of the row (context=, depth=). Interrupts pass through.
        """
        several = [methods] if isinstance(methods, MethodRun) else methods
        out_of_memory = False
        try:
            yield
        except Exception as error:  # any failure of one method is a result, and must not cost the others
            out_of_memory = is_out_of_memory(error)
            rows = {one.label: replace(one.row, measure=measure, **failure(error), **where) for one in several}
            self.journal.failures.extend(rows.items())
            self.journal.tracebacks.append(f"{', '.join(rows)} {measure} {where}\n{traceback.format_exc()}")
            _clear_frames(error)
        if out_of_memory:
            give_memory_back()

    def remaining(self, measure: str, **where: Any) -> list[MethodRun]:
        """The methods that have not failed in that measure (at that place)."""
        return [method for method in self.methods if not self.has_failed(method, measure, **where)]

    def has_failed(self, method: MethodRun, measure: str, **where: Any) -> bool:
        """Whether that method has failed in that measure (at that place) already."""
        return any(
            label == method.label
            and row.measure == measure
            and all(getattr(row, key) == value for key, value in where.items())
            for label, row in self.journal.failures
        )


def failure(error: BaseException) -> dict[str, Any]:
    """An error as the columns `status` and `note` of the row that it leaves."""
    status = "oom" if is_out_of_memory(error) else "failed"
    return {"status": status, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an error's traceback hold: they stay alive until the `with` block is left."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
