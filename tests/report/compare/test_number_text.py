"""Numbers as text."""

from __future__ import annotations

from kvbench.report.compare import number_text


def test_units() -> None:
    assert [number_text.significant(value) for value in (0, 1234.5, 22.31, 0.01234, float("inf"))] == [
        "0",
        "1,234",
        "22.3",
        "0.0123",
        "inf",
    ]
    assert [number_text.percent(value) for value in (1, 0.9999, 0.0001, 0, 0.5)] == [
        "100%",
        ">99.9%",
        "<0.1%",
        "0%",
        "50.0%",
    ]
    assert [number_text.signed(value) for value in (0.0123, -2.6e-5, 0)] == ["+0.0123", "-2.6e-05", "0"]
    bounds = ((0.1, 0.17), (-0.005, 0.008), (0.0, 2e-6), (None, None))
    assert [number_text.within(number_text.signed, low, high)(0.00152) for low, high in bounds] == [
        "+0.002",
        "+0.0015",
        "+0.00152",
        "+0.00152",
    ]
    assert [number_text.fixed_text(value, 2) for value in (24.014, 17165.3, 1e12)] == ["24.01", "17,165", "1.00e+12"]
    assert [number_text.significant(value) for value in (1e-12, 2.5e20)] == ["1.00e-12", "2.50e+20"]
    assert number_text.in_bytes([2**20, 3 * 2**30])[0] == "GiB"
    assert number_text.in_bytes([])[0] == "B"
