"""The answer card: for each need the setting with the best trade-off that the data support, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.report.compare.methods import Group, MethodNumbers

Mark = Literal["", "with loss", "not enough data"]


@dataclass
class CardLine:
    """The answer for one need.

    choice: the setting, None where there is none; answer: an architecture instead. smaller: than a 16-bit full cache.
    speed: time per output token against the full cache's in the same run. mark: empty where the data show that the cost
    stays within the stated margin. ranked_by: the quality that decided. command: what to run, where data are missing.
    reasons, limits: behind the answer, and what the data do not show.
    """

    key: str
    need: str
    group: Group
    ranked_by: str
    choice: MethodNumbers | None = None
    answer: str | None = None
    budget: str = "–"
    smaller: str = "–"
    cost: str = "–"
    speed: str = "–"
    mark: Mark = ""
    command: str | None = None
    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    @property
    def setting(self) -> str:
        """The chosen method or architecture; `–` where there is none."""
        return self.choice.label if self.choice is not None else self.answer or "–"

    @property
    def price(self) -> str:
        """The cost in quality; without an answer why there is none."""
        return self.cost if self.setting != "–" or not self.reasons else self.reasons[0]

    def abstain(self, reason: str, command: str | None) -> CardLine:
        """The same line without an answer, because the data do not suffice. command: what to run."""
        self.mark, self.command = "not enough data", command
        self.reasons.append(reason)
        return self


@dataclass(frozen=True)
class Fact:
    """What no measured row shows: a title, a sentence or two, and a command that gives the numbers."""

    title: str
    text: str
    command: str | None = None


@dataclass(frozen=True)
class AnswerCard:
    """groups: the lines for each model and device, under its name (empty where there is one). facts: beside them."""

    groups: Sequence[tuple[str, Sequence[CardLine]]]
    facts: Sequence[Fact]

    @property
    def lines(self) -> list[CardLine]:
        return [line for _, lines in self.groups for line in lines]


FACTS = (
    Fact(
        "Endless chat",
        "Keep the first tokens (sinks) and a window of the newest ones: memory stays fixed and perplexity stays "
        "stable, in the paper over 4 million tokens. What leaves the window is lost (StreamingLLM, arXiv 2309.17453).",
        "python -m kvbench method=streaming_llm sinks=4 budget=1024",
    ),
    Fact(
        "Exact detail over very long histories",
        "Use external retrieval: keep the history outside the cache, search it, and put the passages into the prompt. "
        "A cache of fixed size cannot hold every detail.",
    ),
    Fact(
        "A new model",
        "Share KV heads (GQA, MQA) or cache latents (MLA) from the start: the model is trained with the smaller cache, "
        "and methods can still compress it. By formula, 32,768 tokens in 16 bits: Llama 3.1 8B with 32 KV heads (MHA) "
        "16.00 GiB, with its 8 (GQA) 4.00 GiB, with one (MQA) 0.50 GiB; DeepSeek-V2-Lite with expanded heads 8.44 GiB, "
        "as latents (MLA) 0.95 GiB.",
        "python -m kvbench.plan model=llama3.1-8b context=32768",
    ),
)
