"""The Pareto front of quality against bytes."""

from __future__ import annotations

from kvbench.report.figures.quality_by_bytes import pareto_front


def test_the_pareto_front_holds_the_points_that_no_other_beats() -> None:
    points = [(1.0, 5.0), (2.0, 6.0), (2.0, 3.0), (4.0, 3.0), (8.0, 1.0)]
    assert pareto_front(points) == [(1.0, 5.0), (2.0, 3.0), (8.0, 1.0)]
    assert pareto_front(points, "high") == [(1.0, 5.0), (2.0, 6.0)]
