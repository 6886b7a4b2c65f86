"""What tests of sweeps share: a small sweep, a watcher that reads every file all the time, and counting what ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvbench.errors import UserError
from kvbench.report.page.write import write_report
from kvbench.results.loading import load
from kvbench.results.row import KNOBS, Row, rows_of
from tests.shared.paths import ROOT

FAULTS = f"hydra.searchpath=[file://{ROOT / 'tests' / 'slurm' / 'conf'}]"
TINY = (
    "model=random-tiny",
    "data=random",
    "perplexity.context=48",
    "perplexity.tokens=4",
    "perplexity.windows=2",
    "memory.contexts=[32,48]",
    "memory.tokens=2",
    "memory.isolate=false",
    "latency.contexts=[32,48]",
    "latency.steps=3",
    "latency.warmup=1",
)


def rows(results: Path) -> list[Row]:
    """All rows that count; none where nothing has been written yet."""
    try:
        return rows_of(load(results))
    except UserError:
        return []


def times_measured(results: Path) -> Counter[tuple[Any, ...]]:
    """How often each number was measured: 1 everywhere, if no cell ran twice."""
    where = ("measure", "context", "depth", "position", "metric")
    return Counter(
        tuple(getattr(row, name) for name in (*KNOBS, *where)) for row in rows(results) if row.status == "ok"
    )


def cells_on_disk(results: Path) -> list[dict[str, Any]]:
    """The records of all cells of all run folders."""
    found = []
    for file in sorted(results.rglob("status.json")):
        found += json.loads(file.read_text()).get("cells", [])
    return found


@contextmanager
def always_whole(results: Path, report: Path | None = None) -> Iterator[list[str]]:
    """Read every JSON and parquet file over and over while the block runs, and build the report where it is to go.

    Yields the list of what could not be read or built; it must stay empty.
    """
    faults: list[str] = []
    done = threading.Event()

    def look() -> None:
        reported = 0.0
        while not done.is_set():
            for file in [*results.rglob("*.json"), *results.rglob("*.parquet"), *results.rglob("samples.jsonl")]:
                if any(part.startswith(".") for part in file.relative_to(results).parts):
                    continue
                read_whole(file, faults)
            if report is not None and time.monotonic() - reported > 3:
                reported = time.monotonic()
                try:
                    write_report([results], report)
                except UserError as error:
                    if "no run folder" not in str(error) and "no such file" not in str(error):
                        faults.append(str(error))
                except Exception as error:  # whatever it is, the test has to name it
                    faults.append(f"report: {error!r}")
            done.wait(0.1)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield faults
    finally:
        done.set()
        thread.join()


def read_whole(file: Path, faults: list[str]) -> None:
    try:
        if file.suffix == ".parquet":
            pq.ParquetFile(file).read()
        else:
            text = file.read_text()
            for line in text.splitlines() if file.suffix == ".jsonl" else [text]:
                if line or not file.name.startswith("job_"):  # empty: it has begun, and no more could be written yet
                    json.loads(line)
    except FileNotFoundError:  # between the listing and the look
        pass
    except Exception as error:  # whatever it is, the test has to name it
        faults.append(f"{file}: {error!r}")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvbench", *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    """`python -m kvbench WORDS` in the checkout, its output in a pipe."""
    return subprocess.Popen(
        command(*words),
        cwd=ROOT,
        env=environment(**variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def complete(*words: str, **variables: str) -> tuple[int, str]:
    """The same, to its end: exit code and output."""
    process = start(*words, **variables)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def wait_until(condition: Callable[[], Any], seconds: float = 120, process: subprocess.Popen[str] | None = None) -> Any:
    """The first true value of the condition. Fails after `seconds`, or where the process ended before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended first: {process.communicate()[0]}")
        time.sleep(0.05)
    raise AssertionError("it never came true")


def at_work(results: Path, method: str) -> dict[str, Any] | None:
    """The status of a run that is in the middle: one cell ok, and one of `method` running."""
    for file in results.rglob("status.json"):
        try:
            status: dict[str, Any] = json.loads(file.read_text())
        except FileNotFoundError:
            continue
        states = {(cell["method"], cell["status"]) for cell in status.get("cells", [])}
        if status["status"] == "running" and (method, "running") in states and (method, "ok") in states:
            return status
    return None
