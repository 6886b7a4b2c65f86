"""What a layer's cache holds, as the next query meets it: for measures that look inside, never for decoding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layer import SlotLayer, SlotView
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import EMPTY
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import block_rows, take
from kvbench.kernels.prefill import Scoring
from kvbench.kernels.reference import attend


@dataclass(frozen=True)
class Contents:
    """Every slot of a layer, and the attention of one query over them.

    keys, values: float32 [B, Hkv, S, D] and [B, Hkv, S, Dv] in the model's own basis, whatever basis the store holds
    them in. position: int64 [B, Hkv, S], the token in each slot, EMPTY where there is none. output: [B, Hq, 1, Dv].
    probabilities: float32 [B, Hkv, Hq / Hkv, S], 0 in empty slots.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    output: Tensor
    probabilities: Tensor


def contents(layer: SlotLayer | RaggedLayer, query: Tensor, scoring: Scoring) -> Contents:
    """What the layer holds now, and what `query` [B, Hq, 1, D], rotated for the next position, attends to.

    The query's own token is not among the slots. Nothing of the cache changes.
    """
    output, probabilities = _attention(layer, query, scoring)
    lead = query.shape[0], *probabilities.shape[1:2], probabilities.shape[-1]
    keys, values = _held(layer)
    return Contents(
        keys.expand(*lead, -1),
        values.expand(*lead, -1),
        layer.positions().long().expand(lead),
        output.to(torch.float32),
        probabilities.squeeze(-2).to(torch.float32),
    )


def _held(layer: SlotLayer | RaggedLayer) -> tuple[Tensor, Tensor]:
    """Keys and values of the layer's slots in the model's basis."""
    if isinstance(layer, SlotLayer):
        return layer.slots.read_back()
    rows = block_rows(layer.table, layer.pool.block_size)[..., : layer.counters.written]
    keys, values = layer.pool.slots.read_back()
    return take(keys, rows), take(values, rows)


def _attention(layer: SlotLayer | RaggedLayer, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Output and probabilities of the query over the layer's slots, by the reference kernel."""
    visible, written = (layer.positions() != EMPTY).unsqueeze(-2), layer.counters.written
    if isinstance(layer, RaggedLayer):
        where = layer.table, layer.lengths, written
        turned, keys, values = (
            layer.pool.slots.transform_query(query),
            layer.pool.keys(*where),
            layer.pool.values(*where),
        )
        output, probabilities = attend(turned, [keys], [values], scoring, AttendOptions(visible))
        return layer.pool.slots.restore_output(output), probabilities
    found: list[Tensor] = []

    def reference(*given: Any) -> tuple[Tensor, Tensor]:
        output, probabilities = attend(*given)
        found.append(probabilities)
        return output, probabilities

    keys_and_values = layer.slots.key_parts(), layer.slots.value_parts()
    view = SlotView(reference, *keys_and_values, written, visible, layer.evicted or None)
    return layer.attended(query, scoring, view, reads=False), found[0]
