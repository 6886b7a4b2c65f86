"""Every variant of the Triton kernels against the reference, on the GPU:  python scripts/check_triton.py

Prints the largest errors, in shares of the largest expected number; exits with 1 where one is too large.
`--only TEXT` runs the variants with TEXT in their name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the cases that the tests use

from kvbench.kernels import reference
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.triton_decode import TritonKernel, available, refusal
from tests.shared.triton_cases import (
    PROBABILITY_TOLERANCE,
    TOLERANCE,
    dense,
    error,
    errors,
    kivi,
    kivi_slots,
    per_token,
    randn,
    store,
    whole_kivi,
)

DEVICE = "cuda"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HEADS = (8, 2)

Errors = tuple[float, float]
Variant = tuple[str, torch.dtype, Callable[[], Errors]]


def draw(
    dtype: torch.dtype, slots: int, heads: tuple[int, int] = HEADS, q: int = 1, dim: int = 128, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, q, D], key and value [B, Hkv, S, D]."""
    shapes = (heads[0], q, dim), (heads[1], slots, dim), (heads[1], slots, dim)
    query, key, value = (randn(batch, *s, dtype=dtype, seed=i, device=DEVICE) for i, s in enumerate(shapes))
    return query, key, value


def plain(kind: str, dtype: torch.dtype, bits: int = 4, slots: int = 3001, group: int = 32, **drawn: object) -> Errors:
    query, key, value = draw(dtype, slots, **drawn)  # type: ignore[arg-type]
    parts = store(kind, key, value, bits, group)
    if (reason := refusal(query, *parts)) is not None:
        raise ValueError(f"the kernels do not take {reason}: nothing would be checked")
    return errors(query, parts)


def masked(dtype: torch.dtype) -> Errors:
    query, key, value = draw(dtype, 1000, q=3)
    visible = torch.rand(2, 2, 3, 1000, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.4
    visible[..., 5] = True
    return errors(query, per_token(key, value), options=AttendOptions(visible))


def scored(dtype: torch.dtype) -> Errors:
    query, key, value = draw(dtype, 1000)
    sinks = torch.linspace(-1, 3, HEADS[0], device=DEVICE)
    return errors(query, dense(key, value), Scoring(0.5, 20.0, None, sinks))


def sinks_in_place(kind: str, dtype: torch.dtype) -> Errors:
    query, key, value = draw(dtype, 1000)
    return errors(query, store(kind, key, value), options=AttendOptions(sink_query=query.flip(-1), n_sink=4))


def transposed(dtype: torch.dtype) -> Errors:
    query, key, value = (rows.transpose(1, 2).contiguous().transpose(1, 2) for rows in draw(dtype, 1000))
    return errors(query, dense(key[:, :, :901], value[:, :, :901]))


def replayed(dtype: torch.dtype) -> Errors:
    """One captured graph of a step over KIVI's whole buffers, replayed while they fill past two flushes."""
    residual, first, last = 128, 500, 800
    query, key, value = draw(dtype, last)
    slots = kivi_slots(key[:, :, :first], value[:, :, :first], (4, 4), 32, residual, capacity=1024)
    parts, lengths = whole_kivi(slots)
    kernel, scoring = TritonKernel(), Scoring(query.shape[3] ** -0.5)
    kernel.attend(query, *parts, scoring, AttendOptions(lengths=lengths))  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, probabilities = kernel.attend(query, *parts, scoring, AttendOptions(lengths=lengths))
    worst = (0.0, 0.0)
    for token in range(first, last):
        slots.settle()
        slots.append(key[:, :, token : token + 1], value[:, :, token : token + 1])
        lengths.copy_(whole_kivi(slots)[1])
        graph.replay()
        want = reference.attend(query.float(), slots.key_parts(), slots.value_parts(), scoring)
        assert probabilities is not None
        got = probabilities[..., : slots.length]
        worst = max(worst[0], error(output, want[0])), max(worst[1], error(got, want[1]))
    return worst


def variants() -> Iterator[Variant]:
    for dtype in (FP16, BF16, FP32):
        yield "dense", dtype, lambda d=dtype: plain("dense", d)
        yield "kivi int4", dtype, lambda d=dtype: plain("kivi", d)
        yield "int4 per token", dtype, lambda d=dtype: plain("per token", d)
    for bits in (8, 2):
        yield f"kivi int{bits}", FP16, lambda b=bits: plain("kivi", FP16, b)
        yield f"int{bits} per token", FP16, lambda b=bits: plain("per token", FP16, b)
    for bits, dtype in ((4, FP16), (3, FP16), (3, BF16), (3, FP32)):
        yield f"codebook of {bits} bits", dtype, lambda b=bits, d=dtype: plain("codebook", d, b)
    for dtype in (FP16, FP32):
        yield "int3 per token", dtype, lambda d=dtype: plain("per token", d, 3)
    yield "codebook of 4 bits, D 64", FP16, lambda: plain("codebook", FP16, dim=64)
    yield "int3 per token, D 64 group 64", FP16, lambda: plain("per token", FP16, 3, group=64, dim=64)
    yield "kivi K2 V8", FP16, lambda: errors((d := draw(FP16, 900))[0], kivi(d[1], d[2], (2, 8)))
    for kind in ("only keys packed", "only values packed"):
        yield kind, BF16, lambda k=kind: plain(k, BF16)
    for dim, group in ((64, 32), (80, 16), (96, 32), (256, 64)):
        yield f"kivi int4 D {dim} group {group}", FP16, lambda d=dim, g=group: plain("kivi", FP16, dim=d, group=g)
        yield f"dense D {dim}", BF16, lambda d=dim: plain("dense", BF16, dim=d)
    for heads in ((2, 2), (18, 1), (32, 2)):
        yield f"{heads[0]} heads on {heads[1]}, int4", FP16, lambda h=heads: plain("kivi", FP16, heads=h)
    yield "5 tokens, int4 per token", FP16, lambda: plain("per token", FP16, q=5)
    for slots in (4, 33, 129):
        yield f"kivi int4, {slots} slots", FP16, lambda s=slots: plain("kivi", FP16, slots=s)
    yield "kivi int4, 128k slots", FP16, lambda: plain("kivi", FP16, slots=131_077, batch=1)
    yield "dense, 128k slots", BF16, lambda: plain("dense", BF16, slots=131_077, batch=1)
    yield "holes in each head", FP16, lambda: masked(FP16)
    yield "softcap and learned sinks", BF16, lambda: scored(BF16)
    yield "sinks in place, dense", BF16, lambda: sinks_in_place("dense", BF16)
    yield "sinks in place, int4", FP16, lambda: sinks_in_place("per token", FP16)
    yield "cache laid out [B, S, H, D]", BF16, lambda: transposed(BF16)
    yield "graph replayed over 300 steps", FP16, lambda: replayed(FP16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the variants with this in their name")
    only = parser.parse_args().only
    ready, reason = available()
    if not ready or not torch.cuda.is_available():
        print(f"the Triton kernels cannot run here: {reason or 'they are interpreted'}", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'variant':<34} {'queries':<9} {'output':>9} {'probabilities':>14}")
    failed = 0
    for name, dtype, run in variants():
        if only not in name:
            continue
        output, probabilities = run()
        good = output <= TOLERANCE[dtype] and probabilities <= PROBABILITY_TOLERANCE[dtype]
        failed += not good
        kind = str(dtype).removeprefix("torch.")
        print(f"{name:<34} {kind:<9} {output:>9.1e} {probabilities:>14.1e} {'' if good else '  too large'}", flush=True)
    print(f"\n{failed} variants are wrong" if failed else "\nall agree with the reference")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
