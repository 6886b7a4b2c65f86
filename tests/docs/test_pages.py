"""What the documents say is true: numbers, names, lengths, examples."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import kvbench
from kvbench.measures.measure import ENGAGED
from kvbench.results.row import COLUMNS, FLAGS, WEIGHTS, Row, rows_of
from tests.docs.pages import PAGES, blocks, name_of
from tests.shared.paths import ROOT

README = (ROOT / "README.md").read_text()
MIB = 2**20


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def in_code(text: str) -> set[str]:
    """The words between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1200


def test_every_line_of_prose_fits() -> None:
    for one in PAGES:
        text = one.read_text()
        for line in [] if re.search("Written by `(python|bash) scripts/", text) else text.splitlines():
            assert len(line) <= 120 or line.startswith(("|", "!", "python", "bash")), f"{name_of(one)}: {line}"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)[^)]*\)", README))))
def test_links_and_pictures_of_the_readme_exist(link: str) -> None:
    assert link.startswith("http") or (ROOT / link).exists()


@cache
def published_rows() -> list[Row]:
    return rows_of(kvbench.load(ROOT / "results" / "reference" / "methods"))


def table_rows() -> list[list[str]]:
    """The cells of the README's table of methods."""
    lines = README.split("| method | tokens kept")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_named(label: str) -> dict[str, Row]:
    """The published perplexity rows over all texts of one line of the table, by metric."""
    method, _, budget = label.partition(", budget ")
    method, _, decode = method.partition(" decode=")
    name, _, store = method.partition("+")
    found = {
        row.metric or "": row
        for row in published_rows()
        if (row.measure, row.method, row.budget) == ("perplexity", name, float(budget) if budget else None)
        and row.store in ([store] if store else ["dense", name])
        and "+" in (row.dataset or "")
        and row.position is None
        and row.variant != "output"
        and (not decode or json.loads(row.knobs or "{}").get("decode") == decode)
        and "protect_first" not in json.loads(row.knobs or "{}")
    }
    assert found, label
    return found


@pytest.mark.parametrize("cells", table_rows(), ids=lambda cells: cells[0])
def test_the_readme_table_shows_published_rows(cells: list[str]) -> None:
    """Each number as `results/reference/methods` holds it."""
    label, kept, smaller, nll, kl, gap = cells
    rows = rows_named(label)
    assert kept == f"{number(rows['scored_kept_tokens']):,.0f}"
    assert smaller == f"{number(rows['x_smaller']):.1f}"
    assert float(kl) == pytest.approx(number(rows["kl"]), abs=0.0005 if float(kl) > 1e-3 else 5e-6)
    loss = rows["nll_minus_full"]
    told = [float(text) for text in re.findall(r"[-+][\d.]+", nll)]
    assert told == pytest.approx([loss.value, loss.low, loss.high], abs=5.1e-4)
    if "gap_closed_kl" in rows:
        closed = rows["gap_closed_kl"]
        told = [float(text) / 100 for text in re.findall(r"-?\d+", gap)]
        assert told == pytest.approx([closed.value, closed.low, closed.high], abs=0.00501)
    else:
        assert gap in ("", "0 (floor)", "100% (ceiling)")


def number(row: Row) -> float:
    assert row.value is not None
    return row.value


PAGE_OF = {"method": "methods.md", "store": "stores.md", "model": "models.md", "data": "models.md"}


@pytest.mark.parametrize(("group", "name"), PAGE_OF.items())
def test_every_choice_is_explained_with_its_paper(group: str, name: str) -> None:
    text = page(name)
    for file in (ROOT / "conf" / group).glob("*.yaml"):
        assert file.stem in in_code(text), f"{name} does not name {file.stem}"
        for paper in re.findall(r"\b(\d{4}\.\d{5})\b", file.read_text()):
            assert paper in text, f"{name} does not cite {paper} of {file.stem}"


def test_every_setting_of_methods_and_stores_is_explained() -> None:
    root = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    read = "\n".join(file.read_text() for group in ("method", "store") for file in (ROOT / "conf" / group).glob("*"))
    knobs = {key for key in root if re.search(rf"\$\{{{key}\}}", read)}
    explained = in_code(page("methods.md")) | in_code(page("stores.md"))
    assert len(knobs) > 10 and knobs <= explained


MEASURES = sorted(file.parent.name for file in (ROOT / "kvbench" / "measures").glob("*/__init__.py"))


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_explained_with_its_settings_and_metrics(name: str) -> None:
    """Settings with the defaults of the class, and the metrics of its table."""
    module = import_module(f"kvbench.measures.{name}")
    (measure,) = (kind for kind in vars(module).values() if getattr(kind, "name", None) == name)
    section = page("measures.md").split(f"\n## {name}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M)
    assert {key: yaml.safe_load(default) for key, default in table} == measure().settings()
    shared = {headline.metric for headline in ENGAGED}
    assert {headline.metric for headline in measure.headlines} - shared <= in_code(section)
    assert shared <= in_code(page("measures.md"))


def test_every_column_flag_and_kind_of_weights_is_explained() -> None:
    assert {*COLUMNS, *FLAGS, *WEIGHTS} <= in_code(page("results.md"))


def python_examples() -> list[str]:
    return [block.text for block in blocks() if block.language == "python" and block.file is None]


@pytest.mark.parametrize("source", python_examples(), ids=lambda text: text.splitlines()[0][:40])
def test_python_examples_run(
    source: str, smollm2: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(source, "example.py", "exec"), {})
    if "The capital of France" in source:
        assert "Paris" in capsys.readouterr().out


def test_all_pages_are_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("nav:")[1].split("markdown_extensions")[0]
    assert sorted(re.findall(r"(\w+\.md)", menu)) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_each_fenced_block_has_a_known_language() -> None:
    """Blocks without a language hold commands."""
    assert {block.language for block in blocks()} <= {"", "python", "yaml", "text"}


def test_no_page_names_a_machine_path() -> None:
    for one in PAGES:
        assert not re.search(r"/(root|work|tmp)/", one.read_text()), name_of(one)


def test_published_pictures_are_those_of_the_reports() -> None:
    for folder in (ROOT / "results" / "reference").glob("*/report"):
        text = (folder / "report.md").read_text()
        assert all((folder / name).is_file() for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)), folder


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "results" / "reference").iterdir()))
def test_published_folders_load(name: str) -> None:
    folder = ROOT / "results" / "reference" / name
    frame = kvbench.load(folder)
    assert len(frame) > 100 and set(frame["status"]) == {"ok"}
    assert folder.name in (ROOT / "results" / "README.md").read_text()
    for run in {path.parent for path in Path(folder).rglob("metrics.parquet")}:
        assert {"config.yaml", "metrics.parquet", "provenance.json", "status.json"} <= {p.name for p in run.iterdir()}
