"""`python -m kvbench.check`: do the identities hold here? Run it before a new model, GPU or method is trusted."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.words import check_override
from kvbench.config import ConfigSources, MethodConfig, entry_overrides, method_config, take_sources
from kvbench.config.error_lines import check_root, one_line
from kvbench.config.sources import BUILT_IN
from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError, exit_with
from kvbench.models.shape import mla_layout
from kvbench.sweep.plan import node_of

if TYPE_CHECKING:
    from kvbench.check.identities import Subject, Trial, Verdict
    from kvbench.models.load import LoadedModel

BUDGETS, PROMPT, STEPS = (96, 288), 182, 12
"""Budgets for methods that are given none (the first that the rule takes), tokens of prompt (more where a budget is
larger), and steps after it: enough for a KIVI block of 32 keys to be quantised on the way."""

USAGE = """python -m kvbench.check [all] [KEY=VALUE ...]: identities that must hold on this machine, pass or fail

  python -m kvbench.check                                   each kind of method and store, on the offline model
  python -m kvbench.check all                               every method and every store: some minutes
  python -m kvbench.check model=hub model.id=Qwen/Qwen3-0.6B
  python -m kvbench.check method=h2o budget=64 store=int4   one method
  python -m kvbench.check compare='[h2o,snapkv+int8]' budget=64 kernel=triton

Settings are those of python -m kvbench. Exit code 0: all hold; 3: some do not; 2: unusable input."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, one line an identity as it is found; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in words):
        print(USAGE)
        return 0
    sources = BUILT_IN
    try:
        sources, rest = take_sources(words)
        settings = [word for word in rest if word != "all"]
        for word in settings:
            check_override(word, sources)
        return check(settings, sources, everything="all" in rest)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench: {one_line(error, sources)}", file=sys.stderr)
        return EXIT_USER_ERROR


def check(words: list[str], sources: ConfigSources, everything: bool = False) -> int:
    """Run every identity of the model and methods that the words name; everything: of all methods and stores."""
    config = sources.composed(words)
    check_root(config, sources)
    from kvbench.checks import check_switches

    check_switches(config)
    subjects = [subject_of(entry, sources) for entry in entries_of(config, words, sources, everything)]
    started, failed, n, kernel = time.perf_counter(), 0, 0, ""
    for i, (trial, tried) in enumerate(trials(config, subjects)):
        for verdict in verdicts(trial, tried, with_model=i == 0):
            print(line(verdict), flush=True)
            failed, n, kernel = failed + (not verdict.passed), n + 1, trial.kernel_name
    took = f"in {time.perf_counter() - started:.0f} s on kernel {kernel}"
    print(f"all {n} hold, {took}" if not failed else f"{failed} of {n} DO NOT HOLD, {took}")
    return EXIT_SOME_FAILED if failed else 0


def verdicts(trial: Trial, subjects: list[Subject], with_model: bool = True) -> Iterator[Verdict]:
    """The model's identities, then each method's."""
    from kvbench.check.identities import method_identities, model_identities

    full = subject_of(["method=full", "store=dense"]).make(None)
    if with_model:
        everything = (trial.prompts.shape[1] + trial.steps) // 32 * 32 + 32
        unquantised = subject_of(["method=kivi", "group=32", f"residual={everything}"]).make(None)
        has_heads = mla_layout(trial.model.config) in (None, "expand")
        yield from model_identities(trial, full, unquantised if has_heads else None)
    for subject in subjects:
        yield from method_identities(trial, subject, full)


def prompt_for(subject: Subject) -> int:
    """Tokens of a prompt that the method has to cut."""
    return max(PROMPT, 2 * (subject.make(None).rule.tokens(PROMPT) or 0))


