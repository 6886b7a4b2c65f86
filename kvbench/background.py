"""An action that is repeated while a block of work runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(action: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call `action` every `seconds`, on its own thread, while the block runs.

    An action that returns True is not called again. The thread has ended when the block is left.
    """
    done = threading.Event()

    def loop() -> None:
        while not done.wait(seconds):
            if action() is True:
                return

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
