"""Headlines are read from config.yaml, and a file that is no config is an empty one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from kvbench.results.headline import Headline
from kvbench.results.recorded_config import read_config, recorded_headlines


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "\x00"])
def test_a_file_that_cannot_be_read_gives_an_empty_config(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert read_config(tmp_path) == {}


def test_headlines_of_all_runs_the_last_one_wins(tmp_path: Path) -> None:
    one, other = Headline("score", "score", "percent"), Headline("score", "points", "count", better="high")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"headlines": {"mine": [one.record()]}}))
    configs = [read_config(tmp_path), {"headlines": {"mine": [other.record(), 3], "bad": 1, "empty": []}}, {}]
    assert recorded_headlines(configs) == {"mine": (other,)}
    assert recorded_headlines(configs[:1]) == {"mine": (one,)}
