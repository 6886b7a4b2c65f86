"""Tables as LaTeX."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.compare.methods import groups_of
from kvbench.report.page.table_files import to_latex
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview
from tests.report.synthetic import OOM, sweep, table
from tests.shared.rows import rows


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_compiles_and_no_table_is_wider_than_the_page(tmp_path: Path) -> None:
    found = [*build_tables([*sweep(), OOM]), overview(groups_of(rows()))]
    odd = replace(table(rows(), "memory"), name="odd", title="50% & $x_1 ~ #\\{}^ <a>", caption=["±", "Δ–†"])
    body = "\n".join(to_latex(one) for one in [*found, odd] if one is not None)
    packages = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    (tmp_path / "all.tex").write_text(rf"{packages}{body}\end{{document}}", encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
