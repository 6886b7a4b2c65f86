"""`python -m kvbench.report PATH [PATH ...] [--out DIR]`: a page, tables and figures from run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import EXIT_USER_ERROR, UserError, exit_with
from kvbench.files import writing_to

EXAMPLE = "python -m kvbench.report results/"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; type for example: {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the report; 0 if it was written, 2 after one line on stderr if the input cannot be used."""
    parser = _Parser(
        prog="python -m kvbench.report",
        description="Write report.html, report.md, tables and figures from run folders, finished or still running.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="run folder or folder of them")
    parser.add_argument(
        "--against",
        nargs=2,
        metavar=("OLD", "NEW"),
        type=Path,
        help="instead: what changed between two sweeps (into NEW/against)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: PATH/report)")
    try:
        given = parser.parse_args(arguments)
        if given.against:
            old, new = given.against
            return _against(old, new, given.paths, given.out)
        out = _out_folder(given.paths, given.out)
        # Imported late: matplotlib and pandas take a second, which --help and a typing error need not wait for.
        from kvbench.report.page.write import write_report
        from kvbench.results.folder import check_writable
        from kvbench.results.loading import find_runs

        find_runs(given.paths)  # raises before anything is written
        check_writable(out, "report folder")
        with writing_to(out, "report folder"):
            page = write_report(given.paths, out)
        print(page)
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _against(old: Path, new: Path, others: Sequence[Path], out: Path | None) -> int:
    if others:
        raise UserError(
            f"--against takes two paths, OLD and NEW; {str(others[0])!r} is a third; type for example: "
            "python -m kvbench.report --against results/old results/new"
        )
    from rich.console import Console

    from kvbench.report.page.write import write_changes
    from kvbench.report.tables.table import for_terminal
    from kvbench.results.folder import check_writable
    from kvbench.results.loading import find_runs

    find_runs([old, new])
    out = out or (new.parent if new.is_file() else new) / "against"
    check_writable(out, "report folder")
    with writing_to(out, "report folder"):
        table, sentence = write_changes(old, new, out)
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
