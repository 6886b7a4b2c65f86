"""The base of every measure: its settings, its cells, what it needs, what it refuses, and how its numbers are shown.

A measure is a frozen dataclass: its fields are its settings, as `conf/measures/NAME.yaml` lists them, and `run` yields
rows. Nothing here imports torch, so help, planning and the report can ask a measure without loading any model library.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from kvbench.errors import UserError
from kvbench.results.headline import Headline
from kvbench.results.row import Row

if TYPE_CHECKING:
    from kvbench.cache.build import Method
    from kvbench.measures.context import MethodRun, RunContext
    from kvbench.measures.result import Result
    from kvbench.measures.target import Target
    from kvbench.measures.verification import Verification

LARGEST = 10_000_000
"""Default upper bound of a whole number among the settings."""

ENGAGED = (
    Headline("engaged", "engaged", "percent", rank=1, folds=True),
    Headline("kept_tokens", "kept", "count", rank=2, folds=True),
    Headline("positions_processed", "positions", "count", rank=3, folds=True),
)
"""Headlines that every measure with a cache shares."""


def setting(default: Any, lowest: float = 1, most: float = LARGEST) -> Any:
    """A field of a measure with its default and, for numbers, its bounds."""
    metadata = {"lowest": lowest, "most": most}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Measure:
    """What is measured of every method. Subclasses add settings as fields and override what differs.

    Class variables:
        name: of the measure in `measure=[...]`, in the rows and in the config.
        headlines: its main metrics, in the order of the table's columns.
        is_timed: results depend on the machine, so the resume key holds device, kernel and threads.
        compares_with_full: the full cache runs beside every method, also where its own cell is done.
        rates_quality: refuses methods that see the future, unless `knows_future`.
        knows_future: gives such methods the tokens to come.
        one_method_at_a_time: methods share no prefill; each is measured and written by itself.
        needs_words: refuses models with random weights, which have no tokenizer.
        draws: samples depend on the run's seed.
    """

    name: ClassVar[str]
    headlines: ClassVar[Sequence[Headline]] = ()
    is_timed: ClassVar[bool] = False
    compares_with_full: ClassVar[bool] = True
    rates_quality: ClassVar[bool] = True
    knows_future: ClassVar[bool] = False
    one_method_at_a_time: ClassVar[bool] = False
    needs_words: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    sizes: ClassVar[Sequence[str]] = ("context", "contexts", "lengths", "longest")
    """Settings that make a cell larger: cells that differ only in them are of one kind."""

    @property
    def size(self) -> int:
        """Tokens of the prompt, of the longest where there are several: what tells a cell from a larger one.

        The default is the setting `context`. It stands in the records of cells and in the rows' column `context`.
        """
        size: int = getattr(self, "context")  # noqa: B009  only some measures have this setting
        return size

    @property
    def task(self) -> str | None:
        """The task of a cell that asks one task only, for messages; None where there is no such thing."""
        return None

    def cells(self) -> Sequence[Self]:
        """The same measure in pieces that are measured, recorded and resumed one by one."""
        return [self]

    def summaries(self) -> Sequence[Self]:
        """Pieces that are computed from the rows of the cells, such as a slope over contexts."""
        return []

    def summarises(self, cell: Measure) -> bool:
        """Whether this summary is computed from the rows of `cell`."""
        return False

    def summarise(self, method: MethodRun, rows: Sequence[Row]) -> list[Row]:
        """The rows of a summary from one method's rows of the cells; [] where they are too few."""
        return []

    def prompts(self) -> Sequence[int]:
        """Lengths of prompts that methods compress; budgets are checked against them."""
        return [self.size]

    def needed_tokens(self) -> tuple[str, int] | None:
        """The setting to name in an error, and the tokens of text and positions that the measure needs."""
        return f"{self.name}.context", self.size

    def sample_limit(self, lengths: Sequence[int]) -> tuple[str, int, int] | None:
        """The setting to name, the samples asked for, and the most that do not share scored tokens; None: no limit.

        lengths: tokens of each text.
        """
        return None

    def may_exceed_positions(self) -> bool:
        """Whether a text longer than the model's positions is measured with a note instead of refused."""
        return False

    def scored_spans(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """First token and the one after the last of every scored stretch; calibration avoids them.

        lengths: tokens of each text; positions count through them all.
        """
        return []

    def beside(self, methods: Sequence[MethodRun], everyone: Sequence[MethodRun]) -> list[MethodRun]:
        """Which of a run's methods must run beside the ones to measure, in the run's order: those may be among them."""
        return [one for one in everyone if one.is_baseline and self.compares_with_full]

    def refuse(self, method: Method) -> None:
        """Raise UserError for a method that cannot be measured."""

    def prepare(self, target: Target) -> Any:
        """What `run` finds in `context.prepared`: made and checked before weights are loaded. Raises UserError."""
        return None

    def data_fingerprint(self, text: str) -> str:
        """What identifies the data in the resume key; `text` is the fingerprint of the run's text."""
        return text

    def run(self, context: RunContext) -> Iterator[Result]:
        """Measure every method of the context. Each Result is complete: its rows can be written."""
        raise NotImplementedError(f"{type(self).__name__} has no `run`")

    def verification(self) -> Verification | None:
        """How recorded samples of one cell are checked and measured again; None: the measure records none, or its
        numbers cannot be measured again."""
        return None

    def settings(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def kind(self) -> dict[str, Any]:
        """The settings without its sizes: what larger and smaller cells have in common."""
        return {key: value for key, value in self.settings().items() if key not in self.sizes}


def read_measure(name: str, node: Mapping[str, Any]) -> Measure:
    """The measure of a config node with `_target_` and settings.

    Raises UserError, naming the key, where the class cannot be found or a value cannot be used.
    """
    kind = measure_class(name, node.get("_target_"))
    hints = typing.get_type_hints(kind)
    known = {setting.name: setting for setting in fields(kind)}
    given = {str(key): value for key, value in node.items() if key != "_target_"}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{name}.{unknown[0]} is no setting; choose from {', '.join(known)}")
    missing = [key for key, one in known.items() if key not in given and _has_no_default(one)]
    if missing:
        raise UserError(f"{name}.{missing[0]} is missing; type {name}.{missing[0]}=VALUE")
    checked = {
        key: checked_value(f"{name}.{key}", value, hints[key], known[key].metadata) for key, value in given.items()
    }
    return kind(**checked)


def measure_class(name: str, target: Any) -> type[Measure]:
    """The class that `_target_` names. Raises UserError where there is none, or it is no Measure."""
    where = f"conf/measures/{name}.yaml"
    if not isinstance(target, str) or "." not in target:
        raise UserError(f"measure {name} has no _target_; {where} must name a class, as kvbench.measures.memory.Memory")
    module, _, cls = target.rpartition(".")
    try:
        found = getattr(import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise UserError(f"measure {name}: {target} cannot be imported ({error}); check _target_ in {where}") from error
    if not (isinstance(found, type) and issubclass(found, Measure)):
        raise UserError(f"measure {name}: {target} is not a subclass of kvbench.Measure; check _target_ in {where}")
    if getattr(found, "name", None) != name:
        raise UserError(f"measure {name}: {target} says name = {getattr(found, 'name', None)!r}; both must be {name!r}")
    return found


def _has_no_default(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def checked_value(key: str, value: Any, hint: Any, bounds: Mapping[str, Any]) -> Any:
    """A setting's value where it fits the field's type. Raises UserError, one line, where it does not."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise UserError(f"{key}={value} is unknown; type {' or '.join(f'{key}={choice}' for choice in choices)}")
        return value
    if typing.get_origin(hint) is list:
        items = list(value) if isinstance(value, list | tuple) else [value]
        if not items:
            raise UserError(f"{key}=[] lists nothing; type at least one value")
        # A value given twice would be measured twice and counted as two.
        return list(dict.fromkeys(checked_value(key, item, typing.get_args(hint)[0], bounds) for item in items))
    if hint is str or hint == str | None:
        if not (isinstance(value, str) and value.strip()) and not (value is None and hint is not str):
            raise UserError(f"{key}={value} is no name; type {key}=NAME")
        return value
    if hint == int | None or hint == float | None:
        if value is None:
            return None
        hint = int if hint == int | None else float
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"{key}={value} is not true or false")
        return value
    if hint is float:
        return _number(key, value, bounds)
    return _whole(key, value, bounds)


def _number(key: str, value: Any, bounds: Mapping[str, Any]) -> float:
    lowest, most = bounds.get("lowest", 0), bounds.get("most", 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= most:
        raise UserError(
            f"{key}={value} is not a number from {lowest:g} to {most:g}; type {key}={lowest:g}, for example"
        )
    return float(value)


def _whole(key: str, value: Any, bounds: Mapping[str, Any]) -> int:
    lowest, most = bounds.get("lowest", 1), bounds.get("most", LARGEST)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{key}={value} is not a whole number of at least {lowest}; type {key}=16, for example")
    if value > most:
        raise UserError(f"{key}={value} is above the largest value, {most}; type {key}={most} or less")
    return value
