"""Damaged files in a results folder are skipped with a warning that names them; what the others hold is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.cli import status
from kvbench.errors import SkippedFile, UserError
from kvbench.report.__main__ import main as report
from kvbench.results.folder import RunFolder
from kvbench.results.kept_tokens import KEPT, Kept, read_kept
from kvbench.results.ledger import Ledger, latest_status, record_rows, reusable_record
from kvbench.results.loading import find_runs, load, load_what_is_there
from kvbench.results.row import Row
from kvbench.results.run_files import (
    CONFIG,
    METRICS,
    PROVENANCE,
    SAMPLES,
    STATUS,
    read_metrics,
    read_status,
    sample_records,
)
from kvbench.sweep.survey import survey
from tests.shared.paths import ROOT
from tests.shared.rows import BASE
from tests.shared.sweep_files import ok, plan, record

ROWS = 3
"""Rows of each cell."""


def made(where: Path, *names: str) -> Path:
    """A run folder in which each named cell is ok and has ROWS rows."""
    run = RunFolder.create(where, "x", {}, {}, cells=[record(name) for name in names])
    run.update_cells({name: (cell_rows(name), ok()) for name in names})
    run.finish("ok")
    return run.path


def cell_rows(name: str) -> list[Row]:
    return [replace(BASE, method=name, metric=f"m{number}", value=1.0) for number in range(ROWS)]


def cuts(file: Path) -> list[int]:
    """Sizes to cut a file to: none of it, each of its first bytes, its middle, and all but its last bytes."""
    size = file.stat().st_size
    return sorted(
        {0, 1, 2, 3, 4, 5, 8, size // 4, size // 2, size - 9, size - 8, size - 5, size - 4, size - 2, size - 1}
    )


def counts(results: Path) -> dict[str, int]:
    """Rows that a report, the status and a resumed run see."""
    records = Ledger(results).by("key")
    resumed = [reusable_record(of_cell) for of_cell in records.values()]
    found = survey(results)
    return {
        "load": load_what_is_there(results).found,
        "found": found.rows_found,
        "survey": len(found.rows()),
        "resume": sum(len(record_rows(record)) for record in resumed if record is not None),
    }


def agreed(results: Path) -> int:
    """The number of rows that all of them see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedFile)
        (number,) = set(counts(results).values())
    return number


# lost and truncated files


def test_a_truncated_metrics_file_makes_its_cells_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, _ = made(tmp_path, "a", "b"), made(tmp_path, "c")
    assert agreed(tmp_path) == 3 * ROWS and status.main([str(tmp_path)]) == 0
    whole = (broken / METRICS).read_bytes()
    for size in cuts(broken / METRICS):
        (broken / METRICS).write_bytes(whole[:size])
        with pytest.warns(SkippedFile, match=METRICS):
            assert load(tmp_path)["method"].unique().tolist() == ["c"]
        assert agreed(tmp_path) == ROWS
        loaded = load_what_is_there(tmp_path)
        assert (loaded.promised, loaded.found) == (3 * ROWS, ROWS)
        assert {cell.status for cell in survey(tmp_path).cells} == {"ok", "unreadable"}
    (broken / METRICS).unlink()
    assert agreed(tmp_path) == ROWS
    capsys.readouterr()
    assert status.main([str(tmp_path)]) == 3
    output = capsys.readouterr().out
    assert "1 done, 2 unreadable" in output and f"rows: {ROWS} found of {3 * ROWS}" in output


def test_what_is_measured_again_is_counted_once(tmp_path: Path) -> None:
    broken = made(tmp_path, "a", "b")
    (broken / METRICS).unlink()
    made(tmp_path, "a")
    loaded = load_what_is_there(tmp_path)
    assert (loaded.promised, loaded.found) == (2 * ROWS, ROWS)
    made(tmp_path, "b")
    loaded = load_what_is_there(tmp_path)
    assert (loaded.promised, loaded.found) == (2 * ROWS, 2 * ROWS) and agreed(tmp_path) == 2 * ROWS
    assert status.main([str(tmp_path)]) == 0


