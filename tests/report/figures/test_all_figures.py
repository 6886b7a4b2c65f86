"""All figures of a report: which are drawn, and what is on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from kvbench.report.figures.all_figures import draw_all
from tests.shared.rows import BASE, METHODS, rows


def test_figures_are_written_as_png_and_pdf_and_are_not_blank(tmp_path: Path) -> None:
    drawn = draw_all(rows(), tmp_path)
    assert [plot.file for plot in drawn] == [
        "perplexity_bytes.png",
        "quality_bytes.png",
        "needle.png",
        "latency_context.png",
        "bandwidth.png",
        "memory_context.png",
    ]
    for plot in drawn:
        image = plt.imread(tmp_path / plot.file)
        assert image.shape[1] > 1000 and image[..., :3].std() > 0.05
        assert (tmp_path / plot.file).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert plot.caption in plot.alt


@pytest.mark.parametrize(
    ("measures", "files"),
    [
        (["perplexity"], ["perplexity_bytes", "quality_bytes"]),
        (["needle"], ["needle"]),
        (["latency"], ["latency_context", "bandwidth"]),
        (["memory"], ["memory_context"]),
        ([], []),
    ],
)
def test_each_figure_is_drawn_only_if_its_rows_exist(tmp_path: Path, measures: list[str], files: list[str]) -> None:
    assert [plot.file for plot in draw_all(rows(measures=measures), tmp_path)] == [f"{file}.png" for file in files]
    assert {file.stem for file in tmp_path.iterdir()} == set(files)


def test_undefined_and_infinite_numbers_break_no_figure(tmp_path: Path) -> None:
    made = rows(measures=["perplexity", "memory", "latency"], contexts=[1024])
    made = [replace(row, value=float("inf")) if row.metric == "ppl" and row.method == "random" else row for row in made]
    made = [replace(row, value=None) if row.metric == "tpot_p90_ms" else row for row in made]
    assert len(draw_all(made, tmp_path)) == 5


def test_at_most_four_settings_are_drawn_and_the_caption_counts_them(tmp_path: Path) -> None:
    made = [row for seed in range(6) for row in rows(METHODS[:2], ["memory"], base=replace(BASE, model=f"org/M{seed}"))]
    (plot,) = draw_all(made, tmp_path)
    assert "4 of 6 models" in plot.caption
