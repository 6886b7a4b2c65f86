"""Finding run folders and loading their rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvbench.errors import UserError
from kvbench.results.folder import RunFolder
from kvbench.results.loading import find_runs, load
from kvbench.results.row import COLUMNS, Row, frame_of
from tests.shared.rows import BASE


def folder(where: Path, label: str = "full,H2O=1") -> RunFolder:
    return RunFolder.create(where, label, {"seed": 0}, {"command": "python -m kvbench"})


def test_load_takes_one_run_a_folder_of_runs_or_many(tmp_path: Path) -> None:
    one, two, three = folder(tmp_path / "a"), folder(tmp_path / "a" / "sweep"), folder(tmp_path / "b")
    for number, run in enumerate((one, two, three)):
        run.add([Row(value=float(number))])
    assert load(one.path)["value"].tolist() == [0.0]
    assert load(one.path / "metrics.parquet")["value"].tolist() == [0.0]
    assert set(load(tmp_path)["value"]) == {0.0, 1.0, 2.0}
    assert set(load([tmp_path / "a", three.path])["value"]) == {0.0, 1.0, 2.0}
    assert load([one.path, one.path])["value"].tolist() == [0.0]


def test_load_skips_runs_that_have_nothing_yet(tmp_path: Path) -> None:
    folder(tmp_path)
    run = folder(tmp_path)
    run.add([BASE])
    assert len(load(tmp_path)) == 1
    assert len(find_runs(tmp_path)) == 2


def test_load_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for path, message in (
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path, "no run folder in"),
        (tmp_path / "notes.txt", "neither a run folder nor"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            load(path)
        assert "\n" not in str(refused.value)
    run = folder(tmp_path)
    with pytest.raises(UserError, match=r"none has a metrics.parquet yet \(status: running\)"):
        load(tmp_path)
    (run.path / "metrics.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(UserError, match="not a readable parquet file"):
        load(tmp_path)


def test_load_reads_folders_of_other_versions(tmp_path: Path) -> None:
    run = folder(tmp_path)
    old = pd.DataFrame({"method": ["h2o"], "value": [1.5], "context": [1024], "forgotten": ["x"]})
    old.to_parquet(run.path / "metrics.parquet")
    frame = load(run.path)
    assert list(frame.columns) == list(COLUMNS)
    assert frame.dtypes.equals(frame_of([]).dtypes)
    assert (frame["method"][0], frame["value"][0], frame["context"][0]) == ("h2o", 1.5, 1024)
