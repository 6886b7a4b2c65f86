"""What a layer's cache holds, as the next query meets it: for measures that look inside, never for decoding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layer import SlotLayer, SlotView
from kvbench.cache.ragged import RaggedLayer
from kvbench.cache.rule import EMPTY
from kvbench.cache.slots import Slots
from kvbench.kernels.options import AttendOptions
from kvbench.kernels.parts import Parts, read_all
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
    batch, query_heads = query.shape[:2]
    slots = layer.slots if isinstance(layer, SlotLayer) else layer.pool.slots
    keys, values = _parts(layer)
    output, probabilities = _attention(layer, query, scoring, keys, values)
    heads = probabilities.shape[1]
    lead = batch, heads, probabilities.shape[-1]
    return Contents(
        _keys(slots, keys, batch, query_heads, query.shape[-1]).expand(*lead, -1),
        _values(slots, values, query_heads // heads, heads).expand(*lead, -1),
        layer.positions().long().expand(lead),
        output.to(torch.float32),
        probabilities.squeeze(-2).to(torch.float32),
    )


def _parts(layer: SlotLayer | RaggedLayer) -> tuple[Parts, Parts]:
    if isinstance(layer, SlotLayer):
        return layer.slots.key_parts(), layer.slots.value_parts()
    where = layer.table, layer.lengths, layer.counters.written
    return [layer.pool.keys(*where)], [layer.pool.values(*where)]


def _attention(
    layer: SlotLayer | RaggedLayer, query: Tensor, scoring: Scoring, keys: Parts, values: Parts
) -> tuple[Tensor, Tensor]:
    """Output and probabilities of the query over the layer's slots, by the reference kernel."""
    visible = (layer.positions() != EMPTY).unsqueeze(-2)
    if isinstance(layer, RaggedLayer):
        turned = layer.pool.slots.transform_query(query)
        output, probabilities = attend(turned, keys, values, scoring, AttendOptions(visible))
        return layer.pool.slots.restore_output(output), probabilities
    found: list[Tensor] = []

    def reference(*given: Any) -> tuple[Tensor, Tensor]:
        output, probabilities = attend(*given)
        found.append(probabilities)
        return output, probabilities

    view = SlotView(reference, keys, values, layer.counters.written, visible, layer.evicted or None)
    output = layer.attended(query, scoring, view, reads=False)
    return output, found[0]


def _keys(slots: Slots, parts: Parts, batch: int, query_heads: int, width: int) -> Tensor:
    """The keys in the model's basis. A store turns queries by a linear map, so the score of the i-th unit vector is
    the i-th number of the key that it stands for."""
    held = read_all(parts, torch.float32)
    unit = torch.eye(width, device=held.device).expand(batch, query_heads, width, width)
    turned = slots.transform_query(unit).to(torch.float32)  # [B, Hq, D, D of the store]
    group = query_heads // held.shape[1]
    return held @ turned[:, ::group].mT


def _values(slots: Slots, parts: Parts, group: int, heads: int) -> Tensor:
    """The values in the model's basis: what the output would be if one slot got all attention."""
    held = read_all(parts, torch.float32)
    held = held.expand(-1, heads, -1, -1).repeat_interleave(group, dim=1)
    return slots.restore_output(held).to(torch.float32)[:, ::group]
