"""`python -m kvbench.report PATH [PATH ...] [--out DIR]`: tables and plots from run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import EXIT_USER_ERROR, UserError

EXAMPLE = "python -m kvbench.report results/"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; type for example: {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the report; 0 if it was written, 2 after one line on stderr if the input cannot be used."""
    parser = _Parser(
        prog="python -m kvbench.report",
        description="Write report.md, CSV tables and PNG plots from run folders, also while they still run.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="run folder or folder of them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: PATH/report)")
    try:
        given = parser.parse_args(arguments)
        out = _out_folder(given.paths, given.out)
        # Imported late: matplotlib and pandas cost a second that --help and a typing error need not pay.
        from kvbench.report.page import write_report
        from kvbench.results import check_writable, find_runs

        find_runs(given.paths)  # before anything is made
        check_writable(out, "report folder")
        print(write_report(given.paths, out))
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _out_folder(paths: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        return out
    if len(paths) > 1:
        raise UserError(f"{len(paths)} paths given: say where to write with --out DIR")
    folder = paths[0].parent if paths[0].is_file() else paths[0]
    return folder / "report"


if __name__ == "__main__":
    sys.exit(main())
