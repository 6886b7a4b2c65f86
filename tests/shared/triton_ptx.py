"""The PTX instructions of the Triton kernels, in numpy."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
from triton.runtime import interpreter


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for row in range(8):
        here = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        out |= np.where(table >> row & 1, here, 0)
    return out


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    a, b, c = (np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in (a, b, c))
    return (a * b + c).astype(np.float16).view(np.uint32)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return fma(a, b, np.zeros_like(a))


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both, out = a.astype(np.uint64) | b.astype(np.uint64) << 32, np.zeros_like(a)
    for byte in range(4):
        shift = (selector >> 4 * byte & 7).astype(np.uint64) * 8
        out |= (both >> shift & 255).astype(np.uint32) << 8 * byte
    return out


class PtxInNumpy:
    """Inline PTX as its manual defines it, on arrays of uint32."""

    INSTRUCTIONS: ClassVar = {
        "lop3.b32": lop3,
        "fma.rn.f16x2": fma,
        "mul.rn.f16x2": multiply,
        "prmt.b32": prmt,
        "and.b32": np.bitwise_and,
        "shr.b32": np.right_shift,
    }

    def __init__(self) -> None:
        self.ran: set[str] = set()

    def __call__(self, text: str, constraints: str, values: list, types: list, pure: bool, pack: int) -> PtxInNumpy:
        shape = np.broadcast_shapes(*(value.data.shape for value in values))
        names = {f"${i + 1}": np.broadcast_to(v.data.astype(np.uint32), shape) for i, v in enumerate(values)}
        for name, operands in re.findall(r"([a-z]\w*\.[\w.]+) ([^;]+);", re.sub(r"\.reg [^;]+;", "", text)):
            to, *sources = [operand.strip() for operand in operands.split(",")]
            read = [names[s] if s in names else np.full(shape, int(s, 16), np.uint32) for s in sources]
            names[to] = self.INSTRUCTIONS[name](*read)
            self.ran.add(name)
        self.result = interpreter.TensorHandle(names["$0"], types[0].scalar)
        return self

    def get_result(self, index: int) -> interpreter.TensorHandle:
        return self.result
