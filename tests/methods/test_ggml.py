"""llama.cpp's block types against the quantiser of the gguf package, byte for byte, and what attention reads."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from kvbench.cache.bytes import held_bytes
from kvbench.cache.store import SlotShape
from kvbench.errors import UserError
from kvbench.kernels import REFERENCE, choose
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Packed, read_all
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_pieces import refused
from kvbench.methods.ggml import Ggml
from tests.shared.reference import attention_matrix, attention_output

CPU = torch.device("cpu")
NAMES = ("q8_0", "q4_0", "q4_1")
BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def rows(tokens: int, dim: int, seed: int = 0, lead: tuple[int, int] = (2, 2)) -> Tensor:
    """Numbers of all sizes, and a channel far outside."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*lead, tokens, dim, generator=draw) * torch.randn(*lead, tokens, 1, generator=draw).exp()
    drawn[..., 3] += 20
    return drawn


def hard_blocks() -> Tensor:
    """Blocks [1, 1, n, 32] with ties, halves, zeros and tiny numbers."""
    draw = torch.Generator().manual_seed(7)
    halves = torch.randint(-254, 255, (40, 32), generator=draw) / 2.0
    halves[:, 0] = 127.0  # a scale of 1: the other numbers lie on halves of codes
    ties = torch.randint(-3, 4, (40, 32), generator=draw).float()
    eighths = torch.randint(-16, 17, (40, 32), generator=draw) / 2.0
    eighths[:, 5] = -8.0
    constant = torch.full((1, 32), 0.7)
    tiny = torch.randn(20, 32, generator=draw) * torch.logspace(-12, -4, 20)[:, None]
    return torch.cat([halves, ties, eighths, constant, -constant, torch.zeros(1, 32), tiny])[None, None]


