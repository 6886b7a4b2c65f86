"""Running a function in a fresh subprocess, whose memory holds nothing of what ran before."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments), both picklable, in a new process.

    It is forked from a server that has imported the function's module and run nothing: the seconds that importing
    torch takes are spent once. Raises MemoryError where the process was killed, as the system does when memory runs
    out, and RuntimeError where it ended in another way without a result.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([function.__module__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, os.getcwd(), function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        result: T = here.recv()
        return result
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            raise MemoryError("its process was killed, as the system does when memory runs out") from None
        raise RuntimeError(f"its process ended without a result, exit code {process.exitcode}") from None
    finally:
        process.kill()  # where the caller is interrupted; it has nothing more to say otherwise
        process.join()
        here.close()


def can_have_children() -> bool:
    """Whether this process may start others: a daemonic worker may not."""
    return not multiprocessing.current_process().daemon


def _run(answer: Connection, folder: str, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the caller's, who kills this process
    os.chdir(folder)
    answer.send(function(*arguments))
    answer.close()
