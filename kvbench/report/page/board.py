"""`python -m kvbench.board FOLDERS`: a static page of the run folders whose verification passes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvbench.errors import EXIT_USER_ERROR, UserError
from kvbench.files import write_atomic, writing_to
from kvbench.report.page.html import tables_html
from kvbench.report.page.table_files import to_markdown
from kvbench.report.tables.board import submission, unverified_table, verified_table
from kvbench.results.folder import check_writable
from kvbench.results.loading import find_runs

EXAMPLE = "python -m kvbench.board results/"
SENTENCE = (
    "A folder is on the board where its verify.json passes and speaks of the folder's present content. Whoever keeps "
    "the board runs kvbench.verify: a verify.json that came with a folder proves nothing."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; type for example: {EXAMPLE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the board; 0 if it was written, 2 after one line on stderr if the input cannot be used."""
    parser = _Parser(
        prog="python -m kvbench.board",
        description="Write board.html and board.md: the run folders whose verification passes, and those that are not "
        "verified with the command to type.",
    )
    parser.add_argument("paths", nargs="*", metavar="FOLDER", type=Path, help="run folder or folder of them")
    parser.add_argument("--who", default="", metavar="NAME", help="who measured, for folders without a who.txt")
    parser.add_argument("--title", default="Board", help="heading of the page")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: FOLDER/board)")
    try:
        given = parser.parse_args(arguments)
        if not given.paths:
            raise UserError(f"no FOLDER given: type for example: {EXAMPLE}")
        if given.out is None and len(given.paths) > 1:
            raise UserError(f"{len(given.paths)} folders given: say where to write with --out DIR")
        out = given.out or given.paths[0] / "board"
        runs = find_runs(given.paths)
        check_writable(out, "board folder")
        with writing_to(out, "board folder"):
            print(write_board(runs, out, given.who, given.title))
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def write_board(runs: Sequence[Path], out: Path, who: str, title: str) -> str:
    """Write board.html and board.md into `out`; returns a line that counts the folders and names the page."""
    submissions = [submission(run, who) for run in runs]
    tables = [table for table in (verified_table(submissions), unverified_table(submissions)) if table is not None]
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "board.html", tables_html(tables, title, SENTENCE))
    parts = [f"## {table.title}\n\n{to_markdown(table)}" for table in tables]
    write_atomic(out / "board.md", "\n\n".join([f"# {title}", *parts, SENTENCE]) + "\n")
    verified = sum(one.why_not is None for one in submissions)
    return f"{verified} of {len(submissions)} folders are verified: {out / 'board.html'}"
