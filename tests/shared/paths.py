"""The root of the checkout, and run folders by age."""

from pathlib import Path

from kvbench.results.loading import find_runs

ROOT = Path(__file__).resolve().parents[2]


def runs_by_time(results: str) -> list[Path]:
    """The run folders in the order in which they were made; names of one second are in no order."""
    return sorted(find_runs(results), key=lambda run: (run / "provenance.json").stat().st_mtime_ns)