def entries_of(
    config: DictConfig, words: list[str], sources: ConfigSources, everything: bool = False
) -> Iterator[list[str]]:
    """The overrides of each method to check: those that the words name, else those of conf/check.yaml, or every method
    and full in every store."""
    keys = [word.split("=")[0] for word in words]
    common = [word for word in words if word.split("=")[0] not in ("compare", "method", "store")]
    if config.compare is not None:
        if "method" in keys or "store" in keys:
            raise UserError("compare=... with method= or store= is ambiguous; put both into the list, as h2o+int4")
        entries = [entry_overrides(str(entry), sources.knobs) for entry in config.compare]
    elif "method" in keys or "store" in keys:
        entries = [[word for word in words if word.split("=")[0] in ("method", "store")]]
    elif not everything:
        entries = [entry_overrides(entry) for entry in default_entries()]
    else:
        # hf_ caches come from transformers: kvbench measures them and promises nothing about them.
        methods, stores = sources.files("method"), sources.files("store")
        entries = [[f"method={name}"] for name in methods if not name.startswith("hf_")]
        entries += [["method=full", f"store={name}"] for name in stores if not name.startswith(("kivi", "hf_"))]
    for entry in entries:
        overrides = [*common, *entry]
        yield [*overrides, *(default_budget(overrides, sources) if wants_budget(overrides, sources) else [])]


def default_entries() -> list[str]:
    """As `compare` takes them."""
    return [str(entry) for entry in yaml.safe_load(resources.files("kvbench.conf").joinpath("check.yaml").read_text())]


def default_budget(overrides: list[str], sources: ConfigSources) -> list[str]:
    """The smaller of BUDGETS that the method takes."""
    try:
        subject_of(overrides, sources).make(BUDGETS[0])
    except (UserError, HydraException):
        return [f"budget={BUDGETS[1]}"]
    return [f"budget={BUDGETS[0]}"]


def wants_budget(overrides: list[str], sources: ConfigSources) -> bool:
    """Whether the method reads a budget, and none is given."""
    config = sources.composed(overrides)
    return config.budget is None and "${budget}" in str(OmegaConf.to_container(config.method, resolve=False))


def subject_of(overrides: list[str], sources: ConfigSources = BUILT_IN) -> Subject:
    """The method of the overrides, which can be built again and again."""
    from kvbench.check.identities import Subject
    from kvbench.method_runs import instantiate

    @cache  # a config takes longer to compose than some identities to check
    def composed(budget: int | None) -> MethodConfig:
        with_budget = [*overrides, *([] if budget is None else [f"budget={budget}"])]
        return method_config(sources.composed(with_budget), sources)

    return Subject(composed(None).label, lambda budget: instantiate(composed(budget)))


def calibrated(subject: Subject, loaded: LoadedModel) -> Subject:
    """The subject with a store that has seen what it has to see of the model."""
    from kvbench.cache.calibrate import calibrate

    return replace(subject, make=lambda budget: calibrate(subject.make(budget), loaded))


def trials(config: DictConfig, subjects: list[Subject]) -> Iterator[tuple[Trial, list[Subject]]]:
    """Load the model; a trial for every length of prompt, with the methods to try there.

    Raises UserError where the text or the model's positions do not suffice.
    """
    from kvbench.check.identities import Trial
    from kvbench.models.load import load_model, model_spec
    from kvbench.texts.load import load_text, tokenize

    loaded, text = load_model(model_spec(node_of(config, "model"))), load_text(node_of(config, "data"))
    tokens = tokenize(text, loaded.tokenizer, loaded.vocab_size)
    room = min(loaded.max_positions or len(tokens), len(tokens) // 2) - STEPS
    at_length: dict[int, list[Subject]] = {}
    for subject in subjects:
        at_length.setdefault(prompt_for(subject), []).append(subject)
    if (longest := max(at_length)) > room:
        raise UserError(
            f"a check of these methods takes prompts of {longest} tokens and {STEPS} more, and data={text.name} "
            f"with {loaded.name} has room for {room}; type budget={max(1, room // 2)} or less, or another data="
        )
    for length, subjects_there in sorted(at_length.items()):
        tried = [calibrated(subject, loaded) for subject in subjects_there]
        rows = tokens[: 2 * (length + STEPS)].view(2, length + STEPS).to(loaded.device)
        rules = [subject.make(None).rule for subject in tried]
        yield Trial(loaded.model, rows[:, :length], rows[:, length:], str(config.kernel), rules), tried


def line(verdict: Verdict) -> str:
    """`pass  h2o  a batch equals its rows alone  KL 2e-09 (at most 1e-03)`."""
    word = "pass" if verdict.passed else "FAIL"
    measured = ""
    if verdict.distance is not None:
        measured = f"{verdict.unit} {verdict.distance:.0e} (at most {verdict.limit:.0e})"
    return f"{word}  {verdict.subject:<16} {verdict.identity:<44} {measured}{verdict.detail}".rstrip()


if __name__ == "__main__":
    exit_with(main)
