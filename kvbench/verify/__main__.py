"""`python -m kvbench.verify RUN_FOLDER samples=8`: measures drawn samples again and checks the rows; pass or fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config import ConfigSources
from kvbench.config.command import run_command
from kvbench.errors import EXIT_SOME_FAILED, UserError, exit_with

if TYPE_CHECKING:
    from kvbench.results.verification import VerifyRecord

SAMPLES = 8
EXAMPLE = f"python -m kvbench.verify results/2026-01-01_120000_h2o_1a2b3c4d samples={SAMPLES}"
USAGE = f"""python -m kvbench.verify RUN_FOLDER [samples={SAMPLES}] [salt=WORD]: are the numbers of a run folder true?

  python -m kvbench.verify results/reference/first_light samples={SAMPLES}

  samples=  how many samples (a method on a window or a prompt, or its bytes) are measured again
  salt=     a word of your own that takes part in the draw, so that nobody can know it before

Composes the folder's settings with today's source, checks the list of samples token by token, recomputes rows from
samples, measures the drawn samples again in the batches in which they ran, and writes verify.json into the folder.
Exit code 0: pass; 3: fail; 2: unusable input."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify one run folder, one line a check; returns the exit code."""
    return run_command(arguments, USAGE, _verify)


def _verify(sources: ConfigSources, words: list[str]) -> int:
    path, samples, salt = read_words(words)
    from kvbench.verify.recorded import read_recorded

    recorded = read_recorded(path)  # before torch, which takes seconds
    from kvbench.verify.verify import verify

    return report(verify(recorded, samples, salt, sources), recorded.run)


def read_words(words: Sequence[str]) -> tuple[Path, int, str]:
    """The folder, the number of samples, and the verifier's word. Raises UserError for anything else."""
    paths, samples, salt = [], SAMPLES, ""
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            paths.append(word)
        elif key == "samples":
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"{word} is not a whole number of at least 1; type samples={SAMPLES}")
            samples = int(value)
        elif key == "salt":
            salt = value
        else:
            raise UserError(f"{word} is no setting of kvbench.verify; choose from samples=, salt=")
    if len(paths) != 1:
        raise UserError(f"{len(paths)} folders given, one is verified at a time; type for example: {EXAMPLE}")
    return Path(paths[0]), samples, salt


def report(record: VerifyRecord, path: Path) -> int:
    """Print what the record comes to; returns the exit code."""
    from kvbench.results.verification import RECORD
    from kvbench.verify.draw import escapes

    word = "pass" if record.passed else "FAIL"
    print(f"{word}: {record.drawn} of {record.population} samples were measured again; {escapes(record)}")
    print(f"record: {path / RECORD}")
    return 0 if record.passed else EXIT_SOME_FAILED


if __name__ == "__main__":
    exit_with(main)
