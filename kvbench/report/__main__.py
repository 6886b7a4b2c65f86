"""`python -m kvbench.report PATH [PATH ...] [--out DIR]`: a page, tables and plots from run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import EXIT_USER_ERROR, UserError, exit_with

EXAMPLE = "python -m kvbench.report results/"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; type for example: {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the report; 0 if it was written, 2 after one line on stderr if the input cannot be used."""
    parser = _Parser(
        prog="python -m kvbench.report",
        description="Write report.html, report.md, tables and plots from run folders, also while they still run.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="run folder or folder of them")
    parser.add_argument(
        "--against",
        nargs=2,
        metavar=("OLD", "NEW"),
        type=Path,
        help="instead: what moved between two sweeps, beyond intervals (into NEW/against)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: PATH/report)")
    try:
        given = parser.parse_args(arguments)
        if given.against:
            old, new = given.against
            return _against(old, new, given.paths, given.out)
        out = _out_folder(given.paths, given.out)
        # Imported late: matplotlib and pandas cost a second that --help and a typing error need not pay.
        from kvbench.report.page import write_report
        from kvbench.results.folder import check_writable
        from kvbench.results.loading import find_runs

        find_runs(given.paths)  # before anything is made
        check_writable(out, "report folder")
        print(write_report(given.paths, out))
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _against(old: Path, new: Path, others: Sequence[Path], out: Path | None) -> int:
    if others:
        raise UserError(
            f"--against takes OLD and NEW, and {str(others[0])!r} beside them; type for example: "
            "python -m kvbench.report --against results/old results/new"
        )
    from rich.console import Console

    from kvbench.report.against import write_against
    from kvbench.report.tables import for_terminal
    from kvbench.results.folder import check_writable
    from kvbench.results.loading import find_runs

    find_runs([old, new])
    out = out or (new.parent if new.is_file() else new) / "against"
    check_writable(out, "report folder")
    table, sentence = write_against(old, new, out)
    console = Console()
    if table is not None:
        console.print(for_terminal(table, console.width))
    print(sentence)
    print(out / "against.html")
    return 0


def _out_folder(paths: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        return out
    if not paths:
        raise UserError(f"no PATH given: type for example: {EXAMPLE}")
    if len(paths) > 1:
        raise UserError(f"{len(paths)} paths given: say where to write with --out DIR")
    folder = paths[0].parent if paths[0].is_file() else paths[0]
    return folder / "report"


if __name__ == "__main__":
    exit_with(main)
