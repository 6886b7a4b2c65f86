"""What is asked of lm-evaluation-harness: the `harness:` node of the config, checked. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvbench.errors import UserError


@dataclass(frozen=True)
class Asked:
    """tasks: names of lm_eval, or of yaml files below `include_path`. The rest as conf/config.yaml says it."""

    tasks: list[str]
    limit: float | None
    num_fewshot: int | None
    include_path: str | None
    max_gen_toks: int
    held_back: int
    chat: bool


def read_asked(node: Any) -> Asked:
    """Raises UserError where a value cannot be used."""
    given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(given, Mapping):
        raise UserError(f"harness={given} is not a group of settings; type tasks=arc_easy")
    asked = Asked(**{str(key): value for key, value in given.items()})
    if not isinstance(asked.tasks, list) or not asked.tasks:
        raise UserError("no task is named; type tasks=arc_easy, for example")
    for key, lowest in (("num_fewshot", 0), ("max_gen_toks", 1), ("held_back", 0)):
        value = getattr(asked, key)
        if value is None and key == "num_fewshot":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise UserError(f"{key}={value} is not a whole number of at least {lowest}; type {key}={max(1, lowest)}")
    limit = asked.limit
    whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
    if limit is not None and not whole and not (isinstance(limit, float) and 0 < limit < 1):
        raise UserError(f"limit={limit} is neither a number of documents (100) nor a share of them (0.1)")
    if not isinstance(asked.chat, bool):
        raise UserError(f"chat={asked.chat} is not true or false")
    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise UserError(f"include_path={asked.include_path} is no folder; give the one that holds your task's yaml")
    return Asked(**{**vars(asked), "tasks": [str(task) for task in dict.fromkeys(asked.tasks)]})
