"""Imports inside the cache room and out of it: no circle, and arrows that point down."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvbench.cache

ROOM = Path(kvbench.cache.__path__[0])
FACTS = {f"kvbench.models.{name}" for name in ("shape", "reach", "frequencies", "probe")}
"""What decides the shape of a cache, what a layer sees, and how its keys are rotated."""
BELOW = {"errors", "files", "heap", "offline", "kernels", "models", "results", "texts"}


def imported(path: Path) -> set[str]:
    """Modules of kvbench that a file imports, at any depth: in functions and for annotations alone as well."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    froms = {f"{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in froms | names if name.split(".")[0] == "kvbench"}


FILES = {f"kvbench.cache.{path.stem}": imported(path) for path in sorted(ROOM.glob("*.py"))}


def test_no_circle() -> None:
    assert len(FILES) > 30
    graph = {name: {other for other in others if other in FILES} for name, others in FILES.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_the_room_imports_only_rooms_below_it() -> None:
    found = {
        other.split(".")[1] for others in FILES.values() for other in others if not other.startswith("kvbench.cache")
    }
    assert found <= BELOW


def test_models_are_imported_for_facts_about_layers_and_texts_for_calibration() -> None:
    for name, others in FILES.items():
        if name != "kvbench.cache.calibrate":
            assert {other for other in others if other.startswith("kvbench.models")} <= FACTS, name
            assert not any(other.startswith("kvbench.texts") for other in others), name
