"""Memory: bytes that a cache really holds, by part, and the peaks of prefill and decode apart."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.build import build_cache, prefill
from kvbench.cache.bytes import Held, allocator_bytes, held_bytes
from kvbench.cache.caches import AnyCache, KVCache
from kvbench.cache.decode import step
from kvbench.cache.formula import kept_bytes
from kvbench.cache.record import PrefillRecord
from kvbench.cache.size import planned_16bit
from kvbench.errors import UserError
from kvbench.heap import give_back_large_blocks_at_once
from kvbench.measures.context import MethodRun, RunContext
from kvbench.measures.memory import Memory
from kvbench.measures.memory.peak import peak
from kvbench.measures.result import Result, engagement_rows
from kvbench.measures.subprocess_cell import can_have_children, in_subprocess
from kvbench.models.load import ModelSpec, load_model
from kvbench.progress import Progress
from kvbench.results.row import MEMORY_PARTS, Row

WARM_UP = 256
"""Tokens of the warm-up prompt; two chunks where the method reads prompts in chunks."""


def measure_bytes(context: RunContext, settings: Memory) -> Iterator[Result]:
    """One result a context and method: bytes by part, the formula beside them, bits a value and peaks.

    Every method prefills for itself here, so that a prefill's peak holds its own observations and no other's; and,
    where `isolate`, in a process that nothing else has run in. A model that a device map spreads over several devices
    stays in this one: they hold its weights once.
    """
    spread = len(set((getattr(context.loaded.model, "hf_device_map", None) or {}).values())) > 1
    isolate = settings.isolate and context.spec is not None and not spread and can_have_children()
    for prompt in settings.contexts:
        names = context.methods[0].label if len(context.methods) == 1 else f"of {len(context.methods)} methods"
        with context.progress.phase(f"memory {prompt} {names}", len(context.methods)) as advance:
            for method in context.methods:
                with context.guarded(method, "memory", context=prompt):
                    measured = _apart if isolate else _measure
                    yield Result(measured(context, method, prompt, settings.tokens))
                advance()


@dataclass(frozen=True)
class Request:
    """What the subprocess gets instead of a run context. ids: the tokens of the text."""

    spec: ModelSpec
    method: MethodRun
    ids: list[int]
    tokens: int
    kernel: str
    threads: int


@dataclass(frozen=True)
class Reply:
    """The rows, or what failed."""

    rows: list[Row]
    failures: list[tuple[str, Row]]
    tracebacks: list[str]


def _apart(context: RunContext, method: MethodRun, prompt: int, tokens: int) -> list[Row]:
    """`_measure` in a subprocess; its failures go to the context's journal."""
    assert context.spec is not None
    request = Request(
        context.spec,
        method,
        context.window(0, prompt + tokens).tolist(),
        tokens,
        context.kernel,
        torch.get_num_threads(),
    )
    with _off_the_device(context):
        reply = in_subprocess(answer, request)
    context.journal.failures.extend(reply.failures)
    context.journal.tracebacks.extend(reply.tracebacks)
    return reply.rows


def answer(request: Request) -> Reply:
    """Load the model and measure; runs in the subprocess."""
    torch.set_num_threads(request.threads)
    if request.method.method.prefill_chunk is not None:
        give_back_large_blocks_at_once()  # the heap's own growth would hide that the peak does not follow the prompt
    context = RunContext(
        load_model(request.spec), [request.method], torch.tensor(request.ids), Progress(quiet=True), request.kernel
    )
    prompt, rows = len(request.ids) - request.tokens, list[Row]()
    with kvbench_attention(context.loaded.model), context.guarded(request.method, "memory", context=prompt):
        for row in _measure(context, request.method, prompt, request.tokens):
            peaks = (row.metric or "").startswith("peak_")
            rows.append(replace(row, note=f"{row.note}, in a fresh process") if peaks else row)
    return Reply(rows, context.journal.failures, context.journal.tracebacks)


@contextmanager
def _off_the_device(context: RunContext) -> Iterator[None]:
    """Move this process's weights to host memory meanwhile, so that a GPU does not hold them twice."""
    model, device = context.loaded.model, context.loaded.device
    if device.type != "cuda":
        yield
        return
    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)


