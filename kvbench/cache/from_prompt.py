"""A layer's slots from a prompt's record."""

import torch
from torch import Tensor

from kvbench.cache.held import query_ring
from kvbench.cache.layer import SlotLayer
from kvbench.cache.merge import merge_prompt
from kvbench.cache.plan import LayerPlan
from kvbench.cache.ranking import EMPTY
from kvbench.cache.record import LayerRecord
from kvbench.cache.selection import Selection


def slot_layer(record: LayerRecord, plan: LayerPlan, selection: Selection) -> SlotLayer:
    """The layer of a prompt of which every head keeps equally many tokens; copies from the record."""
    kept, scores = selection.kept, selection.scores
    layer = empty_layer(record, plan, kept.shape[2], keeps_scores=scores is not None)
    key, value = record.key, record.value
    if plan.rule.merges:
        key, value, carried = merge_prompt(plan.rule, key, value, kept, scores, plan.index)
        layer.carried = None if plan.evicts_to is None else carried
    layer.fill(
        rows_at(key, kept),
        rows_at(value, kept),
        kept.to(torch.int32),
        None if scores is None else scores.gather(-1, kept),
        record.key.shape[2],
    )
    return layer


def empty_layer(record: LayerRecord, plan: LayerPlan, kept: int, keeps_scores: bool) -> SlotLayer:
    """A layer like the record's that holds nothing, with slots for `kept` tokens of the prompt and those to come."""
    shape = plan.shape(record, plan.slots_for(kept))
    lead = shape.batch, shape.kv_heads, shape.slots
    if plan.budget is None:
        position = torch.arange(shape.slots, dtype=torch.int32, device=shape.device).expand(lead)
    else:
        position = torch.full(lead, EMPTY, dtype=torch.int32, device=shape.device)
    # A cache that only appends after its prompt decides nothing any more and needs no scores.
    decides = keeps_scores and plan.evicts_to is not None
    held = torch.zeros(lead, device=shape.device) if decides else None
    queries = query_ring(record, plan.rule.observations()) if decides and plan.rule.rescores else None
    return SlotLayer(plan, plan.store.allocate(shape), position, held, queries)


def rows_at(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at index [B, Hkv, n]: [B, Hkv, n, D]."""
    if index.shape[2] == tensor.shape[2]:
        return tensor
    return tensor.gather(2, index.unsqueeze(-1).expand(*index.shape, tensor.shape[-1]))
