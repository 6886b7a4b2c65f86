"""Stores of many shapes for the Triton kernels, and the comparison with the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.codebook import CodedRows
from kvbench.cache.groups import Groups
from kvbench.cache.store import SlotShape
from kvbench.kernels import reference
from kvbench.kernels.options import NO_OPTIONS, AttendOptions
from kvbench.kernels.parts import Dense, Packed, Part
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_decode import TritonKernel
from kvbench.methods.kivi import Kivi, KiviSlots

Parts = tuple[list[Part], list[Part]]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}
"""Largest error of an output, in shares of the largest output; rounding that to bfloat16 alone costs up to 2e-3."""

PROBABILITY_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""The same for probabilities: packed keys are read as float16 unless queries are float32."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def packed(rows: Tensor, axis: str, bits: int, group: int) -> list[Part]:
    batch, heads, n, width = rows.shape
    groups = Groups(axis, bits, group, n, width, SlotShape(batch, heads, width, width, n, 1, rows.dtype, rows.device))
    groups.append(rows)
    return list(groups.parts())


def kivi_slots(
    key: Tensor, value: Tensor, bits: tuple[int, int], group: int, residual: int, capacity: int
) -> KiviSlots:
    """KIVI's store after a prefill of all but the last three tokens and those three one by one."""
    batch, heads, n, width = key.shape
    shape = SlotShape(batch, heads, width, value.shape[3], capacity, 1, key.dtype, key.device)
    slots = Kivi(bits[0], bits[1], group, residual).allocate(shape)
    for buffer in slots.buffers(0):
        buffer.tensor.fill_(255 if buffer.tensor.dtype == torch.uint8 else float("nan"))  # to be caught if it is read
    slots.fill(key[:, :, : n - 3], value[:, :, : n - 3])
    for token in range(n - 3, n):
        slots.settle()
        slots.append(key[:, :, token : token + 1], value[:, :, token : token + 1])
    return slots


def kivi(key: Tensor, value: Tensor, bits: tuple[int, int] = (4, 4), group: int = 32, residual: int = 64) -> Parts:
    slots = kivi_slots(key, value, bits, group, residual, key.shape[2] + 5)
    return list(slots.key_parts()), list(slots.value_parts())


def per_token(key: Tensor, value: Tensor, bits: tuple[int, int] = (4, 4), group: int = 32) -> Parts:
    return packed(key, "channel", bits[0], group), packed(value, "channel", bits[1], group)


def coded_rows(rows: Tensor, bits: int, capacity: int) -> CodedRows:
    """The rows as codes of a codebook, in buffers of which the rest is to be caught if it is read."""
    (batch, heads), width = rows.shape[:2], rows.shape[3]
    held = CodedRows(bits, width, SlotShape(batch, heads, width, width, capacity, 1, rows.dtype, rows.device))
    held.codes.fill_(255), held.norm.fill_(torch.nan)
    held.append(rows)
    return held


def coded(key: Tensor, value: Tensor, bits: tuple[int, int] = (4, 4)) -> Parts:
    key_rows, value_rows = (coded_rows(rows, b, rows.shape[2] + 5) for rows, b in zip((key, value), bits, strict=True))
    return key_rows.parts(), value_rows.parts()


def whole_coded(key: Tensor, value: Tensor, bits: int, capacity: int) -> tuple[Parts, Tensor]:
    """A codebook's rows as whole buffers, and the three lengths."""
    n = key.shape[2]
    parts: Parts = [coded_rows(key, bits, capacity).whole()], [coded_rows(value, bits, capacity).whole()]
    return parts, torch.tensor([n, n, n], dtype=torch.int32, device=key.device)


def dense(key: Tensor, value: Tensor) -> Parts:
    return [Dense(key)], [Dense(value)]


def store(kind: str, key: Tensor, value: Tensor, bits: int = 4, group: int = 32) -> Parts:
    """A store by name."""
    split = key.shape[2] // 64 * 32
    if kind == "kivi":
        return kivi(key, value, (bits, bits), group)
    if kind == "per token":
        return per_token(key, value, (bits, bits), group)
    if kind == "codebook":
        return coded(key, value, (bits, bits))
    if kind == "only keys packed":
        return [*packed(key[:, :, :split], "token", bits, group), Dense(key[:, :, split:])], [Dense(value)]
    if kind == "only values packed":
        return [Dense(key)], [*packed(value[:, :, :split], "channel", bits, group), Dense(value[:, :, split:])]
    return dense(key, value)


def whole_kivi(slots: KiviSlots) -> tuple[Parts, Tensor]:
    """The store's parts as whole buffers, and the three lengths."""
    keys, values = slots.keys.groups, slots.values.groups
    parts: Parts = (
        [
            Packed(keys.codes, keys.scale, keys.minimum, keys.bits, keys.group_size, keys.axis),
            Dense(slots.keys.residual),
        ],
        [
            Packed(values.codes, values.scale, values.minimum, values.bits, values.group_size, values.axis),
            Dense(slots.values.residual, is_ring=True),
        ],
    )
    lengths = torch.tensor([keys.length, values.length, slots.length], dtype=torch.int32, device=keys.codes.device)
    return parts, lengths


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, in shares of the largest expected number."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


def errors(
    query: Tensor, parts: Parts, scoring: Scoring | None = None, options: AttendOptions = NO_OPTIONS
) -> tuple[float, float]:
    """Errors of output and probabilities against the reference, which gets the queries in float32."""
    scoring = scoring or Scoring(query.shape[3] ** -0.5)
    got, probabilities = TritonKernel().attend(query, *parts, scoring, options)
    exact = options if options.sink_query is None else replace(options, sink_query=options.sink_query.float())
    want, expected = reference.attend(query.float(), *parts, scoring, exact)
    assert got.dtype == query.dtype and got.shape == want.shape
    assert probabilities is not None and probabilities.shape == expected.shape
    assert probabilities.dtype == torch.float32
    return error(got, want), error(probabilities, expected)


def check(query: Tensor, parts: Parts, scoring: Scoring | None = None, options: AttendOptions = NO_OPTIONS) -> None:
    output, probabilities = errors(query, parts, scoring, options)
    assert output <= TOLERANCE[query.dtype]
    assert probabilities <= PROBABILITY_TOLERANCE[query.dtype]
