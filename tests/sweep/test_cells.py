"""Cells, their ids and their resume keys."""

from __future__ import annotations

from typing import Any

from kvbench.config import MethodConfig
from kvbench.measures.latency import Latency
from kvbench.measures.needle import Needle
from kvbench.measures.perplexity import Perplexity
from kvbench.sweep.cells import Facts, Part, cell_of, parts_of


def cell(part: Part, **changes: Any) -> Any:
    method = MethodConfig("h2o", "dense", {"_target_": "x", "budget": 16}, {"_target_": "y"}, {"budget": 16})
    common = {"model": {"id": "m"}, "data": {"id": "d"}, "seed": 0, "kernel": "auto", "threads": None}
    return cell_of(method, part, common | changes)


def test_a_key_knows_the_machine_only_where_time_or_memory_is_measured() -> None:
    quality, timed = parts_of([Perplexity(32, 4, 2, 2), Latency([32], 4, 1)])
    here, there = (Facts("r", "f", "float32", name, "auto", 1) for name in ("this", "that"))
    assert here.key(cell(quality)) == there.key(cell(quality))
    assert here.key(cell(timed)) != there.key(cell(timed))
    assert cell(quality, seed=1) == cell(quality) and cell(quality, threads=2).id == cell(quality).id
    assert cell(quality, model={"id": "n"}).id != cell(quality).id


def test_cells_of_different_contexts_are_of_one_kind() -> None:
    small, large, slope = parts_of([Latency([32, 48], 4, 1)])
    assert cell(small).kind == cell(large).kind
    assert len({cell(part).id for part in (small, large, slope)}) == 3
    (other,) = parts_of([Latency([32], 5, 1)])
    assert cell(other).kind != cell(small).kind


def test_each_task_of_a_needle_measure_is_resumed_by_itself_and_named_in_messages() -> None:
    parts = parts_of([Needle(lengths=[64, 96], tasks=["vt", "cwe"])])
    names = [cell(part).name for part in parts]
    assert names == [f"h2o budget=16 needle {task} {length}" for length in (64, 96) for task in ("vt", "cwe")]
    assert len({cell(part).id for part in parts}) == 4
    assert cell(parts[0]).kind == cell(parts[2]).kind != cell(parts[1]).kind
    (alone,) = parts_of([Needle(lengths=[64], tasks=["vt"])])
    assert cell(alone) == cell(parts[0])
    assert cell(parts_of([Perplexity(32, 4, 2, 2)])[0]).name == "h2o budget=16 perplexity 32"
