"""Text, a tokenizer for random models, benches of tiny models, and a keep rule that breaks on purpose."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvbench.cache.build import Method
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.result import Result
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.random import Random
from kvbench.methods.recompute import Recompute
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.load import LoadedModel
from kvbench.models.shape import shape_of
from kvbench.progress import Progress
from kvbench.results.row import Row

CHARACTERS = string.ascii_letters + string.digits + " .,:;!?'\n-="


@contextmanager
def light() -> Iterator[None]:
    """One thread, and a collector that does not look at what was imported: a peak collects, twice a method.

    Hydra's handler, which writes to the standard output of the test that is over, is gone afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
        root = logging.getLogger()
        for handler in list(root.handlers):
            if type(handler) is logging.StreamHandler:
                root.removeHandler(handler)


def character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character; what is not among `characters` becomes `#`."""
    vocabulary = {character: i for i, character in enumerate("#" + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="#"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="#", clean_up_tokenization_spaces=False)


def prose(length: int, seed: int = 0) -> str:
    """`length` characters of made-up words without a digit in them."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 9))) for _ in range(length)]
    return " ".join(words)[:length]


def methods(*names: str, budget: int = 12) -> dict[str, Method]:
    """Methods by name, small enough to compress prompts of a few dozen tokens with heads of 16."""
    made: dict[str, tuple[KeepRule, Store]] = {
        "full": (Full(), DenseStore()),
        "recompute": (Recompute(), DenseStore()),
        "h2o": (H2O(budget), DenseStore()),
        "random": (Random(budget), DenseStore()),
        "streaming_llm": (StreamingLLM(budget), DenseStore()),
        "kivi": (Full(), Kivi(4, 4, 8, 16)),
    }
    return {name: Method(name, *made[name]) for name in names}


def loaded(model: PreTrainedModel, tokenizer: Any = None) -> LoadedModel:
    shape = asdict(shape_of(model.config))
    return LoadedModel(
        **shape,
        model=model,
        tokenizer=tokenizer,
        name="tiny",
        revision="0",
        source="random",
        dtype=model.dtype,
        device=torch.device("cpu"),
        note=None,
    )


def run_context_of(
    model: PreTrainedModel, named: Mapping[str, Method], tokens: Tensor, tokenizer: Any = None, **settings: Any
) -> RunContext:
    """A bench with these methods, in this order: `full` must come first."""
    entries = []
    for label, method in named.items():
        store = "dense" if isinstance(method.store, DenseStore) else "kivi"
        entries.append(MethodRun(method, label, Row(model="tiny", method=label, store=store)))
    return RunContext(loaded(model, tokenizer), entries, tokens, Progress(quiet=True), **settings)


def rows_of(findings: Iterator[Result]) -> list[Row]:
    return [row for finding in findings for row in finding.rows]


def value(rows: list[Row], method: str, metric: str, **where: Any) -> float:
    """The value of the one row that fits. Fails where there is none, or several."""
    found = [
        row.value
        for row in rows
        if row.method == method and row.metric == metric and all(getattr(row, k) == v for k, v in where.items())
    ]
    (only,) = found
    assert only is not None
    return only


def limit_prefill(monkeypatch: pytest.MonkeyPatch, module: ModuleType, most: int) -> None:
    """Let `module.prefill` run out of memory for prompts of `most` tokens and more."""
    prefill = module.prefill

    def limited(model: PreTrainedModel, ids: Tensor, *rest: Any) -> Any:
        if ids.shape[1] >= most:
            raise torch.OutOfMemoryError("too long")
        return prefill(model, ids, *rest)

    monkeypatch.setattr(module, "prefill", limited)


ERRORS: dict[str, type[BaseException]] = {
    "failed": RuntimeError,
    "oom": torch.OutOfMemoryError,
    "interrupt": KeyboardInterrupt,
}


@dataclass(frozen=True)
class Breaks(KeepRule):
    """Keeps the newest tokens until position `at` comes, then raises what `how` names in `ERRORS`.

    "killed" and "gone" take the whole process with them.
    """

    how: str = "failed"
    at: int = 0
    n_sink: int = 0  # these three so that it can stand in for `random` in a config
    recent: int | None = None
    seed: int = 0

    def priority(self, scores: Tensor | None, position: Tensor, newest: int, budget: int, layer: int) -> Tensor:
        if newest == self.at and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if newest == self.at and self.how == "gone":
            os._exit(7)
        if newest == self.at:
            raise ERRORS[self.how](f"broken at position {newest}")
        return position.to(torch.float64)