def test_a_metrics_file_with_fewer_rows_than_promised_loses_the_cells_that_it_lacks(tmp_path: Path) -> None:
    run = made(tmp_path, "a", "b")
    pq.write_table(pq.read_table(run / METRICS).slice(0, ROWS + 1), run / METRICS)
    statuses = {name: latest_status(records) for name, records in Ledger(tmp_path).by("id").items()}
    assert {name: found.status for name, found in statuses.items() if found} == {"a": "ok", "b": "unreadable"}
    assert status.main([str(tmp_path)]) == 3


def test_a_truncated_status_file_makes_no_rows_stand_twice(tmp_path: Path) -> None:
    broken = made(tmp_path, "a", "b")
    made(tmp_path, "a", "b")  # as the same command does once the status cannot be read
    whole = (broken / STATUS).read_bytes()
    for size in cuts(broken / STATUS)[:-1]:  # without its last byte, a line's end, it is still whole
        (broken / STATUS).write_bytes(whole[:size])
        with pytest.warns(SkippedFile, match=STATUS):
            assert len(load(tmp_path)) == 2 * ROWS
        assert agreed(tmp_path) == 2 * ROWS
    (broken / STATUS).unlink()
    assert agreed(tmp_path) == 2 * ROWS


def test_a_metrics_file_by_itself_is_loaded_whole(tmp_path: Path) -> None:
    run = made(tmp_path / "results", "a")
    (tmp_path / "copy").mkdir()
    shutil.copy(run / METRICS, tmp_path / "copy" / METRICS)
    assert len(load(tmp_path / "copy")) == ROWS


# files of other kinds

DEEP = "[" * 100_000
STATUSES = [
    '{"status": "ok", "cells": 3}',
    '{"status": "ok", "cells": [3]}',
    '{"status": "fine"}',
    '{"status": ["ok"]}',
    '{"status": "ok", "rows": "three"}',
    '{"status": "ok", "rows": -1}',
    '{"status": "ok", "rows": 1e300}',
    '{"status": "ok", "rows": 123456789012345678901234567890}',
    '{"status": "ok", "cells": [{"status": "done"}]}',
    '{"status": "ok", "cells": [{"status": "ok", "rows": [0]}]}',
    '{"status": "ok", "cells": [{"status": "ok", "rows": [5, 2]}]}',
    '{"status": "ok", "cells": [{"status": "ok", "rows": [0, 4611686018427387904]}]}',
    '{"status": "ok", "cells": [{"status": "ok", "finished": "yesterday"}]}',
    '{"status": "ok", "cells": [{"status": "ok", "seconds": NaN}]}',
    '{"status": "ok", "cells": [{"status": "ok", "knobs": [1]}]}',
    '{"status": "ok", "cells": [{"status": "ok", "method": "' + "x" * 2000 + '"}]}',
    '{"status": "running", "owner": 3}',
    '{"status": "running", "error": {"a": 1}}',
    '{"status": "ok", "cells": ' + DEEP,
    DEEP,
    "[]",
    "3",
    "null",
    "\ufeff{}",
    "\x00\x01\x02",
    "",
]


@pytest.mark.parametrize("content", STATUSES, ids=range(len(STATUSES)))
def test_a_status_file_of_another_kind_is_skipped(tmp_path: Path, content: str) -> None:
    made(tmp_path, "a")
    (made(tmp_path, "b") / STATUS).write_text(content, encoding="utf-8")
    with pytest.warns(SkippedFile, match=STATUS):
        assert status.main([str(tmp_path)]) in (0, 3)
    assert agreed(tmp_path) == ROWS


def test_a_status_file_that_is_no_text_is_skipped(tmp_path: Path) -> None:
    made(tmp_path, "a")
    (made(tmp_path, "b") / STATUS).write_bytes(b"\xff\xfe{\x00")
    with pytest.warns(SkippedFile, match=STATUS):
        assert status.main([str(tmp_path)]) == 0
    assert agreed(tmp_path) == ROWS


