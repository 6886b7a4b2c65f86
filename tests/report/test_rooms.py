"""Imports between the rooms of the report point one way, and none of its modules imports another in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.shared.paths import ROOT

REPORT = ROOT / "kvbench" / "report"
ALLOWED = {
    "compare": set[str](),
    "tables": {"compare"},
    "figures": {"compare"},
    "advice": {"compare"},
    "page": {"compare", "tables", "figures", "advice"},
}
BELOW = ("kvbench.errors", "kvbench.files", "kvbench.results", "kvbench.measures", "kvbench.conf", "kvbench.report")


def imports_of(file: Path) -> set[str]:
    """Modules of kvbench that a file imports, those under TYPE_CHECKING and inside functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvbench"):
            module = str(node.module)
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name for name in inner if (ROOT / f"{name.replace('.', '/')}.py").is_file()} or {module}
    return found


def modules() -> dict[str, set[str]]:
    files = [file for file in REPORT.rglob("*.py") if file.name != "__init__.py"]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): imports_of(file) for file in files}


def test_rooms_import_only_the_rooms_below_them() -> None:
    for module, imported in modules().items():
        room = module.split(".")[2]
        for name in imported:
            assert name.startswith(BELOW), f"{module} imports {name}"
            other = name.removeprefix("kvbench.report.").split(".")[0]
            if name.startswith("kvbench.report.") and other != room and room in ALLOWED:
                assert other in ALLOWED[room], f"{module} imports {name}"


def test_no_import_circle() -> None:
    known = modules()
    graph = {module: {name for name in imported if name in known} for module, imported in known.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


def test_notes_are_read_only_where_they_are_printed() -> None:
    readers = {file.name for file in REPORT.rglob("*.py") if ".note" in file.read_text(encoding="utf-8")}
    assert readers == {"warnings.py"}  # lists each note as it is, and the reason of a failed cell
