"""The exception and the warning that a user reads, what the exit codes mean, and how a command ends."""

import errno
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

EXIT_FAILED, EXIT_USER_ERROR, EXIT_SOME_FAILED, EXIT_NO_READER = 1, 2, 3, 141
"""A fault; unusable input; everything was tried, and some cells are not ok; and: nobody reads the output any more, as
with `| head`."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which there is no room: the disk, the quota, or the limit on a file's size."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to type instead.

    `python -m kvbench` prints it and exits with code 2.
    """


class SkippedFile(UserWarning):
    """A file that cannot be used and is left out. The message names the file and says what is wrong with it."""


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns. Output that nobody can read costs nothing that was measured."""
    _prepare_output()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        code = EXIT_NO_READER
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        print(f"kvbench: the output cannot be written ({error.strerror})", file=sys.stderr)
        _discard_output()
        code = EXIT_FAILED
    sys.exit(code)


def _prepare_output() -> None:
    """Replace a closed stdout or stderr, print `?` for what its encoding lacks, and show warnings in one line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif name == "stdout" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    standard = warnings.formatwarning

    def one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, SkippedFile):
            return f"kvbench: warning: {message}\n"
        return standard(message, category, filename, lineno, line)

    warnings.formatwarning = one_line


def _discard_output() -> None:
    """Send what the interpreter flushes at its end nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
