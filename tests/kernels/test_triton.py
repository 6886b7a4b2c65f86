"""The Triton kernels where there is no GPU: numbers under the interpreter, and what the compiler makes for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.cache.store import SlotShape, Store
from kvbench.kernels import triton_decode, triton_plan
from kvbench.kernels.parts import Dense
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_decode import TritonKernel, available, refusal
from kvbench.kernels.triton_pieces import Sections, Work, sections_of, side_of
from kvbench.kernels.triton_plan import Launch, plan
from kvbench.methods.per_token import PerToken
from kvbench.methods.turbo import Turbo
from tests.shared.paths import ROOT
from tests.shared.triton_cases import Parts, dense, kivi_slots, per_token, whole_coded, whole_kivi

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


# ------------------------------------------------------------------------------------------------------------ numbers


def run_numerics(marker: str) -> None:
    """`triton_numerics.py` in a process of its own: interpreted kernels stay interpreted."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(f"the interpreter of triton {triton.__version__} does not work with numpy {np.__version__}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        "tests/shared/triton_numerics.py",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@needs_triton
def test_numbers_under_the_interpreter() -> None:
    run_numerics("not slow")


@needs_triton
@pytest.mark.slow
def test_many_numbers_under_the_interpreter() -> None:
    run_numerics("slow")


@pytest.mark.parametrize(
    ("store", "dim", "reason"),
    [
        (PerToken(3, 3), 64, None),
        (Turbo(4, 4), 64, None),
        (Turbo(3, 3), 128, None),
        (Turbo(4, 4), 80, None),
        (Turbo(4, 3), 80, "groups of 16 codes of 3 bits"),
    ],
)
def test_what_the_kernels_do_not_read_is_named(store: Store, dim: int, reason: str | None) -> None:
    """Their rows say that the reference ran."""
    slots = store.allocate(SlotShape(1, 2, dim, dim, 40, 1, torch.float16, torch.device("cpu")))
    slots.append(*torch.ones(2, 1, 2, 40, dim, dtype=torch.float16))
    query = torch.ones(1, 4, 1, dim, dtype=torch.float16)
    assert refusal(query, slots.key_parts(), slots.value_parts()) == reason
    said = TritonKernel().refusal(query, slots.key_parts(), slots.value_parts())
    assert said is None if reason is None else reason in str(said)


# ----------------------------------------------------------------------------------------------------------- compiled


class NoDevice:
    """Stands in for the driver, so that a launch compiles for a Hopper GPU and goes no further."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 999  # no device has this number, so nothing compiled here is ever launched

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches compile without a GPU, and really compile: into a cache of the test's own."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice())


def launches(
    parts: Parts, group: int = 4, probabilities: bool = False, lengths: torch.Tensor | None = None, dim: int = 128
) -> list[Launch]:
    """What a decode step with that many query heads a KV head launches."""
    key, value = side_of(parts[0]), side_of(parts[1])
    assert key is not None and value is not None
    dtype = torch.float16 if key.dense is None or key.dense.dtype.itemsize == 1 else key.dense.dtype
    query = torch.zeros(1, 2 * group, 1, dim, dtype=dtype)
    sections = sections_of(key, value, lengths is not None)
    work = Work(query, key, value, sections, Scoring(dim**-0.5), None, None, 0, lengths)
    return plan(work, probabilities)[0]


def compiled(launch: Launch) -> Any:
    kernel = launch.kernel.warmup(**launch.arguments, **launch.constants, grid=launch.grid, num_warps=launch.num_warps)
    return kernel.result() if hasattr(kernel, "result") else kernel


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Bytes of local memory a thread uses: registers that were spilled, mostly."""
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[-1])


def copied_bytes(ptx: str) -> dict[int, int]:
    """Bytes that one warp copies from global to shared memory, by the bytes of a thread's copy."""
    sizes = [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x\w+|\d+)", ptx)]
    return {size: 32 * size * sizes.count(size) for size in set(sizes)}


def rows(n: int, dim: int = 128) -> torch.Tensor:
    return torch.zeros(1, 2, n, dim, dtype=torch.float16)


def kivi_buffers(bits: int = 4, dim: int = 128) -> tuple[Parts, torch.Tensor]:
    return whole_kivi(kivi_slots(rows(300, dim), rows(300, dim), (bits, bits), 32, 128, 512))


STORES = {
    "kivi int4": lambda: kivi_buffers()[0],
    "kivi int8": lambda: kivi_buffers(8)[0],
    "int8 per token": lambda: per_token(rows(256), rows(256), (8, 8)),
    "int4 per token": lambda: per_token(rows(256), rows(256)),
    "int2 per token": lambda: per_token(rows(256), rows(256), (2, 2)),
}


@needs_triton
def test_8_bit_floats_are_widened_by_the_hardware(compiler: None) -> None:
    e4m3 = [Dense(rows(256).to(torch.float8_e4m3fn))]
    kernel = compiled(launches((e4m3, e4m3))[0])
    assert "cvt.rn.f16x2.e4m3x2" in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("name", STORES)
