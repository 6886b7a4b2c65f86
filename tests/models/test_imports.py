"""The rooms for models and texts import only what stands below them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvbench

PACKAGE = Path(kvbench.__file__).parent
BELOW = ("errors", "files", "progress", "background", "hub", "offline", "results", "models")
ALLOWED = {"models": BELOW, "texts": (*BELOW, "texts")}


def imported(file: Path) -> set[str]:
    """The rooms of kvbench that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("kvbench.")}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    for file in sorted((PACKAGE / room).rglob("*.py")):
        assert imported(file) <= set(ALLOWED[room]), file
