"""What the README says is run: its method, its example on a prompt, its command lines."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_module

from kvbench.cache.build import Method, build_cache
from kvbench.cache.store import DenseStore
from kvbench.config import method_configs
from kvbench.decode import step
from kvbench.methods.per_token import PerToken
from tests.models import random_llama

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_method_of_the_readme_works_on_every_store_that_it_names():
    (source,) = [block for block in blocks("python") if "class FirstLast" in block]
    names: dict[str, type] = {"__name__": "first_last"}  # type: ignore[dict-item]
    exec(compile(source, "README.md", "exec", dont_inherit=True), names)
    (config,) = [yaml.safe_load(block) for block in blocks("yaml") if "first_last" in block]
    assert config["rule"]["_target_"] == "kvbench.methods.first_last.FirstLast"
    rule = names["FirstLast"](budget=20, n_sink=4)
    model = random_llama(4, 2, 32, dtype=torch.float32)
    ids = torch.randint(0, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    for store in (DenseStore(), PerToken(4, 4)):
        cache = build_cache(model, Method("first_last", rule, store), ids[:, :40], max_new_tokens=20)
        for t in range(40, 60):
            step(model, ids[:, t : t + 1], cache)
        assert cache.layers[0].kept_positions()[0, 1].tolist() == [0, 1, 2, 3, *range(44, 60)]


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
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        assert method_configs(compose("config", words), words)[0].is_baseline
