"""Removing what killed processes left in a results folder. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from kvbench.results.claims import CLAIMS

OLD_S = 24 * 3600.0
"""No living process keeps a temporary file or folder for so long."""
_FILE = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_FOLDER = re.compile(r"\.new_[0-9a-f]{8}|\.probe_[a-z0-9_]{8}")


def remove_leftovers(results: Path, older_than_s: float = OLD_S) -> None:
    """Remove temporary files and folders of kvbench below `results` that nothing has changed for a day.

    Names: `.NAME.1a2b3c4d.tmp`, `.new_1a2b3c4d`, `.probe_1a2b3c4d`. What cannot be removed is left.
    """
    before = time.time() - older_than_s
    for folder, folders, files in os.walk(results):
        for name in filter(_FOLDER.fullmatch, list(folders)):
            if _last_change(Path(folder, name)) < before:
                shutil.rmtree(Path(folder, name), ignore_errors=True)
        for name in filter(_FILE.fullmatch, files):
            if _last_change(Path(folder, name)) < before:
                with suppress(OSError):
                    Path(folder, name).unlink()
        folders[:] = [name for name in folders if not name.startswith(".") or name == CLAIMS]


def _last_change(path: Path) -> float:
    """When a file, or anything in a folder, last changed, in seconds since the epoch; infinite if it is gone."""
    times = []
    with suppress(OSError):
        times = [file.stat().st_mtime for file in (path, *(path.iterdir() if path.is_dir() else ()))]
    return max(times, default=float("inf"))
