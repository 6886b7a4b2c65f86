"""What the small commands share whose words belong to the config: help, folders of one's own, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from kvbench.config.error_lines import one_line
from kvbench.config.sources import BUILT_IN, ConfigSources, take_sources
from kvbench.errors import EXIT_USER_ERROR, UserError


def run_command(arguments: Sequence[str] | None, usage: str, work: Callable[[ConfigSources, list[str]], int]) -> int:
    """`work` with the sources that the words name and the words left; returns its exit code, or that of unusable input.

    arguments: None for those of the process. usage: printed where help is asked for, or nothing is given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or any(word in ("-h", "--help", "help") for word in words):
        print(usage)
        return 0 if words else EXIT_USER_ERROR
    sources = BUILT_IN
    try:
        sources, rest = take_sources(words)
        return work(sources, rest)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench: {one_line(error, sources)}", file=sys.stderr)
        return EXIT_USER_ERROR
