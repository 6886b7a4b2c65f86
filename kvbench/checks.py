"""What a run checks before weights are loaded or anything is written: do prompts, budgets and stores fit?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from omegaconf import DictConfig

from kvbench.cache.build import Method
from kvbench.cache.calibrate import check_calibration
from kvbench.cache.rule_settings import check_budget, is_whole
from kvbench.errors import UserError
from kvbench.kernels import KERNELS
from kvbench.measures.measure import Measure
from kvbench.measures.target import Target
from kvbench.models.frequencies import refuse_crossing
from kvbench.models.shape import ModelShape
from kvbench.texts.load import load_text


def check_switches(config: DictConfig) -> None:
    """Set the thread count. Raises UserError for a switch or a budget that cannot be used."""
    if config.budget is not None:
        check_budget(config.budget)
    if config.kernel not in KERNELS:
        raise UserError(f"kernel={config.kernel} is unknown; choose from {', '.join(KERNELS)}")
    for key in ("save_tokens", "save_kept", "trust"):
        if not isinstance(config[key], bool):
            raise UserError(f"{key}={config[key]} is not true or false")
    for key, lowest, highest in (("seed", 0, 2**32 - 1), ("threads", 1, os.cpu_count() or 1)):
        value = lowest if key == "threads" and config.threads is None else config[key]
        if not is_whole(value) or not lowest <= value <= highest:
            raise UserError(f"{key}={value} is not a whole number from {lowest} to {highest}; type {key}=1")
    if config.threads is not None:
        torch.set_num_threads(config.threads)


NO_BOS = "type data.bos=none to leave them out"


def check_measures_fit(measures: Sequence[Measure], target: Target) -> None:
    """Raise UserError where a measure needs more text, positions or words than there are, or counts a sample twice."""
    tokens, limit = min(target.lengths), target.shape.max_positions
    for measure in measures:
        if measure.needs_words and target.spec.random:
            raise UserError(
                f"{measure.name} needs words and {target.spec.name} has random weights; type measure='[memory,latency]'"
            )
    for measure in measures:
        if (needs := measure.needed_tokens()) is None:
            continue
        key, needed = needs
        if min(measure.prompts(), default=needed) < len(target.bos):
            raise UserError(f"{key}: a prompt is shorter than the {len(target.bos)} tokens that begin a text; {NO_BOS}")
        if needed > tokens:
            raise UserError(f"{key} needs {needed} tokens and {_shortest(target)} {tokens}; type a smaller {key}")
        if limit is not None and needed > limit and not measure.may_exceed_positions():
            raise UserError(f"{key} needs {needed} positions and {target.spec.name} has {limit}; type a smaller {key}")
        for prompt in measure.prompts():
            fed = needed - max(measure.prompts())
            refuse_crossing(target.shape.frequency_change, target.spec.name, prompt, fed)
    for measure in measures:
        if (limits := measure.sample_limit(target.lengths)) is not None and limits[1] > limits[2]:
            key, asked, most = limits
            raise UserError(
                f"{key}={asked} would count some of the {sum(target.lengths)} tokens of data={target.text.name} twice; "
                f"type {key}={most} or fewer"
            )


def _shortest(target: Target) -> str:
    if len(target.stretches) == 1:
        return f"data={target.text.name} has"
    shortest = min(target.stretches, key=lambda stretch: stretch.length)
    return f"{shortest.name}, the shortest text of data={target.text.name}, has"


def check_methods(methods: Sequence[Method], measures: Sequence[Measure], shape: ModelShape) -> None:
    """Raise UserError where a store does not fit the heads, a measure refuses a method, or a budget a prompt."""
    prompts = {length for measure in measures for length in measure.prompts()}
    for method in methods:
        method.check_combination(shape.mla)
        method.store.check(shape.head_dim, shape.value_dim)
        for measure in measures:
            if method.rule.sees_future and measure.rates_quality and not measure.knows_future:
                raise UserError(
                    f"method={method.name} sees the future, and {measure.name} does not know the tokens to come; "
                    f"leave {measure.name} out of measure=, or {method.name} out of the methods"
                )
            measure.refuse(method)
        for prompt in sorted(prompts):
            method.rule.tokens(prompt)


def check_calibration_text(measures: Sequence[Measure], target: Target) -> None:
    """Raise UserError where the text to calibrate on is not here, or a measure scores some of it."""
    essays = load_text({"fetched": "essays"})
    for text, stretch in zip(target.text.each, target.stretches, strict=True):
        if text.fingerprint != essays.fingerprint:
            continue
        for measure in measures:
            if (limits := measure.sample_limit(target.lengths)) is not None:
                key, asked, _ = limits
                spans = measure.scored_spans(target.lengths)
                here = [(first - stretch.start, stop - stretch.start) for first, stop in spans if first < stretch.stop]
                check_calibration(stretch.length, here, f"{key}={asked}")


def small_prompts(methods: Mapping[str, Method], measures: Sequence[Measure]) -> Iterator[str]:
    """One line for each method that keeps more than half of a measured prompt: little is compressed there."""
    for label, method in methods.items():
        few = [
            f"{measure.name} at {prompt}"
            for measure in measures
            for prompt in measure.prompts()
            if 2 * (method.rule.tokens(prompt) or 0) > prompt
        ]
        if few:
            yield f"{label} keeps more than half of the prompt, so little is compressed: {', '.join(few)} tokens"
