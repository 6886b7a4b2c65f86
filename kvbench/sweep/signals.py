"""Signals that end a run: SIGTERM (preemption, scancel), Ctrl-C, and a launcher's own signal before the time is up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, or a launcher that ends the job: finished cells are kept, the others are marked interrupted."""


class Stops:
    """Delays signals while files are written. Once `ending` is set, later signals are ignored."""

    def __init__(self) -> None:
        self.ending = False
        self._held = False
        self._pending: Callable[[], None] | None = None

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A block that no signal interrupts; a signal that arrives meanwhile takes effect at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            pending, self._pending = self._pending, None
        if pending is not None and not self.ending:
            pending()

    def handler(self, act: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        """A signal handler that acts now, or after the block that holds signals back."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.ending:
                return
            if self._held:
                self._pending = lambda: act(number, frame)
            else:
                act(number, frame)

        return handle


def terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[Stops]:
    """SIGTERM raises Terminated and SIGINT KeyboardInterrupt inside the block, neither in the middle of a write.

    A launcher's handler on SIGUSR2 (submitit requeues a job whose time is up) is kept; an exception of that handler
    becomes Terminated, which `except Exception` does not catch. Outside the main thread signals stay as they are.
    """
    stops = Stops()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    wanted: dict[int, Callable[[int, FrameType | None], Any]] = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    launchers = signal.getsignal(signal.SIGUSR2)
    if callable(launchers):
        wanted[signal.SIGUSR2] = _final(stops, launchers)
    before = {number: signal.signal(number, stops.handler(act)) for number, act in wanted.items()}
    try:
        yield stops
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _final(stops: Stops, act: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            with stops.held_back():  # Slurm sends SIGTERM while it is still answering a request to requeue
                act(number, frame)
        except Exception as error:
            raise Terminated(str(error)) from error

    return handle
