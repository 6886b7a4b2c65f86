"""Progress bars on a terminal; one line a phase where the output goes to a file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SHOW_AFTER_S = 5


class Progress:
    """`with progress.phase("perplexity", 512) as advance: ... advance()`."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet

    def say(self, line: str) -> None:
        """Print one line to stderr, unless quiet."""
        if not self.quiet:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, steps: int) -> "Iterator[Advance]":
        """A bar of `steps`, shown after 5 s; without a terminal, one line with the seconds it took."""
        interactive = self.console.is_terminal and not self.quiet
        if not interactive:
            started = time.monotonic()
            yield Advance(None)
            self.say(f"{name}: {time.monotonic() - started:.1f} s")
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self.console, transient=True) as bars:
            yield Advance(bars, bars.add_task(name, total=steps, visible=False), time.monotonic() + SHOW_AFTER_S)


class Advance:
    """Advances one bar by a number of steps; does nothing without a bar."""

    def __init__(self, bars: RichProgress | None, task: int = 0, show_at: float = 0.0) -> None:
        self.bars, self.task, self.show_at = bars, task, show_at

    def __call__(self, steps: int = 1) -> None:
        if self.bars is not None:
            self.bars.update(self.task, advance=steps, visible=time.monotonic() >= self.show_at)  # type: ignore[arg-type]