TABLES: dict[str, dict[str, Any]] = {
    "text in value": {"value": ["high"], "method": ["b"]},
    "a list in method": {"method": [["b"]]},
    "a fraction in context": {"context": [1.5]},
    "an object in budget": {"budget": [{"a": 1}]},
    "a long method": {"method": ["x" * 2000]},
    "an unknown status": {"status": ["fine"]},
    "unknown weights": {"weights": ["heavy"]},
    "an unknown flag": {"flags": ["odd"]},
    "knobs that are no object": {"knobs": ["[1]"]},
    "knobs that are no JSON": {"knobs": ["{"]},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_metrics_file_of_another_kind_is_skipped(tmp_path: Path, name: str) -> None:
    made(tmp_path, "a")
    run = made(tmp_path, "b")
    pq.write_table(pa.table({column: values * ROWS for column, values in TABLES[name].items()}), run / METRICS)
    with pytest.warns(SkippedFile, match=METRICS):
        assert status.main([str(tmp_path)]) == 3
    assert agreed(tmp_path) == ROWS


def test_a_table_that_names_a_column_twice_is_skipped(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    column = pa.array([1.0])
    pq.write_table(pa.Table.from_arrays([column, column], names=["value", "value"]), run / METRICS)
    with pytest.warns(SkippedFile, match=METRICS):
        assert read_metrics(run) is None


@pytest.mark.parametrize(
    "content", ['{"cells": 3}', '{"jobs": [3]}', '{"cells": [{"id": 3}]}', '{"started": "x"}', DEEP, "", "[]"]
)
def test_a_plan_of_another_kind_is_skipped(tmp_path: Path, content: str) -> None:
    plan(tmp_path / "sweep_x", [record("a")])
    made(tmp_path / "sweep_x", "a")
    (tmp_path / "sweep_x" / "plan.json").write_text(content)
    with pytest.warns(SkippedFile, match="plan.json"):
        assert status.main([str(tmp_path)]) == 0


@pytest.mark.parametrize("content", ['{"overrides": 3}', '{"code": "x"}', '{"started": []}', DEEP, "[]", "{"])
def test_a_jobs_record_of_another_kind_is_skipped(tmp_path: Path, content: str) -> None:
    plan(tmp_path / "sweep_x", [record("a")])
    made(tmp_path / "sweep_x", "a")
    (tmp_path / "sweep_x" / "job_1.json").write_text(content)
    with pytest.warns(SkippedFile, match="job_1.json"):
        assert [cell.status for cell in survey(tmp_path).cells] == ["ok"]


def test_kept_tokens_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    good, bad = made(tmp_path, "a"), RunFolder.create(tmp_path, "y", {}, {})
    bad.add_kept([Kept(BASE, 0, {0: [[0, 1]]})])
    shutil.copy(bad.path / KEPT, good / KEPT)
    whole = (bad.path / KEPT).read_bytes()
    for size in cuts(bad.path / KEPT):
        (bad.path / KEPT).write_bytes(whole[:size])
        with pytest.warns(SkippedFile, match=KEPT):
            assert len(read_kept([good, bad.path])) == 2
    for column, value in (("head", 10**9), ("position", -1), ("layer", None)):
        table = pd.read_parquet(good / KEPT).assign(**{column: value})
        table.to_parquet(bad.path / KEPT)
        with pytest.warns(SkippedFile, match=column):
            assert len(read_kept([good, bad.path])) == 2


def test_lines_that_are_no_samples_are_skipped(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    (run / SAMPLES).write_text('{"a": "\u2028"}\n3\n' + DEEP + '\n{"b"\n\n{"c": 1}\n', encoding="utf-8")
    with pytest.warns(SkippedFile, match="3 of its lines"):
        assert sample_records(run) == [{"a": "\u2028"}, {"c": 1}]


def test_folders_in_the_place_of_files_are_skipped(tmp_path: Path) -> None:
    made(tmp_path, "a")
    run = made(tmp_path, "b")
    (run / METRICS).unlink()
    (run / METRICS).mkdir()
    with pytest.warns(SkippedFile, match=METRICS):
        assert status.main([str(tmp_path)]) == 3


# folders that vanish


def test_folders_that_vanish_meanwhile_stop_nothing(tmp_path: Path) -> None:
    made(tmp_path, "a")
    done = threading.Event()

    def make_and_remove() -> None:
        number = 0
        while not done.is_set():
            for name in (f"run_{number}", f".new_{number:08x}", f".probe_{number:08d}"):
                inner = tmp_path / name / "deep" / "er"
                inner.mkdir(parents=True)
                (inner / STATUS).write_text("{")
                shutil.rmtree(tmp_path / name)
            number += 1

    threads = [threading.Thread(target=make_and_remove)]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedFile)
                assert len(load(tmp_path)) == ROWS
                assert [cell.status for cell in survey(tmp_path).cells] == ["ok"]
                assert len(Ledger(tmp_path).by("id")) == 1
                assert len(find_runs(tmp_path)) >= 1
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_folders_whose_name_begins_with_a_dot_are_not_entered(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    shutil.copytree(run, tmp_path / ".new_12345678")
    shutil.copytree(run, tmp_path / "deep" / ".hidden" / "run")
    assert find_runs(tmp_path) == [run] and agreed(tmp_path) == ROWS


# processes that are killed


@pytest.mark.parametrize("point", range(6))
def test_a_process_killed_at_any_write_leaves_what_was_recorded(tmp_path: Path, point: int) -> None:
    """os._exit before the N-th rename: neither handlers nor buffers run, as after SIGKILL."""
    code = (
        "import os, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.results.test_damage import cell_rows\n"
        "from tests.shared.sweep_files import ok, record\n"
        "from kvbench.results.folder import RunFolder\n"
        "replace, left = os.replace, [int(sys.argv[2])]\n"
        "def crash(*paths):\n"
        "    os._exit(9) if left[0] == 0 else left.__setitem__(0, left[0] - 1)\n"
        "    replace(*paths)\n"
        "run = RunFolder.create(Path(sys.argv[1]), 'x', {}, {}, cells=[record('a'), record('b')])\n"
        "os.replace = crash\n"
        "for name in 'ab':\n"
        "    run.update_cells({name: (cell_rows(name), ok())})\n"
        "run.add_samples([{'a': 1}])\n"
        "run.finish('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(point)], cwd=ROOT, check=False)
    assert done.returncode == 9
    finished = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}[point]
    assert agreed(tmp_path) == finished * ROWS
    (run,) = find_runs(tmp_path)
    assert read_status(run)["status"] == "interrupted"
    made(tmp_path, *"ab"[finished:])
    assert agreed(tmp_path) == 2 * ROWS


def test_leftovers_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    claims = tmp_path / ".claims"
    claims.mkdir()
    old = [run / ".metrics.parquet.1a2b3c4d.tmp", claims / ".x.json.1a2b3c4d.tmp", tmp_path / ".new_1a2b3c4d" / STATUS]
    mine = [run / ".note.tmp", tmp_path / ".new_mine" / "x", tmp_path / ".git" / ".x.1a2b3c4d.tmp"]
    for file in [*old, *mine]:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    (tmp_path / ".probe_a1b2c3d4").mkdir()
    RunFolder.create(tmp_path, "y", {}, {})
    assert all(file.exists() for file in [*old, *mine])  # younger than a day
    day_ago = time.time() - 25 * 3600
    for path in [*old, *mine, tmp_path / ".new_1a2b3c4d", tmp_path / ".new_mine", tmp_path / ".probe_a1b2c3d4"]:
        os.utime(path, (day_ago, day_ago))
    RunFolder.create(tmp_path, "z", {}, {})
    assert not any(file.exists() for file in old) and not (tmp_path / ".new_1a2b3c4d").exists()
    assert not (tmp_path / ".probe_a1b2c3d4").exists()
    assert all(file.exists() for file in mine) and agreed(tmp_path) == ROWS


def test_nothing_readable_is_one_line(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    (run / METRICS).write_bytes(b"PAR1")
    with pytest.warns(SkippedFile), pytest.raises(UserError, match="not a readable parquet file") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
    with pytest.warns(SkippedFile):
        assert load_what_is_there(tmp_path).frame.empty


# the report


SAMPLES_OF_OTHER_KINDS = [
    {"measure": "perplexity", "methods": 3},
    {"measure": "perplexity", "context": [1], "methods": []},
    {"measure": "perplexity", "methods": [{"method": ["h2o"], "nll": 1}, {"method": "full", "nll": 1}]},
    {"measure": "perplexity", "methods": [{"method": "h2o", "knobs": {"bits": [1]}, "nll": 1}]},
    {"measure": "perplexity", "methods": [{"method": "h2o", "store": {}, "knobs": 3, "nll": "low"}]},
]


def test_a_report_of_damaged_folders_shows_the_good_rows_and_counts_the_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, "a")
    for content in STATUSES:
        (made(tmp_path, "b") / STATUS).write_text(content, encoding="utf-8")
    for number, table in enumerate(TABLES.values()):
        run = made(tmp_path, f"c{number}")
        pq.write_table(pa.table({column: values * ROWS for column, values in table.items()}), run / METRICS)
    for content in ("", "[", DEEP, "[]", "3", '{"packages": 3}', '{"gpus": [3]}', '{"git": "x", "cpu": []}', "\udcff"):
        run = made(tmp_path, "a")
        for name in (CONFIG, PROVENANCE, SAMPLES, KEPT):
            (run / name).write_bytes(content.encode(errors="surrogateescape"))
    lines = "".join(json.dumps(sample) + "\n" for sample in SAMPLES_OF_OTHER_KINDS)
    (made(tmp_path, "a") / SAMPLES).write_text(lines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedFile)
        rows = agreed_in_report(tmp_path, capsys)
        assert rows == load_what_is_there(tmp_path).found == 11 * ROWS


def agreed_in_report(results: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The number of rows that the report says it found; it must be what loading finds."""
    assert report([str(results)]) == 0, capsys.readouterr().err
    page = (results / "report" / "report.md").read_text()
    loaded = load_what_is_there(results)
    assert f"{loaded.found} rows" in page
    lost = f"{loaded.found} rows found of {loaded.promised} that the status.json files count"
    assert (lost in page) == (loaded.found < loaded.promised)
    return loaded.found


def test_report_status_and_resume_agree_on_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all is well, after a loss, and after what was lost is measured again."""
    first, second = made(tmp_path, "a", "b"), made(tmp_path, "c")
    failed = RunFolder.create(tmp_path, "x", {}, {}, cells=[record("d"), record("e")])
    row = replace(BASE, method="d", status="failed", note="ValueError: no")
    failed.update_cells({"d": ([row], {"status": "failed", "finished": 1.0})})
    assert counts(tmp_path) == {"load": 3 * ROWS + 1, "found": 3 * ROWS + 1, "survey": 3 * ROWS + 1, "resume": 3 * ROWS}
    assert agreed_in_report(tmp_path, capsys) == 3 * ROWS + 1
    made(tmp_path, "d", "e")
    assert agreed(tmp_path) == agreed_in_report(tmp_path, capsys) == 5 * ROWS
    (first / METRICS).write_bytes((first / METRICS).read_bytes()[:-1])
    (second / METRICS).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedFile)
        assert agreed(tmp_path) == agreed_in_report(tmp_path, capsys) == 2 * ROWS
        made(tmp_path, "a", "b", "c")
        assert agreed(tmp_path) == agreed_in_report(tmp_path, capsys) == 5 * ROWS


def test_a_report_without_any_readable_row_says_how_many_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made(tmp_path, "a") / METRICS).unlink()
    assert agreed_in_report(tmp_path, capsys) == 0


@pytest.mark.parametrize("command", ["kvbench.report", "kvbench.status"])
def test_a_limit_on_the_size_of_files_and_a_closed_output_are_no_traceback(tmp_path: Path, command: str) -> None:
    made(tmp_path, "a")
    line = f"ulimit -f 1; {sys.executable} -m {command} {tmp_path} >&-"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if command == "kvbench.report":
        assert done.returncode == 2 and "report folder" in done.stderr and "File too large" in done.stderr
    else:
        assert done.returncode == 0 and done.stderr == ""
