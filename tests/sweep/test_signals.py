"""Signals end a run between two writes, never within one."""

from __future__ import annotations

import os
import signal

import pytest

from kvbench.sweep.signals import Terminated, stoppable


def test_a_signal_waits_until_what_is_being_written_is_written() -> None:
    done = []
    with pytest.raises(Terminated), stoppable() as stops:
        with stops.held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")
        done.append("not reached")
    assert done == ["written"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    with pytest.raises(SystemExit), stoppable() as stops:
        try:
            raise SystemExit
        finally:
            stops.ending = True
            with stops.held_back():
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_launchers_signal_ends_the_run_even_where_errors_are_caught() -> None:
    def timed_out(number: int, frame: object) -> None:
        raise RuntimeError("Job not requeued because: timed-out too many times")

    before = signal.signal(signal.SIGUSR2, timed_out)
    try:
        with pytest.raises(Terminated, match="timed-out"), stoppable():
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
            except Exception:
                pytest.fail("a cell would have taken it for its own failure")
    finally:
        signal.signal(signal.SIGUSR2, before)
