"""Composing configs with Hydra; within `shared_compositions` once for all that differ in plain settings only.

Hydra needs some 150 ms a config, most of it for reading the same yaml files again. A sweep composes several configs a
job.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

_Compositions = dict[tuple[str, ...], DictConfig]
_shared: ContextVar[_Compositions | None] = ContextVar("shared_compositions", default=None)


@contextmanager
def shared_compositions() -> Iterator[None]:
    """A block in which `composed` reads no config file twice. Hydra must stay initialised as it is."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def composed(overrides: Sequence[str], plain_keys: Sequence[str] = ()) -> DictConfig:
    """What Hydra's `compose("config", overrides)` gives.

    plain_keys: root keys with a plain value, on which no choice of a config group depends. Raises Hydra's errors.
    """
    known = _shared.get()
    if known is None:
        config: DictConfig = compose("config", list(overrides))
        return config
    plain = [word for word in overrides if _is_plain(word, plain_keys)]
    others = tuple(word for word in overrides if word not in plain)
    if others not in known:
        known[others] = compose("config", list(others))
    config = copy.deepcopy(known[others])
    parser = OverridesParser.create()
    for word in plain:
        OmegaConf.update(config, word.partition("=")[0], parser.parse_override(word).value())
    return config


def _is_plain(word: str, keys: Sequence[str]) -> bool:
    """Whether a word is KEY=VALUE with one of these keys and a value of letters, digits, dots and signs."""
    key, equals, value = word.partition("=")
    return bool(equals) and key in keys and re.fullmatch(r"[\w.+-]+", value) is not None
