"""The pages build without a warning, and a page loads nothing from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.paths import ROOT

pytest.importorskip("mkdocs", reason="needs pip install 'kvbench[docs]'")
pytest.importorskip("mkdocstrings", reason="needs pip install 'kvbench[docs]'")


def test_the_site_builds_strictly_and_stands_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)\"", page.read_text())
        assert [url for url in loaded if "canonical" not in url] == [], page
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "heavy hitters" in api.lower() and "build_cache" in api
