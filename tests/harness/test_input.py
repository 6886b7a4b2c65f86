"""What the harness answers before anything slow is imported, with lm_eval or without."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench.harness import __main__ as command


def test_a_missing_package_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main(["method=h2o", "budget=256", "tasks=arc_easy"]) == 2
    assert capsys.readouterr().err == (
        "kvbench: tasks need lm-evaluation-harness; type pip install 'kvbench[lm_eval]'\n"
    )


REFUSED = ["method=h2o", "budget=4"], ["tasks=a", "limit=x"]


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), *((words, 2) for words in REFUSED)])
def test_help_and_refusals_import_no_torch(words: list[str], code: int) -> None:
    source = (
        f"import sys; from kvbench.harness.__main__ import main; code = main({words!r}); "
        "assert not {'torch', 'lm_eval'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
