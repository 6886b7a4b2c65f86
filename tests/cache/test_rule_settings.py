"""Settings of keep rules: which values a field takes, and the line that refuses others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import choice, protected_counts, whole
from kvbench.errors import UserError


@dataclass(frozen=True)
class Rule(KeepRule):
    """One setting of each kind."""

    n_sink: int = whole(4, least=0, knob="sinks", protects="first")
    recent: int | None = whole(None, least=2, protects="last")
    pool: int = whole(7, least=1, odd=True)
    variant: str = choice("sum", "mean", "max")


def test_defaults_are_the_declared_ones() -> None:
    rule = Rule(99)
    assert (rule.n_sink, rule.recent, rule.pool, rule.variant) == (4, None, 7, "sum")


@pytest.mark.parametrize(
    "settings", [{"n_sink": 0}, {"recent": 2}, {"recent": None}, {"pool": 1}, {"variant": "max"}, {"protect_last": 0}]
)
def test_allowed_values(settings: dict[str, object]) -> None:
    assert Rule(99, **settings).budget == 99


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"n_sink": -1}, "sinks=-1 for Rule; type a whole number of 0 or more, for example sinks=4"),
        ({"n_sink": True}, "sinks=True for Rule; type a whole number of 0 or more, for example sinks=4"),
        ({"n_sink": 1.0}, "sinks=1.0 for Rule; type a whole number of 0 or more, for example sinks=4"),
        ({"n_sink": "4"}, "sinks=4 for Rule; type a whole number of 0 or more, for example sinks=4"),
        ({"n_sink": None}, "sinks=None for Rule; type a whole number of 0 or more, for example sinks=4"),
        ({"recent": 1}, "recent=1 for Rule; type a whole number of 2 or more, for example recent=2"),
        ({"pool": 4}, "pool=4 for Rule; type an odd number of 1 or more, for example pool=7"),
        ({"pool": -1}, "pool=-1 for Rule; type an odd number of 1 or more, for example pool=7"),
        ({"variant": "median"}, "variant=median for Rule; type variant=sum, mean or max"),
        ({"variant": ["sum"]}, "variant=['sum'] for Rule; type variant=sum, mean or max"),
        (
            {"protect_first": -1},
            "protect_first=-1 for Rule; type a whole number of 0 or more, for example protect_first=0",
        ),
        (
            {"protect_last": 1.5},
            "protect_last=1.5 for Rule; type a whole number of 0 or more, for example protect_last=0",
        ),
    ],
)
def test_refused_values(settings: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as error:
        Rule(99, **settings)
    assert str(error.value) == line


def test_protected_counts_leave_out_settings_that_are_none() -> None:
    assert protected_counts(Rule(99), "first") == {"n_sink": 4}
    assert protected_counts(Rule(99, recent=3, protect_last=5), "last") == {"protect_last": 5, "recent": 3}
