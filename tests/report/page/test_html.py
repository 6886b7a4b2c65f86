"""report.html in a real browser: how it looks, that it sorts, that a reader without sight or mouse can use it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.page.write import write_report
from kvbench.results.row import Row
from tests.report.synthetic import OOM, run_of
from tests.shared.rows import METHODS, rows

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def made() -> list[Row]:
    """A comparison with something of everything: failures, text of others, a lagging method."""
    bad = replace(OOM, note="<script>alert(1)</script> & 'quoted'")
    lame = replace(OOM, method="recompute", budget=None, context=2048, status="failed", note="boom")
    return [*rows(), bad, lame]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sweep")
    run_of(where, made())
    run_of(where, [], status="failed")
    run_of(where, [], status="running")
    return write_report([where], where / "report")


def details_of(page: Path) -> Path:
    return page.with_name("details.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, file: Path, size: dict[str, int], scheme: str = "light") -> tuple[Any, list[str]]:
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    page.goto(file.as_uri())
    return page, said


def test_a_page_holds_everything_in_itself_but_the_other_page(page_file: Path) -> None:
    for file, other in ((page_file, "details.html"), (details_of(page_file), "report.html")):
        addresses = re.findall(r'(?:src|href)="([^"]+)"', file.read_text())
        assert addresses and all(address.startswith(("data:", "#", other)) for address in addresses)
    text = page_file.read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text
    for expected in ("run failed", "it broke", "still running", "oom", "boom", "22.31", "What these rows cannot tell"):
        assert expected in text
    assert "kvbench method=h2o store=int4 bits=4 budget=256 window=128 variant=sum" in text


@needs_browser
@pytest.mark.parametrize("name", ["report", "details"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_page_fits_logs_nothing_and_passes_axe(
    browser: Any, page_file: Path, size: dict[str, int], scheme: str, name: str, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page, said = opened(browser, page_file.with_name(f"{name}.html"), size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 50_000
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    violations = Axe().run(page).response["violations"]
    assert [(found["id"], found["nodes"][0]["html"][:120]) for found in violations] == []
    assert said == []
    page.context.close()


@needs_browser
def test_a_click_sorts_and_the_baseline_stays_on_top(browser: Any, page_file: Path) -> None:
    page, said = opened(browser, page_file, DESKTOP)
    table = page.locator("#table-perplexity")
    head = table.locator("th", has_text="ΔNLL")

    def order() -> list[str]:
        return [text.strip() for text in table.locator("tbody th").all_inner_texts()]

    head.locator("button").click()
    # The synthetic losses rise in the order of this list.
    methods = ["full", "kivi8", "kivi4", "h2o", "h2o+int4", "kivi2", "streaming_llm", "random"]
    assert order() == methods and head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    assert order() == ["full", *methods[:0:-1]] and head.get_attribute("aria-sort") == "descending"
    table.locator("thead button").first.click()
    assert order() == ["full", *sorted(methods[1:])] and head.get_attribute("aria-sort") is None
    assert page.locator("#said").inner_text() == "Sorted by method, ascending"
    assert said == []
    page.context.close()


@needs_browser
def test_the_filter_keeps_matching_methods_and_the_baseline(browser: Any, page_file: Path) -> None:
    page, said = opened(browser, page_file, DESKTOP)
    table = page.locator("#table-overview")

    def left() -> list[str]:
        return [line.locator("th").inner_text() for line in table.locator("tbody tr").all() if line.is_visible()]

    everyone = left()
    page.locator("#filter").fill("H2O, random")
    assert left() == ["full", "h2o", "h2o+int4", "random", "h2o"]  # the last one failed
    assert page.locator("#filter-count").inner_text().endswith("lines of all tables shown")
    table.locator("thead button", has_text="KL").click()
    page.emulate_media(media="print")
    assert sorted(left()) == sorted(everyone)  # on paper nothing is left out
    page.emulate_media(media="screen")
    page.locator("#filter").fill("")
    assert sorted(left()) == sorted(everyone) and said == []
    page.context.close()


@needs_browser
def test_filters_by_budget_and_family_work_from_the_keyboard(browser: Any, page_file: Path) -> None:
    page, said = opened(browser, page_file, DESKTOP)

    def left() -> set[str]:
        lines = page.locator("#table-overview tbody tr").all()
        return {line.locator("th").inner_text() for line in lines if line.is_visible()}

    everyone = left()
    page.locator("#filter").focus()
    page.keyboard.press("Tab")
    page.keyboard.type("256")
    assert left() == {"full", "h2o", "h2o+int4", "streaming_llm", "random"}
    page.keyboard.press("Tab")  # the first family
    assert page.evaluate("document.activeElement.value") == "quantised"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert left() == {"full", "h2o+int4", "streaming_llm", "random"}
    page.locator("#filters [type=reset]").press("Enter")
    page.wait_for_function("document.getElementById('filter-count').textContent === 'All lines shown'")
    assert left() == everyone and said == []
    page.context.close()


@needs_browser
def test_without_scripts_every_line_is_shown_and_no_filter(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert not page.locator("#filters").is_visible()
    assert all(line.is_visible() for line in page.locator("#table-overview tbody tr").all())
    context.close()


def test_arrows_say_which_way_is_better(page_file: Path) -> None:
    heads = page_file.read_text().split('id="table-overview"')[1].split("</thead>")[0]
    found = dict(re.findall(r'data-name="([^"]+)">[^<]*<span class="better" aria-hidden="true">(.)</span>', heads))
    assert found["ΔNLL"] == found["KL"] == found["TPOT ms"] == "↓"
    assert found["top-1"] == found["x smaller"] == "↑"
    assert "method" not in found and "budget" not in found and heads.count("is better)") == len(found)


def test_the_default_page_holds_at_most_eight_figures_and_six_tables(page_file: Path) -> None:
    text, more = page_file.read_text(), details_of(page_file).read_text()
    assert text.count("<figure") <= 8 and text.count('<table id="table-') <= 6
    shown = set(re.findall(r'<figure id="figure-(\w+)"', text))
    assert {"kl_smaller", "nll_smaller", "needle", "speed", "memory_context"} == shown
    further = set(re.findall(r'<figure id="figure-(\w+)"', more))
    assert {"bandwidth", "latency_context", "top1_smaller"} <= further and not shown & further
    tables = [set(re.findall(r'<table id="table-(\w+)"', each)) for each in (text, more)]
    assert not tables[0] & tables[1] and {"overview", "perplexity"} <= tables[0] and "memory_parts" in tables[1]


@needs_browser
def test_a_printed_figure_fits_a_page_with_its_caption(browser: Any, page_file: Path) -> None:
    for file in (page_file, details_of(page_file)):
        page, _ = opened(browser, file, {"width": 672, "height": 1001})  # A4 within its margins
        page.emulate_media(media="print")
        for figure in page.locator("figure").all():
            box = figure.bounding_box()
            assert box["height"] < 1001 and box["x"] + box["width"] <= 673
            assert figure.evaluate("figure => getComputedStyle(figure).breakInside") == "avoid"
        page.context.close()


def test_a_line_over_several_measures_carries_a_command_for_all_of_them(page_file: Path) -> None:
    body = page_file.read_text().split('id="table-overview"')[1].split("</table>")[0]
    assert body.count("measure=[perplexity,needle,memory,latency]") == len(METHODS)


@needs_browser
def test_commands_can_be_copied_and_print_opens_folded_lists(browser: Any, page_file: Path) -> None:
    page, said = opened(browser, page_file, DESKTOP)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#table-perplexity button.copy").nth(2).click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("python -m kvbench method=kivi4 bits=4") and "'measure=[perplexity]'" in copied
    folded = page.locator("details:not([open])").count()
    assert folded > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == folded
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.set_viewport_size({"width": 672, "height": 900})  # A4 within its margins
    for table in page.locator(".scroll table").all():
        assert table.evaluate("table => table.scrollWidth - table.parentElement.clientWidth") <= 0
    assert said == []
    page.context.close()


def test_as_many_lines_as_methods(page_file: Path) -> None:
    body = page_file.read_text().split('id="table-perplexity"')[1].split("</table>")[0]
    assert body.count("<tr") == len(METHODS) + 1
