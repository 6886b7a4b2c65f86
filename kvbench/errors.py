"""The one exception that a user is meant to read, and what the exit codes mean."""

EXIT_USER_ERROR, EXIT_SOME_FAILED = 2, 3
"""Unusable input; and: everything was tried, and some cells are not ok."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to type instead.

    `python -m kvbench` prints it and exits with code 2.
    """
