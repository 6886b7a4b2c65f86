"""Settings of keep rules: a field says once which values it takes and which tokens it protects from eviction."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeGuard

from kvbench.errors import UserError

End = Literal["first", "last"]
"""Which end of the text a setting counts tokens from."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a setting's value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Whole:
    """A setting that takes whole numbers of `least` or more, or odd ones only.

    knob: what a user types to set it; "" where that is the field's own name. protects: "first" or "last" where the
    value is a number of first or last tokens that are never evicted.
    """

    least: int
    odd: bool = False
    knob: str = ""
    protects: End | None = None

    def fault(self, value: object, default: object, knob: str) -> str | None:
        """What to type instead of `value`; None where `value` is allowed. None is allowed where it is the default."""
        if (value is None and default is None) or (
            is_whole(value) and value >= self.least and (value % 2 or not self.odd)
        ):
            return None
        kind, example = "an odd number" if self.odd else "a whole number", self.least if default is None else default
        return f"type {kind} of {self.least} or more, for example {knob}={example}"


@dataclass(frozen=True)
class Choice:
    """A setting that takes one of a few words. knob: as in `Whole`."""

    choices: tuple[str, ...]
    knob: str

    def fault(self, value: object, default: object, knob: str) -> str | None:
        """What to type instead of `value`; None where `value` is allowed."""
        *others, last = self.choices
        return None if value in self.choices else f"type {knob}={', '.join(others)} or {last}"


@dataclass(frozen=True)
class Share:
    """A setting that takes numbers from 0 to 1. knob: as in `Whole`."""

    knob: str = ""

    def fault(self, value: object, default: object, knob: str) -> str | None:
        """What to type instead of `value`; None where `value` is allowed."""
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
        return None if fits else f"type a number from 0 to 1, for example {knob}={default}"


def whole(default: int | None, *, least: int, odd: bool = False, knob: str = "", protects: End | None = None) -> Any:
    """A dataclass field that takes whole numbers; see `Whole`. With a default of None it takes None as well."""
    return field(default=default, metadata={"setting": Whole(least, odd, knob, protects)})


def choice(*choices: str, knob: str = "") -> Any:
    """A dataclass field that takes one of these words; the first is its default."""
    return field(default=choices[0], metadata={"setting": Choice(choices, knob)})


def share(default: float, *, knob: str = "") -> Any:
    """A dataclass field that takes numbers from 0 to 1."""
    return field(default=default, metadata={"setting": Share(knob)})


def check_settings(rule: Any, name: str) -> None:
    """Raise UserError for the first field of the rule, a dataclass, whose value its setting does not allow."""
    for each in fields(rule):
        setting, value = each.metadata.get("setting"), getattr(rule, each.name)
        if setting is not None:
            knob = setting.knob or each.name
            if (instead := setting.fault(value, each.default, knob)) is not None:
                raise UserError(f"{knob}={value} for {name}; {instead}")


def protected_counts(rule: Any, end: End) -> dict[str, int]:
    """Numbers of tokens at that end that the rule's settings protect, by field; those that are None are left out."""
    settings = {each.name: each.metadata.get("setting") for each in fields(rule)}
    counting = [name for name, setting in settings.items() if isinstance(setting, Whole) and setting.protects == end]
    return {name: getattr(rule, name) for name in counting if getattr(rule, name) is not None}


def check_budget(budget: object) -> None:
    """Raise UserError unless `budget` is an integer >= 1 or a number strictly between 0 and 1."""
    if (is_whole(budget) and budget >= 1) or (isinstance(budget, float) and 0 < budget < 1):
        return
    raise UserError(
        f"budget={budget} is not a budget; type a whole number of tokens (budget=256) "
        f"or a share of the prompt strictly between 0 and 1 (budget=0.25)"
    )
