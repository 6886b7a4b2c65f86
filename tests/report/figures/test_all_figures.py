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
    main = ["kl_smaller.png", "nll_smaller.png", "needle.png", "speed.png", "memory_context.png"]
    further = ["top1_smaller.png", "latency_context.png", "bandwidth.png", "memory_parts.png"]
    assert [plot.file for plot in drawn if plot.main] == main
    assert [plot.file for plot in drawn] == main + further
    for plot in drawn:
        image = plt.imread(tmp_path / plot.file)
        assert image.shape[1] > 1000 and image[..., :3].std() > 0.05
        assert (tmp_path / plot.file).with_suffix(".pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("measures", "files"),
    [
        (["perplexity"], ["kl_smaller", "nll_smaller", "top1_smaller"]),
        (["needle"], ["needle"]),
        (["latency"], ["speed", "latency_context", "bandwidth"]),
        (["memory"], ["memory_context", "memory_parts"]),
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
    files = {plot.file for plot in draw_all(made, tmp_path)}
    assert files == {f"{name}.png" for name in ("kl_smaller", "nll_smaller", "top1_smaller", "speed", "bandwidth")} | {
        "memory_parts.png"
    }


def test_at_most_four_settings_are_drawn_and_the_caption_counts_them(tmp_path: Path) -> None:
    made = [row for seed in range(6) for row in rows(METHODS[:2], ["memory"], base=replace(BASE, model=f"org/M{seed}"))]
    drawn = draw_all(made, tmp_path)
    assert drawn and all("4 of 6 models" in plot.caption for plot in drawn)


def test_an_alt_text_names_methods_with_their_numbers(tmp_path: Path) -> None:
    alts = {plot.file: plot.alt for plot in draw_all(rows(), tmp_path)}
    assert "h2o+int4 +0.0562 at 6.25x" in alts["nll_smaller.png"]
    assert "full 24/24 needles" in alts["needle.png"] and "kivi8 24/24" in alts["needle.png"]
    assert "context 2,048" in alts["speed.png"] and "h2o+int4 136% (highest)" in alts["speed.png"]
    for alt in alts.values():
        assert any(sign.isdigit() for sign in alt) and "The tables hold" not in alt
