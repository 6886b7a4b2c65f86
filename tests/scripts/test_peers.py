"""The comparison with kvpress: arguments, the table, and what each side reads. Neither side is run here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.api import load_method
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.store import DenseStore
from kvbench.methods.snapkv import SnapKV
from tests.shared.families import random_ids
from tests.shared.models import random_llama
from tests.shared.paths import ROOT

FOLDER = ROOT / "scripts" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules; they import each other by their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("pairs", "table", "kvbench_side")
    yield {name: __import__(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_every_script_can_be_read() -> None:
    for file in FOLDER.glob("*.py"):
        ast.parse(file.read_text())
    subprocess.run(["bash", "-n", str(FOLDER / "run.sh")], check=True)


def test_every_pair_names_a_method_of_kvbench(peers: dict[str, Any]) -> None:
    for pair in peers["pairs"].PAIRS:
        assert not load_method(pair.entry, budget=256, **pair.knobs).rule.holds_budget, pair.name
    assert len({pair.name for pair in peers["pairs"].PAIRS}) == len(peers["pairs"].PAIRS)


def test_methods_are_chosen_by_name(peers: dict[str, Any]) -> None:
    chosen = peers["pairs"].chosen
    assert {pair.entry for pair in chosen("snapkv, tova")} == {"snapkv", "tova"}
    assert chosen(None) == list(peers["pairs"].PAIRS)
    with pytest.raises(SystemExit, match="--methods nosuch has no counterpart; choose from adakv, "):
        chosen("tova,nosuch")


@pytest.mark.parametrize("words", [["--budget", "16"], ["--budget", "1024"], ["--tokens", "0"]])
def test_wrong_arguments_are_refused(
    peers: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers["kvbench_side"].arguments(["prepare", "folder", *words])
    assert "must be 132 or more and below --context 1024" in capsys.readouterr().err


def test_the_table_counts_equal_sets_and_what_both_keep(peers: dict[str, Any]) -> None:
    """Two windows, one layer, two heads, four tokens; two of four sets equal, and 6 of 8 kept tokens in common."""
    mine = np.array([[[[1, 1, 0, 0], [0, 1, 1, 0]]], [[[1, 0, 0, 1], [1, 1, 0, 0]]]], dtype=bool)
    theirs = np.array([[[[1, 1, 0, 0], [0, 1, 0, 1]]], [[[1, 0, 0, 1], [0, 1, 1, 0]]]], dtype=bool)
    nll = {"ours": [[1.0, 2.0], [3.0, 4.0]], "peers": [[2.0, 2.0], [3.0, 4.0]], "check": [[2.0, 2.0], [3.0, 4.5]]}
    sides = {name: {"nll x": np.array(value)} for name, value in nll.items()}
    sides["ours"]["kept x"], sides["peers"]["kept x"] = mine, theirs
    line = peers["table"].line("x", sides["ours"], sides["peers"], sides["check"])
    assert line == "| x | 2 of 4 | 75.00% | 2.5000 | 2.7500 | 2.8750 | 2e-01 |"


def test_the_page_names_versions_methods_and_differences(peers: dict[str, Any], tmp_path: Path) -> None:
    settings = {"context": 4, "tokens": 2, "windows": 1, "budget": 2, "methods": "tova,knorm", "kvbench": "0.1.0"}
    settings |= {"model": "m", "text": "t", "kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}
    arrays = {f"kept {name}": np.ones((1, 1, 1, 4), dtype=bool) for name in ("full", "tova", "knorm")}
    arrays |= {f"nll {name}": np.ones((1, 2)) for name in ("full", "tova", "knorm")}
    text = peers["table"].page(settings, arrays, arrays, arrays)
    assert "kvpress 0.5.5" in text and "| tova | 1 of 1 | 100.00% | 1.0000 |" in text
    assert "Nothing differs by definition for tova." in text
    assert "- knorm: the newest token stays in kvbench only." in text
    assert all(len(line) <= 120 or line.startswith(("|", "-", "Nothing")) for line in text.splitlines())


def test_given_sets_are_kept_as_they_are(peers: dict[str, Any]) -> None:
    """The sets of another rule, given head by head: the same logits, and the same sets read back."""
    model, ids = random_llama(4, 2, 16, dtype=torch.float32), random_ids(1, 60)
    record = prefill(model, ids[:, :50], [SnapKV(budget=20, window=4)])
    other = build_cache(model, Method("snapkv", SnapKV(budget=20, window=4), DenseStore()), record, 10)
    kept = peers["kvbench_side"].as_mask(other, 50)
    assert kept.shape == (2, 2, 50) and (kept.sum(-1) == 20).all()
    given = peers["kvbench_side"].Given(budget=1, kept=torch.from_numpy(kept))
    cache = build_cache(model, Method("given", given, DenseStore()), record, 10)
    assert (peers["kvbench_side"].as_mask(cache, 50) == kept).all()
    for t in range(50, 60):
        torch.testing.assert_close(cache.step(model, ids[:, [t]]), other.step(model, ids[:, [t]]), atol=1e-5, rtol=1e-5)
