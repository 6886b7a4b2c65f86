"""The words of a command: flags, KEY=VALUE settings, and what is refused before Hydra reads any of them."""

import os
import re
from collections.abc import Sequence

from kvbench.config.error_lines import several
from kvbench.config.knobs import GROUPS, MEASURES, PRESETS
from kvbench.config.sources import TEXT_KEYS, ConfigSources
from kvbench.errors import UserError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS = {
    "-m": (),
    "--multirun": (),
    "--resolve": (),
    "-c": ("job", "hydra", "all"),
    "--cfg": ("job", "hydra", "all"),
    "-i": INFO,
    "--info": INFO,
}
"""Hydra's flags that mean something here, and the values they take."""

PACKS = ("methods", "none")
INTEGER = re.compile(r"""(?:^|(?<=[\[=,:{ ]))[+-]?\d{19,}(?=$|[\]}, "'])""")
"""A long whole number as a value, alone or in a list or mapping."""
COMMANDS = ("fetch", "report", "plan", "check", "status", "harness", "verify", "board")


def check_words(arguments: Sequence[str], sources: ConfigSources) -> list[str]:
    """The words, flags first: Hydra reads no flag between settings.

    Raises UserError where a word is neither a flag of `FLAGS` with its value nor a usable KEY=VALUE.
    """
    flags: list[str] = []
    settings: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.startswith("~"):
            raise UserError(f"{word}: settings cannot be taken away; leave it out, for the default")
        if not word.startswith("-"):
            check_override(word, sources)
            key, _, value = word.partition("=")
            settings.append(f"{key}={os.path.expanduser(value)}")  # no shell does it after a key with a dot
            continue
        flag, _, value = word.partition("=")
        if flag not in FLAGS:
            raise UserError(f"{word} is no option; type python -m kvbench --help, or KEY=VALUE such as method=h2o")
        choices = FLAGS[flag]
        given = value or (next(words, "") if choices else "")
        if choices and given not in choices:
            given = f"{flag} {given}".strip()
            raise UserError(f"'{given}' is unknown; type {flag} followed by one of {', '.join(choices)}")
        flags += [flag, given] if choices else [flag]
    return [*flags, *settings]


def check_override(word: str, sources: ConfigSources) -> None:
    """Raise UserError for a word that is no KEY=VALUE, and for a value that no name can be."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        groups = ("method", "model")
        advice = next((f"{group}={word}" for group in groups if word in sources.files(group)), "method=h2o")
        if word in COMMANDS:
            advice = f"python -m kvbench.{word}"
        raise UserError(f"'{word}' is not KEY=VALUE; type {advice}, for example")
    if key == "hydra":
        raise UserError(f"{word}: Hydra's settings are set one by one; type hydra/launcher=joblib, for example")
    if key == "measure" and value.startswith("{"):
        raise UserError(f"{word} is not a list; type measure='[{next(iter(sources.files(MEASURES)))}]', for example")
    is_text = key.lstrip("+") in TEXT_KEYS
    if not is_text and (large := next(filter(is_beyond_64_bits, INTEGER.findall(value)), None)):
        raise UserError(f"{key}={large} does not fit into 64 bits; type a smaller number")
    if key in (*GROUPS, PRESETS):
        check_choice(key, value.strip("'\""), sources)
    if key == "sweep.pack" and value not in PACKS:
        raise UserError(f"{word} is unknown; type {' or '.join(f'sweep.pack={choice}' for choice in PACKS)}")


def is_beyond_64_bits(number: str) -> bool:
    return not -(2**63) <= int(number) < 2**63


def check_choice(group: str, value: str, sources: ConfigSources) -> None:
    """Raise UserError where the value of a config group is no name; Hydra looks up the names themselves."""
    if value in ("", "null"):
        raise UserError(f"{group}={value} names nothing; choose from {', '.join(sources.files(group))}")
    if value.startswith("["):
        advice = several(group, value.strip("[]"), sources)
        raise UserError(f"{group}={value} is a list, and {group} takes one name; {advice}")
    if value.startswith("{"):
        raise UserError(f"{group}={value} is no name; choose from {', '.join(sources.files(group))}")


def sweep_words(words: Sequence[str], sources: ConfigSources) -> list[str]:
    """The words under -m: `method=a,b,c` becomes `compare=[a,b,c]`, so that the methods share a job and its prefills.

    sweep.pack=none leaves it alone.
    """
    kept = without_pack(words)
    if "sweep.pack=none" in words or any(word.startswith(("compare=", "store=")) for word in words):
        return kept
    known = sources.files("method")
    packed = []
    for word in kept:
        methods = word.removeprefix("method=").split(",")
        is_list = word.startswith("method=") and len(methods) > 1 and all(method in known for method in methods)
        packed.append(f"compare=[{','.join(methods)}]" if is_list else word)
    return packed


def without_pack(words: Sequence[str]) -> list[str]:
    """The words that Hydra reads: `sweep.pack` is kvbench's own."""
    return [word for word in words if not word.startswith("sweep.pack=")]
