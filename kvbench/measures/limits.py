"""What a run is checked for before anything is loaded or written: do prompts, budgets and stores fit text and model?"""

from collections.abc import Iterator
from typing import Any

from kvbench.cache.build import Method
from kvbench.cache.calibrate import check_calibration
from kvbench.errors import UserError
from kvbench.measures.latency.generation import LONGEST
from kvbench.measures.paging.shared_prefixes import check_paging
from kvbench.measures.perplexity.windows import check_stream, window_offsets
from kvbench.measures.settings import Fidelity, Latency, Memory, Needle, Paging, Perplexity, Tasks, context_of
from kvbench.models.load import ModelSpec
from kvbench.models.shape import ModelShape
from kvbench.texts.load import Text, load_text


def check_lengths(settings: dict[str, Any], tokens: int, text: Text, shape: ModelShape, spec: ModelSpec) -> None:
    """Raise UserError for a context longer than the text or than the model's positions, windows that would score a
    token twice, prompts that would be counted twice, or a needle without words."""
    for name in settings:
        if name in ("needle", "tasks") and spec.random:
            raise UserError(f"{name} needs words and {spec.name} has random weights; type measure='[memory,latency]'")
    for key, needed in _needed(settings):
        if needed > tokens:
            raise UserError(f"{key} needs {needed} tokens and data={text.name} has {tokens}; type a smaller {key}")
        beyond = shape.max_positions is not None and needed > shape.max_positions
        if beyond and not key.startswith("perplexity.tokens"):  # a stream may go on: its rows say so
            raise UserError(
                f"{key} needs {needed} positions and {spec.name} has {shape.max_positions}; type a smaller {key}"
            )
    for key, asked, most in _independent(settings, tokens):
        if asked > most:
            raise UserError(
                f"{key}={asked} would count some of the {tokens} tokens of data={text.name} twice; "
                f"type {key}={most} or fewer"
            )


def _independent(settings: dict[str, Any], tokens: int) -> Iterator[tuple[str, int, int]]:
    """How many samples are asked for, and at most can be had without scoring, or continuing at, the same tokens."""
    for setting in settings.values():
        if isinstance(setting, Perplexity):
            yield "perplexity.windows", setting.windows, 1 + (tokens - setting.longest) // setting.tokens
        elif isinstance(setting, Fidelity):
            room = tokens - max(setting.contexts)
            yield "fidelity.samples", setting.samples, 1 + room // setting.tokens


def _needed(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, setting in settings.items():
        if isinstance(setting, Perplexity):
            streamed = setting.protocol == "stream"
            yield "perplexity.tokens" if streamed else "perplexity.context + perplexity.tokens", setting.longest
        elif isinstance(setting, Needle):
            yield "needle.lengths", max(setting.lengths)  # check_prompts counts question and answer
        elif isinstance(setting, Tasks):
            continue  # its contexts come from elsewhere, and check_tasks looks at their length
        elif isinstance(setting, Memory):
            yield "memory.contexts", max(setting.contexts) + setting.tokens
        elif isinstance(setting, Paging):
            yield "paging.prefix + paging.own", context_of(setting) + setting.tokens + len(setting.own)
        elif isinstance(setting, Fidelity):
            yield "fidelity.contexts", max(setting.contexts) + setting.tokens
        elif isinstance(setting, Latency):
            longest = max(setting.steps + setting.warmup, setting.tokens_natural, LONGEST)
            yield "latency.contexts", max(setting.contexts) + longest
        else:
            raise TypeError(f"{name} has no length")


def check_methods(methods: list[Method], settings: dict[str, Any], shape: ModelShape) -> None:
    """Raise UserError where a store does not fit the heads, or a budget does not fit a measured prompt."""
    prompts = {length for setting in settings.values() for length in _prompts(setting)}
    for method in methods:
        method.check_combination(shape.mla)
        method.store.check(shape.head_dim, shape.value_dim)
        if isinstance(scored := settings.get("perplexity"), Perplexity) and scored.protocol == "stream":
            check_stream(method)
        if "paging" in settings:
            check_paging(method)
        for prompt in sorted(prompts):
            method.rule.tokens(prompt)


def check_calibration_text(scored: Any, text: Text, tokens: int) -> None:
    """Raise UserError where the text to calibrate on is not here, or is what perplexity would score."""
    essays = load_text({"fetched": "essays"})
    if isinstance(scored, Perplexity) and text.fingerprint == essays.fingerprint:
        spans = [(offset + scored.prompt, offset + scored.longest) for offset in window_offsets(tokens, scored)]
        check_calibration(tokens, spans, scored.windows)


def small_prompts(methods: dict[str, Method], settings: dict[str, Any]) -> Iterator[str]:
    """One line for each method whose budget is more than half of a measured prompt: little can be seen there."""
    for label, method in methods.items():
        few = [
            f"{name} at {prompt}"
            for name, setting in settings.items()
            for prompt in _prompts(setting)
            if 2 * (method.rule.tokens(prompt) or 0) > prompt
        ]
        if few:
            yield f"{label} keeps more than half of the prompt, so little is compressed: {', '.join(few)} tokens"


def _prompts(setting: Any) -> list[int]:
    if isinstance(setting, Perplexity | Tasks):
        return [context_of(setting)]
    if isinstance(setting, Paging):
        return []  # no budget is measured there
    lengths: list[int] = setting.lengths if isinstance(setting, Needle) else setting.contexts
    return lengths
