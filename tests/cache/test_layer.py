"""A layer over a thousand decode steps with eviction: errors do not add up, since no token is quantised twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.cache.layer import SlotLayer
from kvbench.cache.plan import LayerPlan
from kvbench.cache.rule import EMPTY, KeepRule
from kvbench.cache.store import DenseStore, Slots, SlotShape, Store
from kvbench.kernels import REFERENCE
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.prefill import Scoring
from kvbench.methods.fp8 import Fp8
from kvbench.methods.ggml import Ggml
from kvbench.methods.h2o import H2O
from kvbench.methods.per_token import PerToken
from kvbench.methods.random import Random
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.turbo import Turbo

BUDGET, PROMPT, STEPS, HEAD = 32, 48, 1000, 32
SHAPE = SlotShape(1, 2, HEAD, HEAD, BUDGET + 1, 1, torch.float32, torch.device("cpu"))
SCORING = Scoring(HEAD**-0.5)
QUERY = torch.randn(1, 4, 64, HEAD, generator=torch.Generator().manual_seed(9))

RULES: dict[str, KeepRule] = {
    "h2o": H2O(budget=BUDGET),
    "random": Random(budget=BUDGET),
    "streaming_llm": StreamingLLM(budget=BUDGET, variant="absolute"),
}
STORES: dict[str, Store] = {
    "int4": PerToken(4, 4),
    "rot4": PerToken(4, 4, rotate=True),
    "q4_0": Ggml("q4_0", "q4_0"),
    "turbo4": Turbo(4, 4),
    "fp8": Fp8(),
}


def decoded(rule: KeepRule, store: Store, key: Tensor, value: Tensor) -> SlotLayer:
    """A layer after the prompt's last BUDGET tokens and STEPS single ones."""
    position = torch.full((1, 2, BUDGET + 1), EMPTY, dtype=torch.int32)
    scores = torch.zeros(1, 2, BUDGET + 1) if isinstance(rule, H2O) else None
    layer = SlotLayer(LayerPlan(0, rule, store, BUDGET), store.allocate(SHAPE), position, scores)
    first = PROMPT - BUDGET
    kept = torch.arange(first, PROMPT, dtype=torch.int32).expand(1, 2, -1)
    layer.fill(
        key[:, :, first:PROMPT],
        value[:, :, first:PROMPT],
        kept,
        None if scores is None else scores[..., :BUDGET],
        PROMPT,
    )
    queries = torch.randn(STEPS, 1, 4, 1, HEAD, generator=torch.Generator().manual_seed(2))
    for i, t in enumerate(range(PROMPT, PROMPT + STEPS)):
        layer.update(key[:, :, t : t + 1], value[:, :, t : t + 1])
        layer.attend(queries[i], SCORING)
    return layer


def output(slots: Slots, visible: Tensor | None) -> Tensor:
    """Attention of QUERY over slots, in the model's basis."""
    got, _ = REFERENCE.attend(
        slots.transform_query(QUERY), slots.key_parts(), slots.value_parts(), SCORING, AttendOptions(visible)
    )
    return slots.restore_output(got)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("rule", RULES)
def test_error_after_1000_steps_is_that_of_quantising_the_survivors_once(rule: str, store: str) -> None:
    """At most 1.05 times, at the attention output over the survivors."""
    draw = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 1, 2, PROMPT + STEPS, HEAD, generator=draw)
    key[..., ::7] *= 4
    layer = decoded(RULES[rule], STORES[store], key, value)
    assert layer.kept == BUDGET and layer.evicted == PROMPT + STEPS - BUDGET
    survivors = layer.kept_positions()
    rows = survivors.unsqueeze(-1).expand(-1, -1, -1, HEAD)
    once, exact = STORES[store].allocate(SHAPE), DenseStore().allocate(SHAPE)
    for slots in (once, exact):
        slots.fill(key.gather(2, rows), value.gather(2, rows))
    occupied = (layer.position[..., : layer.slots.length] != EMPTY).unsqueeze(2)
    want = output(exact, None)
    error, least = (float((got - want).norm()) for got in (output(layer.slots, occupied), output(once, None)))
    assert 0 < error <= 1.05 * least
