"""The rows and samples of retrieval: hits by depth, and hits that a window of the newest tokens cannot explain.

**Beyond the recent window.** A method that keeps the newest tokens finds every needle near the end of the context. So
prompts are split by where the needle stands. Its tokens lie *beyond recent* where none of them is among the newest B
tokens of what is compressed (the context; with the question before, context and question), B being the method's budget
in tokens. A plain recency window of that budget holds no token of such a needle when the question is read, whether
decode appends or evicts: the method must have kept the needle for another reason. All other prompts are
*within recent*. Methods without a budget keep every needle. Their rows take the smallest budget among the methods that
were measured together, and the note gives its tokens.

Tasks whose answer takes several sentences or a count have no such rows: niah_multivalue, niah_multiquery, vt, cwe, fwe,
qa_two_hop. In a sample, `needle_distance` counts the tokens from the needle's first one to the end of the context, and
`needle_tokens` those of the needle.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.needle import Needle
from kvbench.measures.question_rows import Answers, above_full, answers_of, engagement, finite_flags, rate_over
from kvbench.results.row import Row, with_flags
from kvbench.texts.prompts import Prompt
from kvbench.texts.templates import template_of
from kvbench.texts.tokens import token_hash


@dataclass(frozen=True)
class Asked:
    """The prompts of one task at one length, and the settings that they come from."""

    settings: Needle
    task: str
    length: int
    prompts: list[Prompt]

    @property
    def where(self) -> dict[str, Any]:
        """The columns that tell its rows from those of other tasks and lengths."""
        return {"context": self.length, "protocol": self.task}


def needle_rows(
    context: RunContext, asked: Asked, method: MethodRun, when: str, answers: Answers, together: Sequence[MethodRun]
) -> Iterator[Row]:
    """A method's rows: hit_rate, hits and hit_rate_minus_full at each depth and over all; hit_rate_beyond_recent,
    hit_rate_within_recent and their differences to the full cache; engaged, kept_tokens.

    together: the methods that were measured together, for the smallest budget.
    """
    prompts = asked.prompts
    base = _base(context, asked, method, when)
    depths = sorted({prompt.depth for prompt in prompts if prompt.depth is not None})
    groups = [(depth, [i for i, prompt in enumerate(prompts) if prompt.depth == depth]) for depth in depths]
    everything = list(range(len(prompts)))
    for depth, cell in [*groups, (None, everything)]:
        yield from _rate_rows(context, replace(base, depth=depth), method, when, cell, answers, "hit_rate")
    yield from _recent_rows(context, base, asked, method, when, answers, together)
    mine = answers[method.label, when]
    yield from engagement(replace(base, n=len(prompts)), [mine[i] for i in everything])


def _base(context: RunContext, asked: Asked, method: MethodRun, when: str) -> Row:
    settings = asked.settings
    template = template_of(context.loaded.tokenizer, settings.template).sha256
    remarks = [f"chat template {template[:12]}"] if template else []
    if settings.answer_tokens is not None:
        most = max(prompt.answer_tokens for prompt in asked.prompts)
        remarks.append(f"answers of at most {most} tokens")
    return replace(
        method.row,
        measure="needle",
        question=when,
        batch=min(settings.batch, len(asked.prompts)),
        bos=None if template else method.row.bos,  # a chat template brings its own
        note="; ".join(remarks) or None,
        **asked.where,
    )


def _rate_rows(
    context: RunContext, base: Row, method: MethodRun, when: str, cell: Sequence[int], answers: Answers, metric: str
) -> Iterator[Row]:
    """The hit rate over the prompts of `cell`, and its paired difference to the full cache's."""
    mine, full = answers[method.label, when], answers[context.baseline.label, when]
    scores, paired = [mine[i].score for i in cell], all(i in full for i in cell)
    here = with_flags(replace(base, n=len(cell)), *finite_flags(mine[i] for i in cell))
    if paired and not any(full[i].score for i in cell):
        here = with_flags(here, "uninformative")
    yield replace(here, metric=metric, unit="share", **rate_over(scores, context.seed))
    if metric == "hit_rate":
        yield replace(here, metric="hits", value=sum(scores), unit="hits")
    if paired and not method.is_baseline:
        here = with_flags(here, *finite_flags(full[i] for i in cell))
        theirs = [full[i].score for i in cell]
        yield above_full(replace(here, metric=f"{metric}_minus_full"), scores, theirs, context.seed)


def _recent_rows(
    context: RunContext,
    base: Row,
    asked: Asked,
    method: MethodRun,
    when: str,
    answers: Answers,
    together: Sequence[MethodRun],
) -> Iterator[Row]:
    within: dict[bool, list[int]] = {False: [], True: []}
    windows: set[int] = set()
    for i, prompt in enumerate(asked.prompts):
        compressed = prompt.length + (len(prompt.question) if when == "before" else 0)
        window = recent_tokens(method, together, compressed)
        if window is None or prompt.needle_span is None:
            return
        windows.add(window)
        within[prompt.needle_span[1] > compressed - window].append(i)
    here = base
    if method.method.rule.budget is None:
        newest = " to ".join(f"{tokens:,}" for tokens in sorted({min(windows), max(windows)}))
        text = f"recent: the newest {newest} tokens, the smallest budget measured beside it"
        here = replace(base, note="; ".join(filter(None, (base.note, text))))
    for metric, cell in (("hit_rate_beyond_recent", within[False]), ("hit_rate_within_recent", within[True])):
        if cell:
            yield from _rate_rows(context, here, method, when, cell, answers, metric)


def recent_tokens(method: MethodRun, together: Sequence[MethodRun], compressed: int) -> int | None:
    """Tokens of the recent window: the method's budget for that many compressed tokens, or the smallest of the others.

    None where no method has a budget.
    """
    own = method.method.rule.tokens(compressed)
    if own is not None:
        return own
    budgets = [other.method.rule.tokens(compressed) for other in together]
    return min((budget for budget in budgets if budget is not None), default=None)


def sample_of(
    context: RunContext, methods: Sequence[MethodRun], i: int, prompt: Prompt, when: str, answers: Answers
) -> dict[str, Any]:
    """What samples.jsonl records of one prompt and its answers."""
    sample = prompt_record(context, prompt, when) | {"methods": answers_of(methods, answers, when, i, "hit")}
    if context.save_tokens:
        sample["ids"], sample["question_ids"] = prompt.ids, prompt.question
    return sample


def prompt_record(context: RunContext, prompt: Prompt, when: str) -> dict[str, Any]:
    """What tells one prompt, asked `after` or `before` compression, from all others."""
    text, span = context.loaded.tokenizer.decode(prompt.ids + prompt.question), prompt.needle_span
    return {
        "measure": "needle",
        "task": prompt.task.name,
        "length": prompt.length,
        "depth": prompt.depth,
        "sample": prompt.sample,
        "question": when,
        "references": list(prompt.draft.references),
        "needle_distance": span and prompt.length - span[0],
        "needle_tokens": span and span[1] - span[0],
        "question_tokens": len(prompt.question),
        "sha256": token_hash(prompt.ids + prompt.question),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
