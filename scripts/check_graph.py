"""Decode steps replayed from a CUDA graph against eager ones, method by method:  python scripts/check_graph.py

A small random model; 3R + 1 steps after the capture. Logits, kept tokens, codes and lengths have to be the same. Exits
with 1 where they are not, or where a step that should be captured was not. On a CPU (--device cpu) the captured form of
the step runs without a graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from the checkout, installed or not

from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.caches import KVCache, Layer
from kvbench.cache.calibrate import bases_of
from kvbench.cache.captured import DecodeStep
from kvbench.cache.decode import step
from kvbench.cache.graph import WARM_UP, CudaGraph, GraphDecoder
from kvbench.cache.paged import PagedStore
from kvbench.cache.rotary import key_rotations
from kvbench.cache.store import DenseStore, Store
from kvbench.kernels.parts import Dense, Packed
from kvbench.methods.adakv import AdaKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.knorm import KNorm
from kvbench.methods.lowrank import LowRank
from kvbench.methods.per_token import PerToken
from kvbench.methods.pyramid import Pyramid
from kvbench.methods.random import Random
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import Tova
from kvbench.models.load import load_model, model_spec
from scripts.gpu_timing import device_name, device_of, parser, save

R, PROMPT, BUDGET, BATCH = 32, 150, 64, 2

TOLERANCE, ROUNDED = 1e-4, 5e-3
"""Of logits in float32, in shares of the largest: where keys and values are held in float32, and where not. Sums in
another order are a rounding apart, and now and then that is a whole code apart."""

MOST_CODES = 1e-3
"""Share of bytes of codes that may differ."""


FEW = (
    "full",
    "kivi4",
    "h2o+int4",
    "streaming_llm",
    "streaming_llm+rot4",
    "lowrank+int4",
    "adakv",
    "MLA absorbed, h2o+int8",
)
"""Methods of --tiny: every kind of counter once."""

Case = tuple[str, PreTrainedModel, Method]


def cases(device: torch.device) -> Iterator[Case]:
    """Names, models and methods; a model is made when its first method's turn comes."""
    llama = tiny_model(device)
    for name, method in methods():
        yield name, llama, method
    rotations = key_rotations(llama, 2)
    bases = bases_of(llama, random_ids(4, 256, device), rotations)
    for name, rule, bits in (("lowrank", Full(), None), ("lowrank+int4", H2O(BUDGET), 4)):
        yield name, llama, Method(name, rule, LowRank(k_bits=bits, v_bits=bits).calibrated(bases, rotations))
    for layout in ("absorbed", "latent"):
        mla = tiny_model(device, MLA, layout)
        for name, store in (("full", DenseStore()), ("h2o+int8", PerToken(8, 8))):
            rule = Full() if name == "full" else H2O(BUDGET)
            yield f"MLA {layout}, {name}", mla, Method(name, rule, store)
    yield "hybrid, h2o", tiny_model(device, HYBRID), Method("h2o", H2O(BUDGET), DenseStore())


def methods() -> Iterator[tuple[str, Method]]:
    """Those of a Llama."""
    dense, kivi4, int4 = DenseStore(), Kivi(4, 4, 32, R), PerToken(4, 4)
    chosen: dict[str, tuple[object, Store]] = {
        "full": (Full(), dense),
        "full+bf16": (Full(), DenseStore("bfloat16")),
        "kivi4": (Full(), kivi4),
        "kivi2": (Full(), Kivi(2, 2, 32, R)),
        "kivi, keys per token": (Full(), Kivi(4, 4, 32, R, k_axis="token")),
        "kivi, values per channel": (Full(), Kivi(4, 4, 32, R, v_axis="channel")),
        "int8": (Full(), PerToken(8, 8)),
        "h2o": (H2O(BUDGET), dense),
        "h2o filling": (H2O(PROMPT + R), dense),
        "h2o+int4": (H2O(BUDGET), int4),
        "streaming_llm": (StreamingLLM(BUDGET), dense),
        "streaming_llm+rot4": (StreamingLLM(BUDGET), PerToken(4, 4, rotate=True)),
        "random": (Random(BUDGET), dense),
        "tova": (Tova(BUDGET), int4),
        "knorm": (KNorm(BUDGET), dense),
        "snapkv+kivi4": (SnapKV(BUDGET), kivi4),
        "snapkv, holding": (SnapKV(BUDGET, decode="evict"), dense),
        "pyramid+kivi4": (Pyramid(BUDGET), kivi4),
        "paged": (Full(), PagedStore()),
        "paged+int4, h2o": (H2O(BUDGET), PagedStore(int4)),
        "adakv": (AdaKV(BUDGET, inner=SnapKV(BUDGET, decode="evict")), dense),
        "adakv, appending": (AdaKV(BUDGET, inner=SnapKV(BUDGET)), int4),
    }
    for name, (rule, store) in chosen.items():
        yield name, Method(name, rule, store)


