"""Heat maps of output errors: what is drawn, in which order, and that damaged samples stop nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.report.figures.error_maps import MOST, error_maps, read_error_maps


def sample(methods: dict[str, Any], window: str = "a", context: int = 64) -> dict[str, Any]:
    entries = [
        {"method": name, "store": "dense", "knobs": {"budget": 8}, "layers": [0, 2], "output_error": values}
        for name, values in methods.items()
    ]
    return {"measure": "error", "context": context, "protocol": "prefill_decode", "sha256": window, "methods": entries}


def run(folder: Path, *samples: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return folder


def flat(value: float) -> list[list[float]]:
    return [[value, value], [value, 3 * value]]


def test_maps_are_means_over_windows_and_a_window_measured_twice_counts_once(tmp_path: Path) -> None:
    first = run(tmp_path / "1", sample({"h2o": flat(0.5)}), sample({"h2o": flat(0.1)}, "b"))
    second = run(tmp_path / "2", sample({"h2o": flat(0.3)}))
    (found,) = read_error_maps([first, second])
    np.testing.assert_allclose(found.mean, np.array(flat(0.2)))
    assert found.layers == [0, 2] and found.row.budget == 8


def test_methods_stand_from_small_to_large_errors_without_the_full_cache(tmp_path: Path) -> None:
    folder = run(tmp_path / "1", sample({"full": flat(0.0), "h2o": flat(0.4), "snapkv": flat(0.1)}))
    plot = error_maps([folder])
    assert plot is not None
    panels = [axes.get_title() for axes in plot.figure.axes if axes.get_title()]
    assert [title.split(":")[0] for title in panels] == ["snapkv", "h2o"]
    assert plot.says == "Mean relative error of the attention output: snapkv 0.15, h2o 0.6."


def test_the_longest_context_is_drawn_and_not_too_many_methods(tmp_path: Path) -> None:
    many = {f"m{i}": flat(0.01 * (i + 1)) for i in range(MOST + 4)}
    plot = error_maps([run(tmp_path / "1", sample(many), sample({"short": flat(0.1)}, context=32))])
    assert plot is not None
    assert len([axes for axes in plot.figure.axes if axes.get_title()]) == MOST and "short" not in plot.says


@pytest.mark.parametrize(
    "values", [None, 3, [], [[]], [[1.0]], [[float("nan")] * 2] * 2, [["x", "y"]] * 2, [[1.0], [1.0, 2.0]]]
)
def test_damaged_samples_are_left_out(tmp_path: Path, values: Any) -> None:
    assert error_maps([run(tmp_path / "1", sample({"h2o": values}), {"measure": "error", "methods": 3})]) is None
    assert error_maps([]) is None
