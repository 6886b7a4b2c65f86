"""Names and labels tell methods apart with as few words as possible."""

from __future__ import annotations

import pytest

from kvbench.report.compare.comparison import config_of
from kvbench.report.compare.names import display_name, labels
from kvbench.results.row import Row
from tests.report.synthetic import sweep


@pytest.mark.parametrize(
    ("method", "store", "shown"),
    [
        ("full", None, "full"),
        ("full", "dense", "full"),
        ("full", "int4", "full+int4"),
        ("h2o", "dense", "h2o"),
        ("h2o", "int4", "h2o+int4"),
        ("kivi4", "kivi4", "kivi4"),
        ("kivi4", "kivi", "kivi4"),
        ("kivi", "kivi2", "kivi2"),
    ],
)
def test_display_name(method: str, store: str | None, shown: str) -> None:
    assert display_name(Row(method=method, store=store)) == shown


def test_labels_hold_only_knobs_that_vary() -> None:
    made = [
        Row(method="kivi2", store="kivi2", bits=2),
        Row(method="kivi4", store="kivi4", bits=4),
        Row(method="h2o", budget=256, knobs='{"pool": 7, "heads": 1}'),
        Row(method="h2o", budget=0.25, knobs='{"pool": 5, "heads": 1}'),
        Row(method="streaming_llm", budget=256, sinks=4),
    ]
    found = labels(made)
    assert [found[config_of(row)] for row in made] == [
        "kivi2",
        "kivi4",
        "h2o 256, pool=7",
        "h2o 25%, pool=5",
        "streaming_llm",
    ]


def test_labels_are_unique() -> None:
    made = sweep()
    found = labels(made)
    assert len(set(found.values())) == len(found) == len({config_of(row) for row in made})
