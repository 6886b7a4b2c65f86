"""Several questions of one compressed cache: as if each were the first, or one after the other.

The cache is built once for a text. `independent`: it is restored to that moment before each question. `conversation`:
the question and its right answer are fed, in one forward, before the next question. The right answer stands there
whatever the method said, so that every method is asked the same tokens.

With `question=before` the first question is part of what is compressed, and the prompt's own prediction begins its
answer. Its right answer is fed before the later questions in both modes: they do not follow an open question.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.cache.caches import AnyCache
from kvbench.cache.decode import continuation, step
from kvbench.cache.future import Future
from kvbench.measures.baseline_first import ask_baseline_first
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.fallbacks import each_cache
from kvbench.measures.question_rows import answer_of, first_time
from kvbench.measures.result import Result
from kvbench.measures.turns import Turns
from kvbench.measures.turns.rows import AnswersByTurn, AskedTurns, sample_of, turn_rows
from kvbench.models.load import end_tokens
from kvbench.progress import Advance
from kvbench.texts.needle_tasks import score
from kvbench.texts.prompts import Prompt, Turn, make_prompts


def ask_turns(context: RunContext, settings: Turns) -> Iterator[Result]:
    """One result a length, task and mode, with the rows of each method and time of the first question."""
    for length in settings.lengths:
        prompts = context.prepared.get("turns", {}).get(length) or make_prompts(
            context.loaded.tokenizer, context.haystack, context.seed, settings, length, context.bos
        )
        for task in settings.tasks:
            of_task = [prompt for prompt in prompts if prompt.task.name == task]
            for mode in settings.mode:
                yield _ask_task(context, AskedTurns(settings, task, mode, length, of_task))


def _ask_task(context: RunContext, asked: AskedTurns) -> Result:
    settings, prompts, where = asked.settings, asked.prompts, asked.where
    labels = [(method.label, when) for method in context.methods for when in settings.question]
    answers: AnswersByTurn = [{label: {} for label in labels} for _ in range(settings.turns)]
    work = len(prompts) * len(labels)
    with context.progress.phase(f"turns {asked.task} {asked.mode} {asked.length}", work) as advance:
        methods = ask_baseline_first(
            context,
            lambda several: _ask_methods(several, asked, answers, advance),
            lambda method: [
                answer.score
                for of_turn in answers
                for answer in of_turn[method.label, first_time(settings.question)].values()
            ],
            settings.skip_below,
            "turns",
            f"{asked.task} {asked.mode} {asked.length}",
            **where,
        )
    done = [method for method in context.remaining("turns", **where) if method in methods]
    rows = [
        row for method in done for when in settings.question for row in turn_rows(context, asked, method, when, answers)
    ]
    samples = [
        sample_of(context, asked, done, i, when, answers) for when in settings.question for i in range(len(prompts))
    ]
    return Result(rows, samples)


def _ask_methods(context: RunContext, asked: AskedTurns, answers: AnswersByTurn, advance: Advance) -> None:
    """Ask all methods of the context."""
    for when in asked.settings.question:
        for i in range(len(asked.prompts)):
            _ask(context, asked, when, i, answers)
            advance(len(context.methods))


def _ask(context: RunContext, asked: AskedTurns, when: str, i: int, answers: AnswersByTurn) -> None:
    loaded, where, prompt = context.loaded, asked.where, asked.prompts[i]
    turns = prompt.turns[: asked.settings.turns]
    known = turns[0].question if when == "before" else []
    ids, ends = torch.tensor([prompt.ids + known], device=loaded.device), end_tokens(loaded)

    def converse(method: MethodRun, cache: AnyCache) -> None:
        context.save_kept_tokens(method, cache, [i], "turns", question=when, **where)
        moment = cache.snapshot()
        for number, turn in enumerate(turns):
            open_question = number == 0 and when == "before"
            fed = [] if open_question else turn.question
            said = continuation(loaded.model, ids.new_tensor([fed]) if fed else None, cache, turn.answer_tokens)
            answers[number][method.label, when][i] = answer_of(
                loaded.tokenizer, said, 0, ends, cache.kept_tokens, partial(score, turn.asked)
            )
            cache.restore(moment)
            if number + 1 < len(turns) and (open_question or asked.mode == "conversation"):
                step(loaded.model, ids.new_tensor([fed + turn.right]), cache)
                moment = cache.snapshot()

    room, largest = (
        asked.settings.most_asked_tokens(prompt),
        max(len(turn.question) + len(turn.right) for turn in turns),
    )
    each_cache(context, ids, converse, room, largest, "turns", _what_follows(prompt, turns, when, ids), **where)


def _what_follows(prompt: Prompt, turns: Sequence[Turn], when: str, ids: Tensor) -> Future:
    """The tokens to come, for methods that see them: questions that are not in the prompt, and all right answers."""
    tokens = [token for turn in turns for token in turn.question + turn.right]
    known = len(turns[0].question) if when == "before" else 0
    return Future(ids.new_tensor([tokens[known:]]), prompt.length)
