"""What the documents of this repository say: their commands, their Python examples, their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.shared.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"(^`(?P<file>[\w/.]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.S | re.M)
INLINE = re.compile(r"`((?:python -m|python scripts/|bash scripts/|pip install) ?[^`]*)`")


class Block(NamedTuple):
    """A fenced block: of which page, in which language, and, of a file, under which path it is to be saved."""

    page: str
    language: str
    file: str | None
    text: str


def blocks() -> list[Block]:
    """Every fenced block of every page, in order."""
    return [
        Block(name_of(page), found["language"], found["file"], found["text"])
        for page in PAGES
        for found in FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def commands() -> dict[str, str]:
    """Every command of every page, each once, with the page that has it: lines of blocks without a language, and
    commands within sentences."""
    found: dict[str, str] = {}
    for page in PAGES:
        outside = FENCE.sub("", page.read_text(encoding="utf-8"))
        for command in INLINE.findall(outside):
            found.setdefault(" ".join(command.split()), name_of(page))
    for block in blocks():
        if block.language == "":
            for line in block.text.replace("\\\n", " ").splitlines():
                if command := " ".join(re.sub(r"\s#.*|^#.*", "", line).split()):
                    found.setdefault(command, block.page)
    return found


def files(page: str, under: str) -> dict[str, str]:
    """The files that a page shows, by path, of those whose path begins with `under`."""
    return {
        block.file: block.text
        for block in blocks()
        if block.page == page and block.file is not None and block.file.startswith(under)
    }


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