def as_ggml(part: Packed, name: str) -> bytes:
    """A part's blocks as ggml lays them out: scale, minimum, codes."""
    codes = part.codes.numpy() ^ (0x80 if name == "q8_0" else 0)
    pairs = [part.scale] if part.minimum is None else [part.scale, part.minimum]
    fields = [pair.contiguous().numpy()[..., None].view(np.uint8) for pair in pairs]
    return np.concatenate([*fields, codes], axis=-1).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_are_those_of_gguf_byte_for_byte(name: str) -> None:
    kind = GGMLQuantizationType[name.upper()]
    drawn = rows(50, 64), rows(50, 96, 1)
    for key, value in (drawn, (drawn[0].bfloat16(), drawn[1].bfloat16()), (hard_blocks(), hard_blocks())):
        batch, heads, n, width = key.shape
        shape = SlotShape(batch, heads, width, value.shape[-1], n, 1, key.dtype, CPU)
        slots = Ggml(name, name).allocate(shape)
        slots.fill(key, value)
        for parts, exact in ((slots.key_parts(), key), (slots.value_parts(), value)):
            (part,) = parts
            assert isinstance(part, Packed)
            want = quants.quantize(exact.float().numpy(), kind)
            assert as_ggml(part, name) == want.tobytes()
            read = torch.from_numpy(quants.dequantize(want, kind))
            torch.testing.assert_close(read_all(parts, torch.float32), read, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_an_overwritten_slot_holds_the_new_token(name: str) -> None:
    kind, key, new = GGMLQuantizationType[name.upper()], rows(9, 32), rows(2, 32, 5)
    slots = Ggml(name, name).allocate(SlotShape(2, 2, 32, 32, 12, 1, torch.float32, CPU))
    slots.append(key, key)
    slot = torch.tensor([[[3, 8], [0, 1]], [[7, 2], [4, 3]]])
    slots.overwrite(slot, new, new)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        key[b, h, slot[b, h]] = new[b, h]
    want = torch.from_numpy(quants.dequantize(quants.quantize(key.numpy(), kind), kind))
    torch.testing.assert_close(read_all(slots.key_parts(), torch.float32), want, rtol=1e-6, atol=1e-7)


def sylvester(size: int) -> Tensor:
    """Entry (i, j): -1 to the number of ones that i and j share in binary, over sqrt(size)."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize(("dim", "key_block"), [(64, 64), (128, 128), (192, 64)])
def test_rotated_rows_are_those_of_llama_cpp_s_matrices(dim: int, key_block: int) -> None:
    """Keys by the largest power of two from 64 on that divides the head, values by 64; attention is of these rows."""
    key, value, query = rows(20, dim), rows(20, dim, 1), rows(1, dim, 2, (2, 4))
    slots = Ggml("q8_0", "q4_1", rotate=True).allocate(SlotShape(2, 2, dim, dim, 20, 1, torch.float32, CPU))
    slots.fill(key, value)
    held = []
    for exact, block, name in ((key, key_block, "q8_0"), (value, 64, "q4_1")):
        matrix, kind = torch.block_diag(*[sylvester(block)] * (dim // block)), GGMLQuantizationType[name.upper()]
        turned = (exact.double() @ matrix).float()
        held.append(torch.from_numpy(quants.dequantize(quants.quantize(turned.numpy(), kind), kind)).double() @ matrix)
        got = read_all(slots.key_parts() if name == "q8_0" else slots.value_parts(), torch.float64)
        # A sum in float32 may turn a code: by one step.
        step = turned.abs().amax() / (127 if name == "q8_0" else 7)
        assert (got @ matrix - held[-1]).abs().max() < 1.01 * step * block**0.5
        assert ((got @ matrix - held[-1]).abs().amax(-1) > 1e-4).double().mean() < 0.05
    options, scoring = AttendOptions(), Scoring(dim**-0.5, None, None, None)
    output, _ = REFERENCE.attend(slots.transform_query(query), slots.key_parts(), slots.value_parts(), scoring, options)
    seen = torch.ones(1, 20, dtype=torch.bool)
    exact_output = attention_output(attention_matrix(query.double(), held[0], seen, dim**-0.5), held[1])
    torch.testing.assert_close(slots.restore_output(output).double(), exact_output, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_the_compiled_kernel_reads_the_blocks(name: str, dim: int) -> None:
    """Equal to the reference in float64: keys and values of the type, values and keys of another."""
    kernel = choose(CPU, torch.float32, "cpu")
    query, key, value = rows(1, dim, 2, (2, 6)), rows(700, dim), rows(700, dim, 1)
    for types in ((name, name), (name, "q4_1"), ("q8_0", name)):
        slots = Ggml(*types).allocate(SlotShape(2, 2, dim, dim, 704, 1, torch.float32, CPU))
        slots.fill(key, value)
        parts, scoring = (slots.key_parts(), slots.value_parts()), Scoring(dim**-0.5, None, None, None)
        assert kernel.refusal(query, *parts) is None
        refusals = [refused(part) for side in parts for part in side]
        assert refusals == [None if type_ == "q4_1" else "groups without a minimum" for type_ in types]
        got, _ = kernel.attend(query, *parts, scoring)
        want, _ = REFERENCE.attend(query.double(), *parts, scoring)
        assert (got - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("k_type", NAMES)
@pytest.mark.parametrize("v_type", NAMES)
def test_bytes_by_hand(k_type: str, v_type: str) -> None:
    shape = SlotShape(2, 3, 64, 96, 50, 1, torch.float32, CPU)
    store = Ggml(k_type, v_type)
    held = held_bytes(store.allocate(shape).buffers(5))
    assert held.held == 2 * 3 * 50 * (2 * BYTES[k_type] + 3 * BYTES[v_type]) == store.planned_bytes(shape)
    assert held.used == held.held // 10
    sizes = gguf.constants.GGML_QUANT_SIZES
    assert all(sizes[GGMLQuantizationType[name.upper()]] == (32, size) for name, size in BYTES.items())


def test_settings_that_cannot_be_held() -> None:
    with pytest.raises(UserError, match="v_type=q5_0 is none of ggml's types here; type v_type=q8_0, q4_0 or q4_1"):
        Ggml("q8_0", "q5_0")
    with pytest.raises(UserError, match="blocks of 32 do not divide the head size 80"):
        Ggml().check(64, 80)
    with pytest.raises(UserError, match="multiple of 64, as in llama.cpp, and this one is 96; type rotate=false"):
        Ggml(rotate=True).check(96, 96)
    with pytest.raises(UserError, match="rotate=3"):
        Ggml(rotate=3)  # type: ignore[arg-type]
