"""Code widths that differ by layer: {0: 8, 1: 8, rest: 4}."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.errors import UserError

EXAMPLE = "{0:8,1:8,rest:4}"


@dataclass(frozen=True)
class LayerBits:
    """The width of a code in each layer. of: for single layers, as the model counts them; rest: for all others."""

    of: tuple[tuple[int, int], ...]
    rest: int

    def at(self, layer: int) -> int:
        """The width in one layer."""
        return dict(self.of).get(layer, self.rest)

    @property
    def all(self) -> tuple[int, ...]:
        """Every width that is named."""
        return (*(bits for _, bits in self.of), self.rest)


Bits = int | LayerBits
"""One width for all layers, or one for each."""


def layer_bits(knob: str, given: object) -> Bits:
    """A width, or a mapping of layers and `rest` to widths, as a store's field holds it.

    Raises UserError, which names `knob`, for a mapping that is no such thing. Widths are checked elsewhere.
    """
    if not isinstance(given, Mapping):
        return given  # type: ignore[return-value]  # a wrong width is refused with the widths of the store
    names = {str(key): bits for key, bits in given.items()}
    if "rest" not in names or not all(key == "rest" or key.isdecimal() for key in names):
        written = "{" + ",".join(f"{key}:{bits}" for key, bits in names.items()) + "}"
        raise UserError(f"{knob}={written} is no width for each layer; type layers and rest, as {knob}='{EXAMPLE}'")
    rest = names.pop("rest")
    return LayerBits(tuple(sorted((int(key), bits) for key, bits in names.items())), rest)


def widths_of(*bits: Bits) -> tuple[int, ...]:
    """Every width that is named."""
    return tuple(width for one in bits for width in (one.all if isinstance(one, LayerBits) else (one,)))


def at_layer(bits: Bits, layer: int) -> int:
    """The width in one layer."""
    return bits.at(layer) if isinstance(bits, LayerBits) else bits


def one_width(knob: str, bits: Bits) -> int:
    """The width, of a store that has been taken for one layer. Raises TypeError for any other."""
    if isinstance(bits, LayerBits):
        raise TypeError(f"{knob} differs by layer: take the store of one layer first (`at_layer`)")
    return bits
