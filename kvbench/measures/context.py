"""What every measure is given: the model, the methods, the text, and where failures go."""

import gc
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import Method
from kvbench.cache.caches import AnyCache
from kvbench.cache.rule import EMPTY
from kvbench.models.load import LoadedModel, ModelSpec
from kvbench.progress import Progress
from kvbench.results.kept_tokens import Kept
from kvbench.results.row import Row
from kvbench.texts.prompts import Prompt
from kvbench.texts.task_sets import Sample

NO_HOST_MEMORY = "can't allocate memory"
"""What torch's CPU allocator says, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, a device's or the host's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_HOST_MEMORY in str(error)


def give_memory_back() -> None:
    """What nobody refers to any more goes back to the allocator, and a GPU's from torch's to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def failure(error: BaseException) -> dict[str, Any]:
    """An error as the columns `status` and `note` of the row that it leaves."""
    status = "oom" if is_out_of_memory(error) else "failed"
    return {"status": status, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames that an error came through hold: until a `with` block is left they are alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@dataclass(frozen=True)
class Entry:
    """A method of the run, and the row that all its numbers start from. `label` is unique in the run."""

    method: Method
    label: str
    row: Row
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        return self.row.method == "full" and self.row.store == "dense"


@dataclass(frozen=True)
class Finding:
    """Rows and samples that are complete and can be written."""

    rows: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Bench:
    """loaded: the model. entries: the methods, baseline first. tokens: the text, int64 [N], without special tokens.

    bos: what windows and prompts begin with, None for nothing.
    failures: label and row of the cells that could not be measured. kept: what caches
    held, where `save_kept`. `kernel` is what build_cache is asked for.
    spec: how a process of its own can load the model; None: it cannot.
    ways: label of methods whose prefill was not the one of all, and how it was: see `kvbench.measures.fallbacks`.
    prompts: needle's by length, samples: those of tasks by name, where they were made and checked before.
    """

    loaded: LoadedModel
    entries: list[Entry]
    tokens: Tensor
    progress: Progress
    kernel: str = "auto"
    save_tokens: bool = False
    save_kept: bool = False
    seed: int = 0
    spec: ModelSpec | None = None
    bos: int | None = None
    prompts: dict[int, list[Prompt]] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: list[tuple[str, Row]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    def window(self, start: int, length: int) -> Tensor:
        """`length` tokens of the text from `start` on, int64; where there is a BOS it takes the place of the first, so
        that the same tokens are scored with and without it."""
        ids = self.tokens[start : start + length]
        return ids if self.bos is None else torch.cat([ids.new_tensor([self.bos]), ids[1:]])

    def note_kept(self, entry: Entry, cache: AnyCache, samples: Iterable[int], measure: str, **where: Any) -> None:
        """Where kept tokens are saved, note those of a method that leaves some out; `samples` number the cache's rows.

        `where` are columns of the row (context=, question=).
        """
        if not self.save_kept or entry.method.rule.budget is None:
            return
        row = replace(entry.row, measure=measure, **where)
        held = cache.kept_positions()
        self.kept += [
            Kept(
                row,
                sample,
                {layer: [head[head != EMPTY].tolist() for head in of_row[b]] for layer, of_row in held.items()},
            )
            for b, sample in enumerate(samples)
        ]

    @contextmanager
    def cell(self, entry: Entry, measure: str, **where: Any) -> Iterator[None]:
        """A block that may fail without ending the run: the failure becomes a row with its status and reason.

        `where` are columns of the row (context=, depth=). Interrupts pass through.
        """
        with self.shared([entry], measure, **where):
            yield

    @contextmanager
    def shared(self, entries: list[Entry], measure: str, **where: Any) -> Iterator[None]:
        """A block that `entries` have in common, as their prefill: its failure is a row of each."""
        out_of_memory = False
        try:
            yield
        except Exception as error:  # any failure of one cell is a result, reported, and must not cost the others
            out_of_memory = is_out_of_memory(error)
            rows = {e.label: replace(e.row, measure=measure, **failure(error), **where) for e in entries}
            self.failures.extend(rows.items())
            self.tracebacks.append(f"{', '.join(rows)} {measure} {where}\n{traceback.format_exc()}")
            _clear_frames(error)
        if out_of_memory:
            give_memory_back()

    def alive(self, measure: str, **where: Any) -> list[Entry]:
        """The methods that have not failed in that measure (at that place)."""
        return [entry for entry in self.entries if not self.failed(entry, measure, **where)]

    def failed(self, entry: Entry, measure: str, **where: Any) -> bool:
        """Whether that method has failed in that measure (at that place) already."""
        return any(
            label == entry.label
            and row.measure == measure
            and all(getattr(row, key) == value for key, value in where.items())
            for label, row in self.failures
        )