def _measure(context: RunContext, method: MethodRun, prompt: int, tokens: int) -> list[Row]:
    model, device = context.loaded.model, context.loaded.device
    ids = context.window(0, prompt + tokens).unsqueeze(0).to(device)
    chunk = method.method.prefill_chunk
    _warm_up(context, method, ids[:, : min(WARM_UP if chunk is None else 2 * chunk, prompt) + 1])
    in_chunks = method.method.reads_in_chunks(prompt)
    # Layers have the same shapes in a record of one token: it stands for the prompt where that is read in chunks.
    record = prefill(model, ids[:, :1]) if in_chunks else None
    with peak(device) as prefill_peak:
        record = record or prefill(model, ids[:, :prompt], [method.method.rule])
        read = ids[:, :prompt] if in_chunks else record
        cache = build_cache(model, method.method, read, max_new_tokens=tokens, kernel=context.kernel)
    sizes = Sizes.of(record, prompt + tokens)
    formula = kept_bytes(model, method.method, record)
    del record, read
    with peak(device) as decode_peak:
        for t in range(tokens):
            step(model, ids[:, prompt + t : prompt + t + 1], cache)
    base = replace(method.row, measure="memory", context=prompt, batch=1, n=1, protocol="prefill_decode")
    held = held_bytes(cache.buffers())
    rows = _held_rows(base, cache, held, sizes)
    full = planned_16bit(context.loaded, model.config.get_text_config())
    if full is not None and held.held:
        note = "bytes of a full cache in 16 bits over bytes held, slots for coming tokens included"
        smaller = full.full_bytes(1, prompt + tokens) / held.held
        rows.append(replace(base, metric="x_smaller", value=smaller, unit="x", note=note))
    if isinstance(cache, KVCache):
        rows += _side_by_side(base, held, formula(cache), allocator_bytes(cache.buffers()))
    for metric, phase in (("peak_prefill_bytes", prefill_peak), ("peak_decode_bytes", decode_peak)):
        note = f"{phase.source}, above what was held before the phase"
        rows.append(replace(base, metric=metric, value=float(phase.bytes), unit="bytes", note=note))
    return rows


def _side_by_side(base: Row, held: Held, analytic: int, allocated: int | None) -> Iterator[Row]:
    """Bytes of the same cache by formula and by the allocator, and the spare bytes that explain the difference."""
    apart = sum(held.parts.get(part, 0) for part in ("positions", "scores", "state"))
    byte = replace(base, unit="bytes")
    yield replace(
        byte,
        metric="analytic_bytes",
        value=float(analytic),
        note="the store's formula for the kept tokens: rows, codes, scales, residual",
    )
    yield replace(
        byte,
        metric="spare_bytes",
        value=float(held.held - analytic - apart),
        note="held beyond analytic bytes, positions, scores and states: slots for tokens to come, and the "
        "one that a step writes before it evicts",
    )
    if allocated is not None:
        yield replace(
            byte,
            metric="allocator_bytes",
            value=float(allocated),
            note="what the allocator set aside for the held bytes, its rounding included",
        )


def _warm_up(context: RunContext, method: MethodRun, ids: Tensor) -> None:
    """Run a short prompt, so that one-time allocations are not counted for the first method."""
    with suppress(UserError):  # a share of so short a prompt may be too little for the method
        prompt = ids[:, :-1]
        in_chunks = method.method.reads_in_chunks(prompt.shape[1])
        read = prompt if in_chunks else prefill(context.loaded.model, prompt, [method.method.rule])
        cache = build_cache(context.loaded.model, method.method, read, max_new_tokens=1, kernel=context.kernel)
        step(context.loaded.model, ids[:, -1:], cache)


@dataclass(frozen=True)
class Sizes:
    """What a full cache holds: of each of the `seen` tokens `growing` numbers, in the layers that the model's own
    window bounds `bounded` in all, of `itemsize` bytes each; and `state` numbers of states in `state_bytes`.
    `layers` have keys and values."""

    seen: int
    layers: int
    growing: int
    bounded: int
    itemsize: int
    state: int
    state_bytes: int

    @classmethod
    def of(cls, record: PrefillRecord, seen: int) -> "Sizes":
        windows = [(layer.token_numbers, layer.scoring.window) for layer in record.layers]
        growing = sum(numbers for numbers, window in windows if window is None)
        bounded = sum(numbers * min(seen, window - 1) for numbers, window in windows if window is not None)
        tensors = [tensor for state in record.states for tensor in state.tensors()]
        return cls(
            seen,
            len(windows),
            growing,
            bounded,
            record.layers[0].key.element_size(),
            sum(tensor.numel() for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
        )

    @property
    def growing_bytes(self) -> int:
        return self.growing * self.seen * self.itemsize

    @property
    def full_bytes(self) -> int:
        return self.growing_bytes + self.bounded * self.itemsize + self.state_bytes


def _held_rows(base: Row, cache: AnyCache, held: Held, sizes: Sizes) -> list[Row]:
    dense = sizes.full_bytes
    found: list[tuple[str, float, str]] = [
        ("held_bytes", held.held, "bytes"),
        ("slack_bytes", held.slack, "bytes"),
        ("dense_bytes", dense, "bytes"),
        *((f"held_bytes.{part}", held.parts[part], "bytes") for part in MEMORY_PARTS if part in held.parts),
        ("bytes_per_token", held.held / sizes.seen, "bytes"),
        ("bytes_per_token_layer", held.held / sizes.seen / sizes.layers, "bytes"),
    ]
    if held.used:
        kept = sizes.growing * cache.kept_tokens + sizes.bounded + sizes.state
        found.append(("bits_per_value", 8 * held.used / kept, "bits"))
    if sizes.bounded or sizes.state:  # the share of the full cache that methods can compress
        found.append(("compressible_share", sizes.growing_bytes / dense, "share"))
    rows = [replace(base, metric=metric, value=float(value), unit=unit) for metric, value, unit in found]
    return [*rows, *engagement_rows(base, cache.has_compressed, cache.kept_tokens, cache.positions_processed)]
