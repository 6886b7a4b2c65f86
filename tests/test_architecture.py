"""Imports point one way: from a room to the rooms below it, never in a circle. docs/architecture.md draws the rooms.

Every import statement counts: those inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.shared.paths import ROOT

FLOORS = (
    ("errors", "files", "progress", "background", "heap", "hub", "offline"),
    ("results",),
    ("models",),
    ("texts", "kernels"),
    ("cache",),
    ("measures",),
    ("config",),
    ("sweep",),
    ("report",),
    ("checks", "gate", "method_runs"),
    ("run",),
    ("api",),
    ("cli", "check", "harness", "verify"),
)
"""Rooms of kvbench from the lowest to the highest. A room imports from lower floors only; the first floor's modules
also import each other."""

ENTRY_POINTS = ("__init__", "__main__", "board", "fetch", "plan", "status")
"""Files at the top of kvbench/ that hand over to a room: they import from everywhere, and no room imports them."""

ONLY = {"methods": ("cache", "kernels", "errors"), "report": (*FLOORS[0], "results", "measures")}
"""Rooms that may import less than their floor allows. Of `measures` the report reads what each measure declares."""

DECLARATIONS = ("kvbench.measures", "kvbench.measures.measure")
"""What the report may import of `measures`, beside the package of each measure."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("check", "cli"): "words of the command line are read and error lines written by cli",
    ("harness", "cli"): "words of the command line are read and error lines written by cli",
}
"""Arrows that point the wrong way today, each with what it is for. The list may only shrink."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its dotted name."""
    found = {}
    for folder, prefix in (("kvbench", ""), ("methods", "kvbench.")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imported(name: str, skipped: frozenset[ast.AST] = frozenset()) -> Iterator[str]:
    """Dotted names that a module imports: modules of the package as far as they are known, others as written."""
    for node in ast.walk(modules()[name]):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module


def room_of(name: str) -> str:
    """`cache` of `kvbench.cache.rule`; `__init__` of `kvbench` itself."""
    return (name.split(".") + ["__init__"])[1]


@cache
def arrows() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Pairs of rooms, and the imports between their modules."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for name in modules():
        for target in imported(name):
            if target in modules() and room_of(target) != room_of(name):
                found.setdefault((room_of(name), room_of(target)), set()).add((name, target))
    return found


def floor_of(room: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


def allowed(room: str, target: str) -> bool:
    """Whether `room` may import from `target`."""
    if room in ENTRY_POINTS:
        return target != "methods"
    if target in ENTRY_POINTS or target == "methods":
        return False
    if room in ONLY:
        return target in ONLY[room]
    return floor_of(target) < floor_of(room) or floor_of(target) == floor_of(room) == 0


def test_every_file_stands_in_a_room() -> None:
    known = {room for rooms in FLOORS for room in rooms} | {*ENTRY_POINTS, "methods"}
    assert {room_of(name) for name in modules()} <= known


def test_arrows_between_rooms_point_down() -> None:
    wrong = {pair: imports for pair, imports in arrows().items() if not allowed(*pair)}
    unknown = {pair: sorted(imports) for pair, imports in wrong.items() if pair not in EXCEPTIONS}
    assert not unknown, "\n".join(f"{a} must not import {b}: {imports}" for (a, b), imports in unknown.items())
    assert set(EXCEPTIONS) <= set(wrong), "no longer needed: take it out of EXCEPTIONS"


def test_nothing_in_kvbench_imports_methods() -> None:
    """Hydra's `_target_` brings them in by name."""
    assert [pair for pair in arrows() if pair[1] == "methods"] == []
    assert {target for room, target in arrows() if room == "methods"} <= {*ONLY["methods"]}


def test_report_reads_declarations_of_measures_alone() -> None:
    for name, target in arrows().get(("report", "measures"), set()):
        is_package = (ROOT / target.replace(".", "/") / "__init__.py").is_file()
        assert target in DECLARATIONS or is_package, f"{name} imports {target}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """`kvbench/__init__.py` names public classes for type checkers and imports them when asked; it is left out."""
    edges = {name: set(dependencies(name)) for name in modules() if name != "kvbench"}
    assert not [" <-> ".join(sorted(circle)) for circle in circles(edges)]


def test_no_module_imports_the_top_of_the_package() -> None:
    """`from kvbench import generate` inside the package is a circle that the public names would hide."""
    for name in modules():
        for node in ast.walk(modules()[name]):
            if isinstance(node, ast.ImportFrom) and node.module == "kvbench" and room_of(name) not in ENTRY_POINTS:
                names = {alias.name for alias in node.names}
                assert all(f"kvbench.{one}" in modules() or one == "__version__" for one in names), f"{name}: {names}"


def dependencies(name: str) -> Iterator[str]:
    """Modules of the package that a module needs.

    A measure's package declares it without torch, and inside its methods hands the work to a module of its own, which
    reads the settings from the package. That hand-over is not counted.
    """
    functions = [node for node in ast.walk(modules()[name]) if isinstance(node, ast.FunctionDef)]
    deferred = frozenset(node for function in functions for node in ast.walk(function))
    for target in imported(name):
        if target in modules() and target not in (name, "kvbench"):
            is_own_work = re.fullmatch(r"kvbench\.measures\.\w+", name) and target.startswith(name + ".")
            if not is_own_work or target in imported(name, deferred):
                yield target


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of nodes each of which reaches all others (Tarjan's algorithm, groups of two and more)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            group = frozenset(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.add(group)

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset("bc")}
    assert circles({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == set()


@pytest.mark.parametrize("room", ["report"])
def test_a_room_imports_no_torch(room: str) -> None:
    """All of its modules in a fresh interpreter: what they import in turn counts too."""
    names = [name for name in modules() if room_of(name) == room and not name.endswith("__main__")]
    code = f"import sys, {', '.join(names)}\nprint(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    assert not {target.split(".")[0] for name in names for target in imported(name)} & {"torch", "transformers"}
