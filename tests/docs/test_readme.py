"""What the README says is run: its method, its example on a prompt, its command lines."""

import re
import shlex

import pytest

from kvbench.config import method_configs
from kvbench.config.sources import BUILT_IN
from tests.shared.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_example_on_a_prompt_of_your_own_runs(smollm2, capsys):
    (source,) = [block for block in blocks("python") if "load_method" in block]
    exec(compile(source, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


def command_lines() -> list[str]:
    lines = re.findall(r"^python -m kvbench (.*)$", README.replace("\\\n", " "), re.M)
    return [line for line in lines if not line.startswith("--help")]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_of_the_readme_composes(line):
    words = [word for word in shlex.split(line, comments=True) if not word.startswith(("-", "hydra"))]
    words = [re.sub(r"=([\w.]+),.*", r"=\1", word) if "[" not in word else word for word in words]
    assert method_configs(BUILT_IN.composed(words), words)[0].is_baseline
