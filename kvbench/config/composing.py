"""The one place where kvbench calls Hydra's compose, and where a sweep's words are split into jobs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from kvbench.config.knobs import KNOBS, OTHER_KNOBS

ROOT = "kvbench"
"""The name of the root config in Hydra's ConfigStore. Launchers send the store to their jobs."""

_shared: ContextVar[dict[tuple[str, ...], DictConfig] | None] = ContextVar("shared_compositions", default=None)


def register(root: DictConfig) -> None:
    """Store the root config where Hydra looks for it."""
    ConfigStore.instance().store(name=ROOT, node=root)


@contextmanager
def own_hydra() -> Iterator[None]:
    """A block in which Hydra reads `kvbench.conf`. A Hydra that is running, kvbench's or the caller's, is put back."""
    shared = GlobalHydra.instance()
    running = shared.hydra
    shared.clear()
    try:
        with initialize_config_module("kvbench.conf", job_name="kvbench", version_base="1.3"):
            yield
    finally:
        shared = GlobalHydra.instance()
        shared.clear()
        if running is not None:
            shared.initialize(running)


def composed(root: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The config of the overrides. Raises Hydra's errors for overrides that cannot be used."""
    known = _shared.get()
    if known is None:
        return _composed(root, overrides)
    knobs = [word for word in overrides if _is_plain_knob(word)]
    others = tuple(word for word in overrides if word not in knobs)
    if others not in known:
        known[others] = _composed(root, others)
    config = copy.deepcopy(known[others])
    parser = OverridesParser.create()
    for word in knobs:
        OmegaConf.update(config, word.partition("=")[0], parser.parse_override(word).value())
    return config


def _composed(root: DictConfig, overrides: Sequence[str]) -> DictConfig:
    register(root)
    with own_hydra():
        return compose(ROOT, list(overrides))


@contextmanager
def shared_compositions() -> Iterator[None]:
    """A block in which configs that differ only in knobs are composed once. No config file may change meanwhile.

    Hydra needs about 150 ms per config, most of it for reading yaml files; a sweep composes several configs per job.
    """
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def _is_plain_knob(word: str) -> bool:
    """Whether a word sets a knob, on which no choice of a config group depends, to a number or a name."""
    key, equals, value = word.partition("=")
    return bool(equals) and key in (*KNOBS, *OTHER_KNOBS) and re.fullmatch(r"[\w.+-]+", value) is not None


def split_jobs(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep over the words."""
    with own_hydra():
        # Internal to Hydra, pinned below 1.4: a plan must split the words exactly as the sweeper is going to.
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        batches = BasicSweeper.split_arguments(parser.parse_overrides(list(words)), None)
    return [list(overrides) for batch in batches for overrides in batch]
