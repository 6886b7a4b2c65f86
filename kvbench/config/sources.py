"""Which configs there are: those that ship with kvbench, and those in folders or packages of the user's own.

A folder DIR of `--config-dir DIR` holds what `conf/` holds: `DIR/method/mine.yaml`, `DIR/store/...`,
`DIR/measures/...`, `DIR/model/...`, `DIR/data/...`, `DIR/experiment/...`. No torch here.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from kvbench.config import composing
from kvbench.config.knobs import GROUPS, MEASURES, PRESETS
from kvbench.errors import UserError

PACKAGE = "kvbench.conf"
SEARCHPATH = "hydra.searchpath"
DIRECTORY_FLAGS = ("--config-dir", "-cd")
TEXT_KEYS = (
    *(f"model.{key}" for key in ("name", "id", "path", "fetched", "revision")),
    *(f"data.{key}" for key in ("name", "id", "path", "fetched", "config", "split", "column")),
    "tasks.path",
    "harness.include_path",
)
"""Keys whose values are text, also where they look like a number."""
NUMBER_LIKE = re.compile(r"[+-]?(?:\.?\d[\w.+-]*|inf|nan|true|false)", re.IGNORECASE)
"""What Hydra may read as a number or a truth value. A name such as 7abc is among it, and is the same when quoted."""
EVERY_GROUP = (*GROUPS, MEASURES, PRESETS)


@dataclass(frozen=True)
class ConfigSources:
    """The configs of `kvbench.conf`, then those of each entry of `searchpath`.

    searchpath: entries as Hydra takes them, `file:///folder` or `pkg://package.conf`.
    """

    searchpath: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> ConfigSources:
        """The sources that the words of a command or a job name."""
        return take_sources(words)[0]

    @property
    def words(self) -> list[str]:
        """The override that tells Hydra of the searchpath; empty without one."""
        return [f"{SEARCHPATH}=[{','.join(map(quoted, self.searchpath))}]"] if self.searchpath else []

    def files(self, group: str) -> dict[str, Traversable]:
        """The yaml files of a group by name, sorted. Raises UserError where two sources hold the same name."""
        found = dict(_files_of(resources.files(PACKAGE), group))
        for entry in self.searchpath:
            for name, file in _files_of(_folder_of(entry), group).items():
                if name in found:
                    raise UserError(
                        f"{entry} holds {group}/{name}.yaml, and so does {_place(found[name])}; rename one of them"
                    )
                found[name] = file
        return dict(sorted(found.items()))

    def names(self, group: str) -> dict[str, str]:
        """The choices of a group, each with its help line: the first line of the file's comment."""
        return {name: _help_line(file.read_text(encoding="utf-8")) for name, file in self.files(group).items()}

    def content(self, group: str) -> dict[str, dict[str, Any]]:
        """The files of a group by name, as they are written: nothing composed, nothing resolved."""
        return {name: yaml_of(file) for name, file in self.files(group).items()}

    @property
    def root(self) -> dict[str, Any]:
        """The root of the config without Hydra's own keys: every measure has a node of its name.

        Raises UserError where a measure has the name of another key.
        """
        root = {key: value for key, value in built_in_root().items() if key not in ("defaults", "hydra")}
        measures = self.content(MEASURES)
        if taken := sorted(set(measures) & {*root, *EVERY_GROUP, "hydra"}):
            raise UserError(f"the measure {taken[0]} has the name of a setting; rename its yaml file")
        return root | measures

    @property
    def knobs(self) -> dict[str, str]:
        """Root keys that files of the groups declare beside those of config.yaml, each with its help line.

        Such a file begins with `# @package _global_` and holds the key: `mine_alpha: 1.0  # share of ...`.
        """
        known = {*built_in_root(), *EVERY_GROUP}
        found: dict[str, str] = {}
        for group in GROUPS:
            for file in self.files(group).values():
                text = file.read_text(encoding="utf-8")
                if not re.match(r"(#.*\n)*?# *@package _global_", text):
                    continue
                for key in yaml_of(file):
                    if key not in known:
                        found.setdefault(key, comment_of(key, text))
        return found

    def spelled(self, words: Sequence[str]) -> list[str]:
        """The words as Hydra has to read them.

        A knob that a yaml file declares is set whether the chosen method reads it or not, and a key whose default is
        `{}` takes any mapping: both need `++`. The name of a config and a value of TEXT_KEYS are text, also where they
        look like a number (model.revision=1.10).
        """
        knobs, open_keys = self.knobs, self._open_keys()
        return [self._spelled(word, knobs, open_keys) for word in words]

    def _spelled(self, word: str, knobs: dict[str, str], open_keys: set[str]) -> str:
        key, equals, value = word.partition("=")
        plain = key.lstrip("+")
        if plain in knobs or (plain in open_keys and value.lstrip().startswith("{")):
            return f"++{plain}{equals}{value}"
        if key in (*GROUPS, PRESETS) and re.fullmatch(r"[\w.-]+", value) and value not in self.files(key):
            return f"{key}={quoted(value)}"
        if plain in TEXT_KEYS:
            values = [quoted(one) if NUMBER_LIKE.fullmatch(one) else one for one in value.split(",")]
            return f"{key}={','.join(values)}"
        return word

    def _open_keys(self) -> set[str]:
        """Keys whose default is an empty mapping, as model.load_kwargs."""
        groups = {group: self.content(group).values() for group in ("model", "data")}
        groups["hydra.launcher"] = self.content("hydra/launcher").values()
        return {f"{at}.{key}" for at, files in groups.items() for file in files for key in file if file[key] == {}}

    def composed(self, overrides: Sequence[str]) -> DictConfig:
        """The config of a run. Raises UserError and Hydra's errors for overrides that cannot be used."""
        return composing.composed(self._stored_root(), [*self.words, *self.spelled(overrides)])

    def jobs(self, words: Sequence[str]) -> list[list[str]]:
        """The overrides of each job of a sweep over the words, as Hydra's own sweeper splits them."""
        return composing.split_jobs(self.spelled(words))

    def register(self) -> None:
        """Make `composing.ROOT` the config of these sources, for `hydra.main`."""
        composing.register(self._stored_root())

    def _stored_root(self) -> DictConfig:
        """config.yaml with a root node for each measure."""
        files = self.files(MEASURES).items()
        return _root_of(root_text(), tuple((name, file.read_text(encoding="utf-8")) for name, file in files))


