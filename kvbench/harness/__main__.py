"""`python -m kvbench.harness method=h2o budget=256 tasks=arc_easy limit=100`: tasks of lm-evaluation-harness."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from kvbench.cli.words import check_override
from kvbench.config import ConfigSources, method_configs
from kvbench.config.command import run_command
from kvbench.config.error_lines import check_root
from kvbench.errors import UserError, exit_with
from kvbench.harness.settings import read_asked

USAGE = """python -m kvbench.harness tasks=TASK[,TASK] [KEY=VALUE ...]: methods side by side

  python -m kvbench.harness method=h2o budget=256 tasks=arc_easy limit=100
  python -m kvbench.harness compare='[kivi2,h2o]' budget=0.25 tasks=gsm8k,coqa model=hub model.id=Qwen/Qwen3-0.6B
  python -m kvbench.harness method=kivi4 tasks=my_task include_path=my_tasks/

  tasks=         names of tasks or groups        limit=         documents of each (100), or a share below 1
  include_path=  a folder with your own tasks    num_fewshot=   instead of the task's own
  held_back=1    compress before the context's last token: answers of one token go through the cache as well
  max_gen_toks=  where the task does not say     chat=true      in the tokenizer's chat template

All other settings are those of python -m kvbench. Needs pip install 'kvbench[lm_eval]'. Exit code 0: all measured;
3: some tasks failed; 2: unusable input."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate every method on every task and write a run folder; returns the exit code."""
    return run_command(arguments, USAGE, _evaluate)


def _evaluate(sources: ConfigSources, words: list[str]) -> int:
    settings = [spelled(word, sources) for word in words]
    config = sources.composed(settings)
    check_root(config, sources)
    methods = method_configs(config, [*sources.words, *settings])
    asked = read_asked(config.harness)
    if find_spec("lm_eval") is None:
        raise UserError("tasks need lm-evaluation-harness; type pip install 'kvbench[lm_eval]'")
    from kvbench.harness.evaluate import evaluate  # torch and lm_eval: seconds

    return evaluate(config, methods, asked)


def spelled(word: str, sources: ConfigSources) -> str:
    """A word as the config has it: `tasks=a,b` is `harness.tasks=[a,b]`. Raises UserError for what is no setting."""
    check_override(word, sources)
    key, _, value = word.partition("=")
    if key not in sources.root["harness"]:
        return f"{key}={os.path.expanduser(value)}"
    if key == "tasks":
        return f"harness.tasks=[{value.strip('[]')}]"
    return f"harness.{key}='{os.path.expanduser(value)}'" if key == "include_path" else f"harness.{key}={value}"


if __name__ == "__main__":
    exit_with(main)