COMMON = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 64}
HYBRID = {"model_type": "lfm2", "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
MLA = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
}


def tiny_model(device: torch.device, own: dict[str, object] = LLAMA, layout: str | None = None) -> PreTrainedModel:
    """Two layers with random weights."""
    settings = {"random": {**COMMON, **own}, "dtype": "float32", "device": str(device)}
    return load_model(model_spec(settings | ({} if layout is None else {"mla": layout}))).model


def random_ids(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def held(layer: Layer) -> Iterator[Tensor]:
    """Rows or codes of a layer that has slots of its own."""
    slots = getattr(layer, "slots", None)
    slots = getattr(slots, "codes", slots)  # rebuilt keys are made from these
    for part in [] if slots is None else [*slots.key_parts(), *slots.value_parts()]:
        if isinstance(part, Dense | Packed):
            yield from [part.rows] if isinstance(part, Dense) else [part.codes, part.scale, part.minimum]


def differences(eager: KVCache, captured: KVCache) -> Iterator[str]:
    """Differences between the two caches."""
    for a, b in zip(eager.attention_layers, captured.attention_layers, strict=True):
        if [a.kept, a.seen, a.evicted] != [b.kept, b.seen, b.evicted]:
            yield f"layer {a.index}: counters"
        if not torch.equal(a.kept_positions(), b.kept_positions()):
            yield f"layer {a.index}: kept tokens"
        for x, y in zip(held(a), held(b), strict=True):
            if x.shape != y.shape:
                yield f"layer {a.index}: lengths"
            elif x.dtype == torch.uint8 and (x != y).float().mean() > MOST_CODES:
                yield f"layer {a.index}: codes"


def check(model: PreTrainedModel, method: Method, ids: Tensor, record: Callable[..., Callable[[], object]]) -> str:
    """The faults, in words; empty where there are none."""
    prompt, steps = prefill(model, ids[:, :PROMPT], [method]), WARM_UP + 1 + 3 * R + 1
    eager, captured = (build_cache(model, method, prompt, max_new_tokens=steps) for _ in range(2))
    decoder, worst = GraphDecoder(model, captured, DecodeStep(model, captured), record), 0.0
    tolerance = TOLERANCE if method.store == DenseStore() else ROUNDED
    for at in range(PROMPT, PROMPT + steps):
        token = ids[:, at : at + 1]
        want, got = step(model, token, eager), decoder.feed(token)
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        if decoder.note is not None:
            return decoder.note
        if not worst <= tolerance:
            return f"logits are {worst:.1e} of the largest apart at step {at - PROMPT + 1}"
    return "; ".join(differences(eager, captured))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="check the methods with this in their name")
    arguments = options.parse_args()
    device = device_of(arguments)
    if device.type == "cpu":
        os.environ["KVBENCH_KERNEL"] = "reference"  # the compiled kernel has no captured form
    ids = random_ids(BATCH, PROMPT + 4 * R, device)
    record = CudaGraph if device.type == "cuda" else lambda work, warm_up: work
    print(f"{device_name(device)}, torch {torch.__version__}\n", flush=True)
    rows: list[dict[str, object]] = []
    for name, model, method in cases(device):
        if arguments.only in name and (name in FEW or not arguments.tiny):
            wrong = check(model, method, ids, record)
            rows.append({"method": name, "wrong": wrong})
            print(f"{name:<26} {wrong or 'the same'}", flush=True)
            save(rows, arguments.out, device=device_name(device))
    failed = sum(bool(row["wrong"]) for row in rows)
    print(f"\n{failed} methods differ" if failed else "\nreplayed steps are the eager ones")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
