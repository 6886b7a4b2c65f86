"""The columns of a row and their roles, and rows as a table."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.results.folder import RunFolder
from kvbench.results.loading import load
from kvbench.results.row import COLUMNS, IDENTITY, KNOBS, ROLES, Row, frame_of, rows_of
from tests.report.synthetic import OOM
from tests.shared.rows import BASE, rows

DESIGNED = """
run, model, revision, arch, kv_heads, converted, method, store, bits, k_bits, v_bits, group, residual,
budget, sinks, window, variant, knobs, measure, metric, value, unit, low, high, n, protocol, question,
dataset, context, depth, batch, dtype, device, kernel, threads, seed, status, note,
position, stride, bos, tokenizer, weights, flags, gate, prefill_chunk
"""


def folder(where: Path, label: str = "full,H2O=1") -> RunFolder:
    return RunFolder.create(where, label, {"seed": 0}, {"command": "python -m kvbench"})


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


def test_frame_and_rows_are_the_same_thing() -> None:
    made = [*rows(), OOM, Row(knobs="{}", converted=True)]
    assert rows_of(frame_of(made)) == made


def test_every_column_has_one_role() -> None:
    roles = [column for columns in ROLES.values() for column in columns]
    assert sorted(roles) == sorted(COLUMNS) and len(set(roles)) == len(roles)


def test_identity_is_model_method_and_setting() -> None:
    assert set(IDENTITY) == {*ROLES["identity"], *ROLES["knob"], *ROLES["setting"]}
    assert set(KNOBS) == set(ROLES["knob"]) and not set(IDENTITY) & {*ROLES["result"], *ROLES["place"]}
