"""Plans and run folders made by hand, for tests of what is told of a sweep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvbench.files import to_json, write_atomic
from kvbench.results.folder import RunFolder
from kvbench.results.row import Row


def record(
    name: str, method: str = "h2o", measure: str = "perplexity", context: int = 64, **knobs: Any
) -> dict[str, Any]:
    return {
        "id": name,
        "key": name * 8,
        "kind": name,
        "method": method,
        "knobs": knobs,
        "measure": measure,
        "context": context,
    }


def plan(folder: Path, records: list[dict[str, Any]], **more: Any) -> None:
    folder.mkdir(parents=True)
    jobs = [{"overrides": ["method=h2o"], "cells": [r["id"] for r in records], "refused": None}]
    content = {"command": ["python"], "started": time.time() - 60, "rerun": None, "results": "..", "jobs": jobs}
    write_atomic(folder / "plan.json", to_json({**content, "cells": records, **more}))


def made(where: Path, records: list[dict[str, Any]], **states: dict[str, Any]) -> RunFolder:
    folder = RunFolder.create(where, "x", {}, {}, cells=records)
    folder.update_cells(
        {
            name: ([Row(method="h2o", value=1.0)] if fields["status"] == "ok" else [], fields)
            for name, fields in states.items()
        }
    )
    return folder


def ok(seconds: float = 10.0) -> dict[str, Any]:
    return {"status": "ok", "seconds": seconds, "finished": time.time()}
