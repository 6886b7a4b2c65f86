"""Rows: their columns have roles, and rows and frames hold the same."""

from __future__ import annotations

from kvbench.results.row import COLUMNS, IDENTITY, KNOBS, ROLES, Row, frame_of, rows_of
from tests.report.synthetic import OOM
from tests.shared.rows import rows


def test_frame_and_rows_are_the_same_thing() -> None:
    made = [*rows(), OOM, Row(knobs="{}", converted=True)]
    assert rows_of(frame_of(made)) == made


def test_every_column_has_one_role() -> None:
    roles = [column for columns in ROLES.values() for column in columns]
    assert sorted(roles) == sorted(COLUMNS) and len(set(roles)) == len(roles)


def test_identity_is_model_method_and_setting() -> None:
    assert set(IDENTITY) == {*ROLES["identity"], *ROLES["knob"], *ROLES["setting"]}
    assert set(KNOBS) == set(ROLES["knob"]) and not set(IDENTITY) & {*ROLES["result"], *ROLES["place"]}
