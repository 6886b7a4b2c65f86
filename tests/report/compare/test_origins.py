"""Where rows come from: a table that mixes versions of the code, machines or days says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.report.__main__ import main
from kvbench.report.compare.methods import groups_of
from kvbench.report.compare.origins import Origin, origin_of, origins_of
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview
from kvbench.results.row import Row
from tests.report.synthetic import run_of
from tests.shared.rows import METHODS, rows

SAME = Origin("aaaa", "AMD EPYC", "2026-11-30")


def of_two_runs() -> list[Row]:
    """full and kivi8 of one run, the others of a second one."""
    first = {method for method, *_ in METHODS[:2]}
    return [replace(row, run="one" if row.method in first else "two") for row in rows()]


def mixed(origins: dict[str, Origin]) -> dict[str, list[str]]:
    """For each table the caption parts about where its rows come from."""
    made = of_two_runs()
    tables = [*build_tables(made, origins=origins), overview(groups_of(made), origins=origins)]
    known = {one.name: one.caption for one in tables if one is not None}
    return {name: [part for part in caption if part.startswith("measured with")] for name, caption in known.items()}


def test_a_table_of_one_origin_says_nothing() -> None:
    assert set(map(tuple, mixed({"one": SAME, "two": SAME}).values())) == {()}
    assert set(map(tuple, mixed({}).values())) == {()}


def test_every_table_says_which_versions_machines_and_days_it_mixes() -> None:
    found = mixed({"one": SAME, "two": replace(SAME, source="bbbb")})
    text = "measured with 2 versions of the code (aaaa, bbbb): a difference between lines may come from these"
    assert found and all(parts == [text] for parts in found.values())
    found = mixed({"one": SAME, "two": Origin("bbbb", "another", "2026-12-01")})
    (text,) = found["overview"]
    assert "2 versions of the code (aaaa, bbbb), 2 machines (AMD EPYC, another) and 2 days (2026-11-30, 2026-" in text


def test_a_table_of_one_run_among_several_is_not_mixed() -> None:
    made = [replace(row, run="two" if row.measure == "memory" else "one") for row in rows()]
    origins = {"one": SAME, "two": replace(SAME, day="2026-12-01")}
    captions = {one.name: " ".join(one.caption) for one in build_tables(made, origins=origins)}
    assert all("measured with" not in caption for caption in captions.values())
    assert "2 days" in " ".join(overview(groups_of(made), origins=origins).caption)  # type: ignore[union-attr]


def test_origins_of_run_folders_and_of_damaged_ones(tmp_path: Path) -> None:
    halves = {"a": rows(METHODS[:4]), "b": rows(METHODS[4:])}
    runs = [run_of(tmp_path / name, made).path for name, made in halves.items()]
    for day, run in enumerate(runs):
        known = {"time_utc": f"2026-12-0{day + 1}T10:00:00+00:00", "source_hash": "0123456789", "cpu": {"name": "EPYC"}}
        known["gpus"] = [{"name": "H200"}]
        (run / "provenance.json").write_text(json.dumps(known))
    renamed = runs[0].rename(tmp_path / "a" / "renamed")
    found = origins_of([renamed, runs[1]])
    assert found[runs[0].name] == found["renamed"] == Origin("01234567", "EPYC + H200", "2026-12-01")
    odd: list[dict[str, Any]] = [{}, {"cpu": 3, "gpus": [1], "time_utc": None}]
    assert [origin_of(one) for one in odd] == [None, Origin("unknown", "unknown", "unknown")]
    assert main([str(tmp_path)]) == 0
    assert "2 days (2026-12-01, 2026-12-02)" in (tmp_path / "report" / "report.md").read_text()
