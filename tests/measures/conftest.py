"""What every test of a measure runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shared.text import light


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread, and a garbage collector that does not look at imported modules."""
    with light():
        yield
