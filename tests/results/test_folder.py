"""The row's schema, run folders that are whole at any moment, and loading many of them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml  # type: ignore[import-untyped]

from kvbench.errors import UserError
from kvbench.files import write_atomic
from kvbench.results import provenance
from kvbench.results.folder import RunFolder, check_writable, find_runs, load, read_status, resume_key
from kvbench.results.row import COLUMNS, Row, frame_of
from tests.shared.paths import ROOT
from tests.shared.rows import BASE, rows

DESIGNED = """
run, model, revision, arch, kv_heads, converted, method, store, bits, k_bits, v_bits, group, residual,
budget, sinks, window, variant, knobs, measure, metric, value, unit, low, high, n, protocol, question,
dataset, context, depth, batch, dtype, device, kernel, threads, seed, status, note,
position, stride, bos, tokenizer, weights, flags
"""


def folder(where: Path, label: str = "full,H2O=1") -> RunFolder:
    return RunFolder.create(where, label, {"seed": 0}, {"command": "python -m kvbench"})


def key(**changes: object) -> str:
    parts: dict[str, object] = {
        "model_revision": "abc",
        "config": {"method": "h2o", "budget": 256},
        "data_fingerprint": "f",
        "protocol": "prefill_decode",
        "dtype": "float32",
    }
    return resume_key(**(parts | changes))  # type: ignore[arg-type]


# the row


def test_columns_are_those_of_the_design_in_order() -> None:
    assert list(COLUMNS) == [name.strip() for name in DESIGNED.replace("\n", " ").split(",")]
    assert tuple(field.name for field in fields(Row)) == COLUMNS


def test_every_knob_may_be_absent() -> None:
    empty = Row()
    assert {name for name in COLUMNS if getattr(empty, name) is not None} == {"status"}


def test_schema_does_not_depend_on_content() -> None:
    frames = [frame_of([]), frame_of([Row()]), frame_of(rows()), frame_of([Row(budget=0.25, depth=1, bits=3)])]
    assert all(list(frame.columns) == list(COLUMNS) for frame in frames)
    assert all(frame.dtypes.equals(frames[0].dtypes) for frame in frames)
    assert frames[0].dtypes["budget"] == pd.Float64Dtype()
    assert frames[0].dtypes["kv_heads"] == pd.Int64Dtype()
    assert frames[0].dtypes["converted"] == pd.BooleanDtype()
    assert frames[0].dtypes["method"] == pd.StringDtype()


def test_a_value_of_the_wrong_kind_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add([BASE])
    with pytest.raises(TypeError, match="'context' holds int"):
        run.add([Row(context="long")])  # type: ignore[arg-type]
    run.add([BASE])
    assert len(load(run.path)) == 2


def test_unknown_row_status_is_refused() -> None:
    with pytest.raises(ValueError, match="skipped"):
        Row(status="fine")


def test_numbers_of_numpy_and_budgets_of_both_kinds_survive(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add([Row(value=np.float32(0.5), n=np.int64(3), budget=256), Row(value=math.inf, budget=0.25)])  # type: ignore[arg-type]
    frame = load(run.path)
    assert frame["value"].tolist() == [0.5, math.inf]
    assert frame["budget"].tolist() == [256.0, 0.25]
    assert frame["n"][0] == 3 and frame["n"][1] is pd.NA


# the folder


def test_name_needs_no_quoting(tmp_path: Path) -> None:
    run = folder(tmp_path, "compare=[full,H2O+int4], budget=0.5/x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}_compare-full-h2o-int4-budget-0-5-x_[0-9a-f]{8}", run.path.name)
    assert re.fullmatch(r"[0-9_-]+_run_[0-9a-f]{8}", folder(tmp_path, "=,/").path.name)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({folder(tmp_path).path for _ in range(20)}) == 20
    assert len(list(tmp_path.iterdir())) == 20


def test_a_new_folder_is_complete_and_says_running(tmp_path: Path) -> None:
    config = {"method": ("full", "h2o"), "path": Path("a/b"), "nested": {"none": None}}
    run = RunFolder.create(tmp_path / "deep" / "er", "x", config, {"git": None}, key="k" * 64)
    assert sorted(file.name for file in run.path.iterdir()) == ["config.yaml", "provenance.json", "status.json"]
    text = (run.path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {"method": ["full", "h2o"], "path": "a/b", "nested": {"none": None}}
    assert "k" * 64 in text
    status = read_status(run.path)
    assert (status["status"], status["pid"], status["cells_done"]) == ("running", os.getpid(), 0)
    assert status["key"] == "k" * 64 and status["started"] and status["finished"] is None


def test_each_add_leaves_a_complete_table(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for count, measure in enumerate(("perplexity", "needle", "memory"), start=1):
        run.add(rows(measures=[measure]))
        frame = load(run.path)
        assert len(frame) == len(run.rows)
        assert set(frame["run"]) == {run.path.name}
        assert read_status(run.path)["cells_done"] == count * 8


def test_finish_records_the_error_and_keeps_the_rows(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add(rows(measures=["memory"]))
    run.finish("failed", note="h2o", error="Traceback\nboom")
    status = read_status(run.path)
    assert (status["status"], status["note"], status["error"]) == ("failed", "h2o", "Traceback\nboom")
    assert status["finished"] >= status["started"]
    assert len(load(run.path)) == len(run.rows)
    with pytest.raises(ValueError, match="interrupted"):
        run.finish("done")


def test_samples_are_appended_line_by_line(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.add_samples([{"offset": 0, "nll": np.array([1.0, math.nan]), "hit": True}])
    run.add_samples([{"answer": "ünï\ncode"}])
    lines = (run.path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"offset": 0, "nll": [1.0, None], "hit": True},
        {"answer": "ünï\ncode"},
    ]


def test_a_crash_between_writing_and_renaming_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path)
    run.add([BASE])
    before = (run.path / "metrics.parquet").read_bytes()

    def crash(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(KeyboardInterrupt):
            run.add([BASE, BASE])
    assert (run.path / "metrics.parquet").read_bytes() == before
    assert not list(run.path.glob(".*"))
    run.add([BASE])
    assert len(load(run.path)) == 2


def test_a_kill_between_writing_and_renaming_leaves_the_old_table(tmp_path: Path) -> None:
    """SIGKILL runs no handler: what stays is the old table and a hidden leftover, which nothing reads."""
    code = (
        "import os, signal, sys; from kvbench.results.folder import Row, RunFolder\n"
        f"run = RunFolder.create({str(tmp_path)!r}, 'x', {{}}, {{}}); run.add([Row(value=1.0)])\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.add([Row(value=2.0)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    (run,) = tmp_path.iterdir()
    assert load(tmp_path)["value"].tolist() == [1.0]
    assert [file.suffix for file in run.glob(".*")] == [".tmp"]
    assert find_runs(tmp_path) == [run]


def test_write_atomic_honours_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# places that cannot be used


def test_check_writable_makes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "there" / "yet")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/results", "x" * 300, "nul\0name"])
def test_unusable_results_folder_is_one_line(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError) as refused:
        RunFolder.create(tmp_path / where, "x", {}, {})
    assert "\n" not in str(refused.value) and "choose a folder that can be written" in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_results_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="Permission denied"):
        check_writable(tmp_path / "results")


# loading


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


# the resume key and provenance


def test_resume_key_knows_what_can_change_the_number() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"model_revision": "abd"},
        {"config": {"method": "h2o", "budget": 257}},
        {"data_fingerprint": "g"},
        {"protocol": "stream"},
        {"dtype": "bfloat16"},
        {"device_name": "H200"},
        {"kernel": "triton"},
        {"threads": 4},
    ]
    assert len({key(**change) for change in changes}) == len(changes)
    assert key(config={"budget": 256, "method": "h2o"}) == key()
    assert re.fullmatch(r"[0-9a-f]{64}", key())


def test_resume_key_follows_versions_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "package_version", lambda name: "9.9")
        assert key() != before
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "source_hash", lambda: "other")
        assert key() != before
    assert key() == before


def test_source_hash_sees_methods_and_not_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, methods = tmp_path / "kvbench", tmp_path / "methods"
    for path in (package / "run.py", package / "report" / "page.py", package / "cache" / "k.cpp", methods / "h2o.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setattr(provenance, "_methods_folder", lambda: methods)
    before = provenance.source_hash()

    def changed(path: Path, text: str) -> bool:
        old = path.read_text() if path.exists() else None
        path.write_text(text)
        after = provenance.source_hash()
        path.unlink() if old is None else path.write_text(old)
        return after != before

    assert not changed(package / "report" / "page.py", "2\n")
    assert not changed(tmp_path / "README.md", "2\n")
    assert not changed(package / "run.py", "1\r\n")  # line ends of another system
    assert changed(package / "run.py", "2\n")
    assert changed(package / "cache" / "k.cpp", "2\n")
    assert changed(methods / "h2o.py", "2\n")
    assert changed(methods / "new.py", "")


def test_source_hash_is_the_same_from_an_installed_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for package, methods in (("a/kvbench", "a/methods"), ("b/kvbench", "b/kvbench/methods")):
        for path in (tmp_path / package / "run.py", tmp_path / methods / "h2o.py"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1\n")
        monkeypatch.setattr(provenance, "PACKAGE", tmp_path / package)
        monkeypatch.setattr(provenance, "_methods_folder", lambda folder=tmp_path / methods: folder)
        hashes.append(provenance.source_hash())
    assert hashes[0] == hashes[1]


def test_git_state_follows_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    source = tmp_path / "kvbench" / "run.py"
    source.parent.mkdir()
    source.write_text("1\n")
    monkeypatch.setattr(provenance, "PACKAGE", source.parent)
    assert provenance.git_state() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = provenance.git_state()
    assert clean is not None and clean["commit"] and not clean["dirty"] and clean["diff_sha256"] is None
    source.write_text("2\n")
    edited = provenance.git_state()
    source.with_name("new.py").write_text("3\n")
    added = provenance.git_state()
    assert edited is not None and added is not None and edited["dirty"] and added["dirty"]
    assert edited["diff_sha256"] != added["diff_sha256"]
    # Installed into somebody else's repository: its commit says nothing about this code.
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "venv" / "site-packages" / "kvbench")
    assert provenance.git_state() is None


def test_provenance_is_json_and_names_what_matters() -> None:
    known = provenance.collect(["python", "-m", "kvbench", "compare=[full,h2o]"])
    assert json.loads(json.dumps(known)) == known
    assert known["command"] == "python -m kvbench 'compare=[full,h2o]'"
    assert known["packages"]["torch"] and known["packages"]["transformers"]
    assert known["cpu"]["name"] and known["memory_bytes"] > 0


def test_neither_results_nor_provenance_import_torch() -> None:
    code = (
        "import sys, kvbench.results.folder as r, kvbench.results.provenance as p\n"
        "p.collect(); r.resume_key(model_revision='', config={}, data_fingerprint='', protocol='', dtype='')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
