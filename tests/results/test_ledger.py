"""The records of cells, and which of them count."""

from __future__ import annotations

from pathlib import Path

from kvbench.results.folder import RunFolder
from kvbench.results.ledger import Ledger


def test_a_ledger_reads_what_changed(tmp_path: Path) -> None:
    record = {"id": "a", "key": "k", "kind": "i", "method": "full", "measure": "perplexity", "context": 32}
    folder = RunFolder.create(tmp_path, "x", {}, {}, cells=[record])
    ledger = Ledger(tmp_path)
    assert [found.status for found in ledger.records()] == ["waiting"]
    folder.update_cells({"a": ([], {"status": "ok"})})
    assert [found.status for found in ledger.records()] == ["ok"]
