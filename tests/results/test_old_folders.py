"""Folders written before rows had `weights` and `flags`: both are filled in at load, from notes, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvbench.results.folder import RunFolder
from kvbench.results.loading import load
from kvbench.results.row import IDENTITY, MEMORY_PARTS, Row, rows_of
from kvbench.results.run_files import METRICS, read_run
from tests.shared.paths import ROOT
from tests.shared.rows import BASE

REFERENCE = ROOT / "results" / "reference"


def old_folder(where: Path, rows: list[Row], columns: tuple[str, ...] = ("weights", "flags")) -> Path:
    """A run folder whose metrics.parquet lacks these columns."""
    run = RunFolder.create(where, "test", {}, {})
    run.add(rows)
    run.finish("ok")
    stored = pq.read_table(run.path / METRICS)
    pq.write_table(stored.drop_columns(list(columns)), run.path / METRICS)
    return run.path


def made(note: str | None, **columns: object) -> Row:
    return replace(BASE, method="h2o", measure="memory", metric="held_bytes", value=1.0, note=note, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        (made(None), "trained"),
        (made("random weights, for speed and memory only"), "random"),
        (made("KV heads 3 -> 9 by repeating them: same logits", converted=True), "repeated"),
        (made("KV heads 3 -> 1 by mean-pooling: not lossless", converted=True), "pooled"),
        (made(None, converted=True), "pooled"),
    ],
)
def test_weights_of_an_old_folder_follow_its_notes(tmp_path: Path, row: Row, weights: str) -> None:
    path = old_folder(tmp_path, [row, replace(row, metric="slack_bytes", note=None)])
    assert list(load(path)["weights"]) == [weights] * 2  # a row without the note is of the same model
    assert list(read_run(path).frame([1])["weights"]) == [weights]


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        (made(None), None),
        (made("better than full beyond the interval; 95%: bootstrap"), "better_than_full"),
        (made("uninformative: the full cache finds none of these"), "uninformative"),
        (made("graph off; unsteady: the halves differ"), "unsteady"),
        (made("95%: bootstrap over 8 blocks, of these windows alone: 10 or more speak for others"), "few_windows"),
        (replace(made(None), metric="steady", value=0.0), "unsteady"),
        (replace(made(None), metric="engaged", value=0.0), "not_engaged"),
        (replace(made(None), metric="engaged", value=0.0, method="full"), None),
        (made("is not unsteady"), None),
    ],
)
def test_flags_of_an_old_folder_follow_its_notes_and_numbers(tmp_path: Path, row: Row, flags: str | None) -> None:
    (found,) = rows_of(load(old_folder(tmp_path, [row])))
    assert found.flags == flags


def test_columns_that_a_folder_has_are_left_as_they_are(tmp_path: Path) -> None:
    row = made("random weights; unsteady: the halves differ", weights="trained")
    path = old_folder(tmp_path, [row], columns=("tokenizer",))
    (found,) = rows_of(load(path))
    assert (found.weights, found.flags) == ("trained", None)


def test_published_folders_say_where_their_weights_come_from() -> None:
    rows = rows_of(load(REFERENCE))
    known = {(row.model, row.kv_heads, row.weights) for row in rows}
    assert known == {
        ("smollm2-135m", 3, "trained"),
        ("smollm2-135m", 9, "repeated"),
        ("smollm2-135m", 1, "pooled"),
        ("gemma3-270m", 1, "trained"),
        ("random-deepseek-v2-lite", 16, "random"),
        ("random-deepseek-v2-lite", 1, "random"),
    }
    flags = {flag for row in rows for flag in (row.flags or "").split()}
    assert flags == {"better_than_full", "few_windows", "not_computed", "sees_future", "unsteady"}
    noted = {row.note for row in rows if row.flags == "unsteady"}
    assert noted and all("unsteady: " in str(note) or "half of the steps differ" in str(note) for note in noted)


def test_parts_of_published_caches_add_up_to_what_they_hold() -> None:
    held: dict[tuple[object, ...], float] = {}
    parts: dict[tuple[object, ...], float] = {}
    for row in rows_of(load(REFERENCE)):
        if row.measure != "memory" or row.value is None:
            continue
        place = tuple(getattr(row, name) for name in ("run", *IDENTITY))
        if row.metric == "held_bytes":
            held[place] = row.value
        elif str(row.metric).startswith("held_bytes."):
            assert str(row.metric).removeprefix("held_bytes.") in MEMORY_PARTS
            parts[place] = parts.get(place, 0.0) + row.value
    assert len(parts) > 30 and {place: held[place] for place in parts} == parts