BUILT_IN = ConfigSources()


def take_sources(words: Sequence[str]) -> tuple[ConfigSources, list[str]]:
    """The sources that `--config-dir DIR`, `-cd DIR` and `hydra.searchpath=[...]` name, and the other words.

    Raises UserError where a folder or package does not exist or holds no configs.
    """
    search_current_folder()
    entries: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in DIRECTORY_FLAGS:
            value = value if equals else next(left, "")
            if not value:
                raise UserError(f"{flag} names no folder; type {flag} DIR, where DIR holds method/mine.yaml")
            entries.append(f"file://{Path(value).expanduser().absolute()}")
        elif flag == SEARCHPATH:
            entries += _searchpath(word)
        else:
            others.append(word)
    entries = list(dict.fromkeys(entries))
    for entry in entries:
        _check_entry(entry)
    sources = ConfigSources(tuple(entries))
    for group in EVERY_GROUP if entries else ():
        sources.files(group)  # the same name in two sources is refused now
    return sources, others


def search_current_folder() -> None:
    """Let classes that a `_target_` names be found in the current folder, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _searchpath(word: str) -> list[str]:
    """The entries of `hydra.searchpath=[...]`, folders as absolute paths."""
    example = "type hydra.searchpath='[file:///folder]' or --config-dir FOLDER"
    try:
        found = OverridesParser.create().parse_override(word).value()
    except HydraException as error:
        raise UserError(f"{word} cannot be read; {example}") from error
    if not isinstance(found, list) or not all(isinstance(entry, str) and entry for entry in found):
        raise UserError(f"{word} is not a list of folders; {example}")
    entries = []
    for entry in found:
        scheme, separator, path = entry.partition("://")
        if separator and scheme not in ("file", "pkg"):
            raise UserError(f"{SEARCHPATH} does not know {scheme}://; {example}")
        is_package = bool(separator) and scheme == "pkg"
        path = path if separator else entry
        entries.append(entry if is_package else f"file://{Path(path).expanduser().absolute()}")
    return entries


def _check_entry(entry: str) -> None:
    folder = _folder_of(entry)
    if not folder.is_dir():
        raise UserError(f"{entry} is no folder; give one that holds method/mine.yaml, for example")
    if not any(folder.joinpath(group).is_dir() for group in EVERY_GROUP):
        raise UserError(f"{entry} holds none of the folders {', '.join(EVERY_GROUP)}; put yaml files into one of them")


def _folder_of(entry: str) -> Traversable:
    scheme, _, path = entry.partition("://")
    if scheme != "pkg":
        return Path(path)
    try:
        return resources.files(importlib.import_module(path.replace("/", ".")))
    except (ImportError, TypeError) as error:
        raise UserError(f"{entry} cannot be imported ({error}); give an importable package") from error


def _files_of(folder: Traversable, group: str) -> dict[str, Traversable]:
    place = folder.joinpath(group)
    if not place.is_dir():
        return {}
    files = sorted(place.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def _place(file: Traversable) -> str:
    own = Path(str(resources.files(PACKAGE)))
    return "kvbench" if Path(str(file)).is_relative_to(own) else str(file)


def _help_line(text: str) -> str:
    comments = (line[2:] for line in text.splitlines() if line.startswith("# "))
    return next((line for line in comments if "@package" not in line), "")


def comment_of(key: str, text: str) -> str:
    """The comment on a root key's line of a yaml text."""
    return next(iter(re.findall(rf"^{re.escape(key)}: *\S.*?  *# (.*)$", text, re.M)), "")


def quoted(text: str) -> str:
    """A text as a string of Hydra's override grammar."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def yaml_of(file: Traversable) -> dict[str, Any]:
    """A config file's own content, nothing resolved. Raises UserError where it is no mapping."""
    content = _parsed(file.read_text(encoding="utf-8"), str(file))
    return dict(content)


@functools.cache
def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise UserError(f"{name} is no yaml: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{name} holds no settings; write KEY: VALUE lines")
    return {str(key): value for key, value in content.items()}


@functools.lru_cache(maxsize=8)
def _root_of(text: str, measures: tuple[tuple[str, str], ...]) -> DictConfig:
    """The yaml text of a root, and the texts of its measures by name, as OmegaConf reads every other file."""
    root = OmegaConf.create(text)
    assert isinstance(root, DictConfig)
    for name, content in measures:
        root[name] = OmegaConf.create(content)
    return root


def built_in_root() -> dict[str, Any]:
    """config.yaml as it is written."""
    return yaml_of(resources.files(PACKAGE).joinpath("config.yaml"))


def root_text() -> str:
    """config.yaml with its comments."""
    return resources.files(PACKAGE).joinpath("config.yaml").read_text(encoding="utf-8")
