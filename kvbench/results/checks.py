"""Reading the JSON files of a results folder. Each goes through one check; a damaged file is skipped with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import SkippedFile
from kvbench.files import parse_json

LONGEST_NAME = 200
"""Characters of a method's or a measure's name; a longer one fits no table, figure or file name."""
MOST_ROWS = 10**7
"""Rows of one run folder; a larger number is a damaged one."""

Check = Callable[[Any], bool]


def skip(file: Path, reason: object) -> None:
    """Warn that a file is left out, in one line."""
    warnings.warn(f"{str(file)!r} is skipped: {' '.join(str(reason).split())[:200]}", SkippedFile, stacklevel=3)


def read_object(file: Path, problem: Callable[[Mapping[str, Any]], str | None]) -> dict[str, Any] | None:
    """The JSON object in `file`; None where the file is absent, or, after a warning, where it cannot be used.

    problem: what is wrong with an object, None where nothing is.
    """
    try:
        content = parse_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        skip(file, f"it is no readable JSON object ({error})")
        return None
    if reason := problem(content):
        skip(file, reason)
        return None
    return content


def problem_of(content: Any, fields: Mapping[str, Check]) -> str | None:
    """The first field whose value is of a wrong kind, as `cells is 3`. None where all fit; a field may be absent."""
    if not isinstance(content, Mapping):
        return f"{str(content)[:40]!r} is no object"
    wrong = (name for name, fits in fields.items() if not fits(content.get(name)))
    return next((f"{name} is {str(content.get(name))[:40]!r}" for name in wrong), None)


def optional(check: Check) -> Check:
    """The check, and null too."""
    return lambda value: value is None or check(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def is_number(value: Any) -> bool:
    """A finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and value == value


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_row_count(value: Any) -> bool:
    return is_count(value) and value <= MOST_ROWS


def is_row_range(value: Any) -> bool:
    """[START, STOP]: numbers of rows."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_row_count, value)) and value[0] <= value[1]


def is_one_of(*choices: str) -> Check:
    return lambda value: isinstance(value, str) and value in choices
