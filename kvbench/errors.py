"""The one exception that a user is meant to read, what the exit codes mean, and how a command ends."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_USER_ERROR, EXIT_SOME_FAILED, EXIT_NO_READER = 2, 3, 141
"""Unusable input; everything was tried, and some cells are not ok; and: what read the output has gone, as `| head`."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to type instead.

    `python -m kvbench` prints it and exits with code 2.
    """


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
        code = EXIT_NO_READER
    sys.exit(code)
