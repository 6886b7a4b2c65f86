"""Flags of a job's rows that are decided from all rows of a method."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbench.measures.context import Journal
from kvbench.results.row import Row
from kvbench.sweep.job import _flagged, _outcome


def test_rows_are_the_full_cache_s_where_their_own_answers_were_not_engaged() -> None:
    """A question before the end of the prompt may be answered by a whole cache, and one behind it not."""
    base: dict[str, Any] = {"method": "h2o", "store": "dense", "measure": "needle", "context": 100, "protocol": "task"}
    method: Any = SimpleNamespace(row=Row(**base))
    rows = [
        Row(**base | {"question": question, "metric": metric, "value": value})
        for question, engaged in (("before", 0.0), ("after", 0.5))
        for metric, value in (("hit_rate", 1.0), ("engaged", engaged))
    ]
    assert [row.flags for row in _flagged(method, rows)] == ["not_engaged", "not_engaged", None, None]
    other = [Row(**base | {"protocol": "other", "question": "before", "metric": "engaged", "value": 0.5})]
    assert [row.flags for row in _flagged(method, [*rows, *other])][-1] is None
    timed = [
        Row(method="h2o", store="dense", measure="latency", context=9, protocol="decode", metric="engaged", value=0.0),
        Row(method="h2o", store="dense", measure="latency", context=9, protocol="greedy", metric="itl_p50_ms", value=1),
    ]
    assert [row.flags for row in _flagged(method, timed)] == ["not_engaged"] * 2


def test_a_cell_whose_method_was_skipped_is_done_without_rows() -> None:
    method: Any = SimpleNamespace(label="h2o", row=Row(method="h2o"))
    rows, record = _outcome(method, [], Journal(skipped={"h2o": "why"}), {"finished": 1.0})
    assert (rows, record) == ([], {"status": "ok", "note": "why", "finished": 1.0})
    assert _outcome(method, [], Journal(), {})[1]["status"] == "failed"
    broken = Journal(failures=[("h2o", Row(method="h2o", status="oom"))], skipped={"h2o": "why"})
    assert _outcome(method, [], broken, {})[1]["status"] == "oom"
