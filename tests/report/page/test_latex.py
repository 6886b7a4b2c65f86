"""Tables as LaTeX: balanced, escaped, no wider than a page, and with a caption that stands alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.report.compare.methods import groups_of
from kvbench.report.page.latex import LANDSCAPE, PORTRAIT, escaped, to_latex
from kvbench.report.tables.measure_tables import build_tables
from kvbench.report.tables.method_tables import overview, traits_table
from kvbench.report.tables.table import Column, Table, text_column
from tests.report.synthetic import FULL, OOM, OTHER, cache, judged_groups, sweep, table
from tests.shared.rows import rows

ODD = '50% & $x_1 ~ #\\{}^ <a> | "b" -0.5 … Δ–†±×→ ü 模型'
SPECIAL = re.compile(r"(?<!\\)[%#_~^]")


def some_tables() -> list[Table]:
    made = [*sweep(), OOM]
    groups = judged_groups(FULL + cache("full", 10, -0.001, **OTHER) + cache("h2o", 4, 0.2, budget=100.0))
    odd = replace(table(rows(), "memory"), name="odd", title=ODD, caption=[ODD])
    found = [*build_tables(made), overview(groups_of(rows())), overview(groups), traits_table(groups), odd]
    return [one for one in found if one is not None]


def columns_of(source: str) -> str:
    """The columns of the longtable, a letter each."""
    (line,) = [line for line in source.splitlines() if line.startswith(r"\begin{longtable}")]
    spec = re.sub(r">\{[^}]*\}|\{\d+pt\}", "", line.removeprefix(r"\begin{longtable}"))
    assert re.fullmatch(r"\{[lrp]+\}", spec), spec
    return spec.strip("{}")


def faults(source: str) -> list[str]:
    """What LaTeX would stop at: braces, environments, dollars, columns of each line and signs that need a backslash."""
    source = re.sub(r"^% \\usepackage.*\n", "", source)
    bare = source.replace(r"\\", "  ").replace(r"\{", "").replace(r"\}", "").replace(r"\$", "")
    depth, lowest = 0, 0
    for sign in bare:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        lowest = min(lowest, depth)
    found = [] if depth == lowest == 0 else [f"braces end at {depth}, lowest {lowest}"]
    if bare.count("$") % 2:
        found.append("odd number of dollars")
    words = re.findall(r"\\(begin|end)\{(\w+)\}", source)
    begun = [name for kind, name in words if kind == "begin"]
    if begun != [name for kind, name in words if kind == "end"][::-1]:
        found.append(f"environments {words}")
    spec = columns_of(source)
    for line in source.splitlines():
        cells = len(re.findall(r"(?<!\\)&", line)) + 1
        if line.endswith(r" \\") and cells != len(spec):
            found.append(f"{cells} cells for {len(spec)} columns: {line}")
        if line.startswith(("[", "*")):
            found.append(f"an argument of the line end before it: {line}")
    outside = re.sub(r"\$[^$]*\$|\\(label|ref)\{[^}]*\}|\\tablename~", "", bare)
    found += [f"not escaped: {sign.group()}" for sign in SPECIAL.finditer(outside)]
    return found


@pytest.mark.parametrize("one", some_tables(), ids=lambda one: one.name)
def test_every_table_is_balanced_and_escaped(one: Table) -> None:
    source = to_latex(one)
    assert faults(source) == []
    assert r"\begin{longtable}" in source and r"\endhead" in source and r"\endfirsthead" in source
    assert source.count(r" \\" + "\n") >= one.height


def test_the_check_itself_finds_faults() -> None:
    source = to_latex(table(rows(), "perplexity")).partition("\n")[2]
    assert faults(source) == []
    for old, new in (("}", ""), (r"\_", "_"), (" & ", " "), (r"\end{longtable}", ""), ("$", "")):
        assert faults(source.replace(old, new, 1)) != [], old


def test_true_minus_signs_powers_and_no_sign_that_latex_reads() -> None:
    assert escaped("-0.0133 [-0.02, +0.01]") == "$-$0.0133 [$-$0.02, +0.01]"
    assert escaped("-2.6e-05") == r"$-2.6\times10^{-5}$" and escaped("+1.0e+09") == r"$+1.0\times10^{9}$"
    # Words keep their hyphens, and a revision is no number.
    assert escaped("top-1, x smaller than 16-bit, 87e-57f, 12e4") == "top-1, x smaller than 16-bit, 87e-57f, 12e4"
    assert escaped("模 é ①") == "? é 1"
    assert escaped("a_b{c}") == r"a\_b\{c\}"


def test_a_line_may_begin_with_a_bracket() -> None:
    odd = Table("odd", "Odd", [], (text_column("method", "method", ["[a]", "*b", "c"]),), [])
    assert faults(to_latex(odd)) == []
    assert "{}[a]" in to_latex(odd)


def test_the_caption_says_model_data_windows_intervals_and_symbols() -> None:
    made = [replace(row, metric="windows", value=32.0) for row in rows() if row.metric == "ppl"]
    source = to_latex(table([*rows(), *made], "perplexity"))
    (caption,) = re.findall(r"\\caption\{(.*)\}\\label", source)
    for expected in (
        "Perplexity. Model Toy-135M",
        "dataset essays",
        "windows 32",
        "context 1,024",
        r"95\% intervals",
        "ppl: perplexity",
        r"$\Delta$NLL: nats a token above",
        "x smaller than 16-bit: bytes of a full cache in 16 bits",
    ):
        assert expected in caption, expected
    assert "not measured" not in caption
    assert "--: not measured" in to_latex(table([*rows(), OOM], "latency"))


def wide(count: int) -> Table:
    """A table with a name and `count` columns of ten letters."""
    cells = ["1234567890"]
    numbers = tuple(Column(f"c{i}", f"c{i}", cells, cells, rank=i % 2) for i in range(count))
    return Table("wide", "Wide", [], (text_column("method", "method", ["full"], whole=True), *numbers), [])


@pytest.mark.parametrize("count", [2, 8, 30])
def test_a_wide_table_stands_in_landscape_and_names_what_is_left_out(count: int) -> None:
    source = to_latex(wide(count))
    spec = columns_of(source)
    widest = 49.0  # ten letters and a gap
    assert (len(spec) - 1) * widest < LANDSCAPE
    assert (r"\begin{landscape}" in source) == (count * widest > PORTRAIT - 49)
    assert ("Left out, in the CSV:" in source) == (count == 30)
    if count == 30:
        first = source.split("Left out, in the CSV: ")[1].split(",")[0]
        assert first == "c29"  # of the highest rank, from the right


def test_before_a_column_is_left_out_intervals_stand_below_their_numbers_and_words_break() -> None:
    cells = ["12.345 [11.234, 13.456]"]
    numbers = [Column(f"c{i}", f"c{i}", cells, cells) for i in range(8)]
    name, words = text_column("method", "method", ["full"], whole=True), text_column("why", "why", [20 * "word "])
    source = to_latex(Table("wide", "Wide", [], (name, *numbers), []))
    assert r"\shortstack[r]{12.345 \\ {\tiny [11.234, 13.456]}}" in source and "Left out" not in source
    assert "shortstack" not in to_latex(Table("narrow", "Narrow", [], (name, *numbers[:3]), []))
    source = to_latex(Table("words", "Words", [], (name, words), []))
    assert columns_of(source) == "lp" and "landscape" not in source.partition("\n")[2]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_compiles_and_no_table_is_wider_than_the_page(tmp_path: Path) -> None:
    source = document(some_tables())
    (tmp_path / "all.tex").write_text(source, encoding="utf-8")
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


def document(tables: Sequence[Table]) -> str:
    packages = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{array,booktabs,longtable,pdflscape}"
    return rf"{packages}\begin{{document}}{''.join(map(to_latex, tables))}\end{{document}}"
