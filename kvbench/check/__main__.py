"""`python -m kvbench.check`: do the identities hold here? Run it before a new model, GPU or method is trusted."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.check.subjects import calibrated, entries_of, fitting, subject_of, unquantised
from kvbench.cli.words import check_override
from kvbench.config import ConfigSources, take_sources
from kvbench.config.error_lines import check_root, one_line
from kvbench.config.sources import BUILT_IN
from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError, exit_with
from kvbench.sweep.plan import node_of

if TYPE_CHECKING:
    from kvbench.check.identities import Subject, Trial, Verdict
    from kvbench.models.load import LoadedModel

PROMPT, STEPS = 182, 12
"""Tokens of prompt (more where a budget is larger), and steps after it: enough for a KIVI block of 32 keys to be
quantised on the way."""

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
    loaded = load(config)
    from kvbench.gate import gate

    print(f"pass  {'full':<16} {gate(loaded, str(config.kernel)).line}", flush=True)
    started, failed, n, kernel = time.perf_counter(), 0, 1, ""
    fits, refused = fitting(subjects, loaded)
    for label, reason in refused.items():
        print(f"skip  {label:<16} {reason}", flush=True)
    for i, (trial, tried) in enumerate(trials(config, loaded, fits)):
        for verdict in verdicts(trial, loaded, tried, with_model=i == 0):
            print(line(verdict), flush=True)
            failed, n, kernel = failed + (not verdict.passed), n + 1, trial.kernel_name
    took = f"in {time.perf_counter() - started:.0f} s on kernel {kernel}"
    skipped = f"; {len(refused)} do not fit {loaded.name} and were skipped" if refused else ""
    print(f"all {n} hold, {took}{skipped}" if not failed else f"{failed} of {n} DO NOT HOLD, {took}{skipped}")
    return EXIT_SOME_FAILED if failed else 0


def load(config: DictConfig) -> LoadedModel:
    """The model. Raises UserError for what is missing, damaged or unsupported."""
    from kvbench.models.checkpoint import model_spec
    from kvbench.models.load import load_model

    return load_model(model_spec(node_of(config, "model")))


def verdicts(trial: Trial, loaded: LoadedModel, subjects: list[Subject], with_model: bool) -> Iterator[Verdict]:
    """The model's identities, then each method's."""
    from kvbench.check.identities import method_identities, model_identities

    full = subject_of(["method=full", "store=dense"]).make(None)
    if with_model:
        yield from model_identities(trial, full, unquantised(loaded, trial.prompts.shape[1] + trial.steps))
    for subject in subjects:
        yield from method_identities(trial, subject, full)


def prompt_for(subject: Subject) -> int:
    """Tokens of a prompt that the method has to cut."""
    return max(PROMPT, 2 * (subject.make(None).rule.tokens(PROMPT) or 0))


def trials(config: DictConfig, loaded: LoadedModel, subjects: list[Subject]) -> Iterator[tuple[Trial, list[Subject]]]:
    """A trial for every length of prompt, with the methods to try there.

    Raises UserError where the text or the model's positions do not suffice.
    """
    from kvbench.check.identities import Trial
    from kvbench.texts.load import load_text
    from kvbench.texts.tokens import tokenize

    text = load_text(node_of(config, "data"))
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
        rules = [subject.make(None) for subject in tried]
        yield Trial(loaded.model, rows[:, :length], rows[:, length:], str(config.kernel), rules), tried


def line(verdict: Verdict) -> str:
    """`pass  h2o  evicting equals masking the whole history  KL 2e-07 (at most 1e-05)`."""
    word = "pass" if verdict.passed else "FAIL"
    measured = ""
    if verdict.distance is not None:
        measured = f"{verdict.unit} {verdict.distance:.0e} (at most {verdict.limit:.0e})"
    return f"{word}  {verdict.subject:<16} {verdict.identity:<44} {measured}{verdict.detail}".rstrip()


if __name__ == "__main__":
    exit_with(main)