def test_codes_are_copied_16_bytes_at_a_time(name: str, compiler: None, tmp_path: Path) -> None:
    """The section with both sides packed: no register spills, and narrower copies carry scales and minima only."""
    decode = launches(STORES[name]())[0]
    c = decode.constants
    assert c["BOTH"]
    kernel = compiled(replace(decode, constants=c | {"ONE": "", "NONE": False}))
    assert stack_bytes(kernel, tmp_path) == 0
    copied = copied_bytes(kernel.asm["ptx"])
    copies_of_the_loop = c["STAGES"]  # one in the loop, the others before it
    codes = copies_of_the_loop * c["T"] * (c["WIDTH"] * c["K_BITS"] + c["VALUE_WIDTH"] * c["V_BITS"]) // 8
    pairs = copies_of_the_loop * c["T"] * 4 * (c["WIDTH"] // c["K_GROUP"] + c["VALUE_WIDTH"] // c["V_GROUP"])
    assert copied[16] >= codes
    assert sum(copied.values()) - copied[16] <= pairs
    assert sum(copied.values()) == codes + pairs


@needs_triton
@pytest.mark.parametrize("name, bits", [("per token", 3), ("codebook", 4), ("codebook", 3)])
def test_3_bit_codes_and_codebooks(name: str, bits: int, compiler: None, tmp_path: Path) -> None:
    """No register spills; codes come by asynchronous copies of at least a word, each of them once."""
    lengths = None
    if name == "per token":
        parts = per_token(rows(256), rows(256), (bits, bits))
    else:
        parts, lengths = whole_coded(rows(200), rows(200), bits, 256)
    decode, combine = launches(parts, lengths=lengths)
    c = decode.constants
    kernel = compiled(replace(decode, constants=c | {"ONE": "", "NONE": False}))
    assert stack_bytes(kernel, tmp_path) == stack_bytes(compiled(combine), tmp_path) == 0
    codes = c["STAGES"] * c["T"] * 2 * 128 * bits // 8
    pairs = c["STAGES"] * c["T"] * 2 * 4 * 4 if name == "per token" else 0  # norms are loaded, not copied
    assert sum(copied_bytes(kernel.asm["ptx"]).values()) == codes + pairs
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("by_pointer", [False, True])
def test_all_sections_in_one_kernel(by_pointer: bool, compiler: None, tmp_path: Path) -> None:
    parts, lengths = kivi_buffers()
    decode, combine = launches(parts, probabilities=by_pointer, lengths=lengths if by_pointer else None)
    assert decode.constants["BOTH"] and decode.constants["ONE"] and decode.constants["NONE"]
    for launch in (decode, combine):
        assert stack_bytes(compiled(launch), tmp_path) == 0


@needs_triton
@pytest.mark.parametrize("dim, group", [(128, 4), (64, 1)])
def test_dense_rows(dim: int, group: int, compiler: None, tmp_path: Path) -> None:
    """16-bit rows on tensor cores, copied 16 bytes at a time."""
    decode = launches(dense(rows(256, dim), rows(256, dim)), group, dim=dim)[0]
    kernel = compiled(decode)
    assert stack_bytes(kernel, tmp_path) == 0
    c = decode.constants
    assert copied_bytes(kernel.asm["ptx"]) == {16: c["DENSE_STAGES"] * c["NONE_T"] * 2 * 2 * dim}
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in kernel.asm["ptx"]


# ---------------------------------------------------------------------------------------------------- without triton


def test_why_the_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_decode, "find_spec", lambda name: None)
    assert available() == (False, "triton is not installed; type pip install triton")
    monkeypatch.setattr(triton_decode, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available() == (False, "there is no NVIDIA GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert available() == (True, "")


def test_import_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import kvbench.kernels.triton_decode as t; print(t.available())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("(False, 'triton is not installed"), done.stderr


def test_sections_of_a_store() -> None:
    """KIVI with a residual of 128 and 299 settled tokens plus one: packed 256 keys and 171 values of 300."""
    slots = kivi_slots(rows(300), rows(300), (4, 4), 32, 128, 512)
    key, value = side_of(list(slots.key_parts())), side_of(list(slots.value_parts()))
    assert key is not None and value is not None and (key.length, value.length) == (300, 300)
    assert sections_of(key, value, by_pointer=False) == Sections(171, 85, 44, "keys")
    (keys, values), _ = whole_kivi(slots)
    key, value = side_of(keys), side_of(values)
    assert key is not None and value is not None
    assert sections_of(key, value, by_pointer=True) == Sections(384, 129, 129, "keys")


def test_rings_are_recognised() -> None:
    ring = torch.zeros(1, 1, 10, 16)
    wrapped = side_of([Dense(ring[:, :, 7:]), Dense(ring[:, :, :2])])
    assert wrapped is not None and (wrapped.start, wrapped.size, wrapped.dense_length) == (7, 10, 5)
    assert side_of([Dense(ring[:, :, :2]), Dense(ring[:, :, 7:])]) is None
    assert side_of([Dense(ring[:, :, 1:]), Dense(ring[:, :, :2])]) is None
    assert side_of([Dense(ring[:, :, 7:]), Dense(torch.zeros(1, 1, 2, 16))]) is None
    assert side_of([Dense(ring[:, :, 7:])] * 3) is None


def test_programs_share_the_slots_evenly() -> None:
    split = triton_plan._fewest_tiles
    assert split(0, 8, 1056) == 0
    assert split(1, 8, 1056) == 1
    assert split(1024, 8, 1056) == 128  # all at once, 8 tiles each
    assert split(1024, 256, 1056) == 4  # 1,024 programs: one round
    assert 600 * split(1024, 600, 1056) % 1056 > 900  # the last round is nearly full
