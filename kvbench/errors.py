"""The one exception that a user is meant to read."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to type instead.

    `python -m kvbench` prints it and exits with code 2.
    """
