"""How a command ends where its output is closed, cannot hold every letter, or cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.results.test_damage import made
from tests.shared.paths import ROOT

CODE = """
import warnings
from kvbench.errors import SkippedFile, exit_with
def main():
    from rich.console import Console
    print("Δ 1.5 ± 2 — done")
    Console().print("Δ table")
    warnings.warn("'x' is skipped: damaged", SkippedFile)
    return 3
exit_with(main)
"""


def shell(line: str, code: str = CODE, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which `$PY` is Python running the code."""
    variables = {"PATH": "/usr/bin:/bin", "PY": sys.executable, "CODE": code} | variables
    return subprocess.run(["bash", "-c", line], env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_closed_stdout_changes_neither_the_exit_code_nor_the_warnings() -> None:
    done = shell('"$PY" -c "$CODE" >&-')
    assert done.returncode == 3 and done.stderr == "kvbench: warning: 'x' is skipped: damaged\n"


def test_all_streams_closed_change_no_exit_code() -> None:
    assert shell('"$PY" -c "$CODE" <&- >&- 2>&-').returncode == 3


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_letters_that_the_encoding_lacks_become_question_marks(encoding: str) -> None:
    variables = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", CODE], env=variables, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 3 and b"Traceback" not in done.stderr
    assert done.stdout.decode(encoding).startswith("Δ 1.5" if encoding == "utf-8" else "? 1.5")


def test_a_full_output_is_one_line_and_a_fault() -> None:
    done = shell('"$PY" -c "$CODE" >/dev/full')
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "kvbench: the output cannot be written (No space left on device)" in done.stderr


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = CODE.replace('print("Δ 1.5 ± 2 — done")', 'print("x" * 1_000_000)')
    done = shell('"$PY" -c "$CODE" | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}', code)
    assert done.returncode == 141 and "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", [">&-", ">/dev/null"])
def test_status_with_a_damaged_file_and_a_closed_stdout(tmp_path: Path, redirection: str) -> None:
    run = made(tmp_path / "a b", "a")
    (run / "metrics.parquet").write_bytes(b"PAR1")
    done = shell(f'"$PY" -m kvbench.status "{tmp_path}/a b" {redirection}')
    assert done.returncode == 3 and done.stderr.startswith("kvbench: warning: ") and done.stderr.count("\n") == 1
