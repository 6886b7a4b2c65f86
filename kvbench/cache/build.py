"""From a prompt to compressed caches: prefill once, then build any number of caches from the record.

record = prefill(model, ids, [method])
cache = build_cache(model, method, record, max_new_tokens=128)

Other rooms import from here what building a cache takes.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.caches import AnyCache, KVCache, Layer
from kvbench.cache.chunked import check_chunks, prefill_in_chunks
from kvbench.cache.decode_kernel import decode_kernel
from kvbench.cache.from_prompt import slot_layer
from kvbench.cache.method import Method
from kvbench.cache.plan import LayerPlan
from kvbench.cache.planner import kernels_on, planner_of
from kvbench.cache.prefill import check_model, prefill
from kvbench.cache.ragged import ragged_layer
from kvbench.cache.recompute import recompute_cache
from kvbench.cache.record import LayerRecord, PrefillRecord, clock
from kvbench.cache.selection import select
from kvbench.cache.stock import stock_cache
from kvbench.errors import UserError
from kvbench.models.shape import mla_layout

__all__ = ["Method", "PrefillRecord", "build_cache", "build_layer", "check_model", "decode_kernel", "prefill"]


@torch.inference_mode()
def build_cache(
    model: PreTrainedModel,
    method: Method,
    prompt: PrefillRecord | Tensor,
    max_new_tokens: int = 256,
    max_step: int = 1,
    kernel: str = "auto",
) -> AnyCache:
    """A method's cache of a prompt; copies from the record, never aliases it.

    Args:
        prompt: the record of `prefill` (made with this method among `rules`), or ids [B, T] to prefill here. A
            method that reads the prompt in chunks does so here, and takes only the ids of a record.
        max_new_tokens: tokens that will be fed afterwards, at most. max_step: most tokens in one forward of those.
        kernel: which decode attention to use; see `kvbench.kernels.choose`.

    Raises UserError where the method does not fit the model or the prompt, or the kernel cannot be had.
    """
    ids = prompt.ids if isinstance(prompt, PrefillRecord) else prompt
    if max_new_tokens < 0 or max_step < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}, max_step={max_step}; give 0 or more, and 1 or more")
    if isinstance(ids, Tensor) and ids.ndim == 2 and method.reads_in_chunks(ids.shape[1]):
        method.check_combination(mla_layout(model.config))
        check_chunks(method)
        return prefill_in_chunks(model, method, ids, max_new_tokens, max_step, kernel)
    record = prompt if isinstance(prompt, PrefillRecord) else prefill(model, prompt, [method])
    missing = [observation for observation in method.observations() if observation not in record.observe_ms]
    if missing:
        raise UserError(f"the record lacks {missing} for {method.name}; type prefill(model, ids, [method])")
    if method.kind == "recompute":
        return recompute_cache(record)
    method.check_combination(mla_layout(model.config))
    if method.kind == "stock":
        return stock_cache(method.store, record)
    devices = [layer.device for layer in record.layers]
    kernels = kernels_on(devices, method, model, record.layers[0].key.dtype, kernel)
    started = clock(record.ids.device)
    method = replace(method, rule=method.rule.of_prompt(record))
    compressed = [layer.index for layer in record.layers if layer.scoring.window is None]
    planner = planner_of(model, method, compressed, kernels, max_new_tokens, max_step)
    at_home = (layer.at_home() for layer in record.layers)
    layers = [build_layer(layer, planner.plan(layer)) for layer in at_home]
    states = [state.copy() for state in record.states]
    cache = KVCache(layers, record.logits.clone(), record.prompt_tokens, states)
    cache.compress_ms = 1e3 * (clock(record.ids.device) - started)
    return cache


def build_layer(record: LayerRecord, plan: LayerPlan) -> Layer:
    """One layer's cache: of slots, or of blocks where heads keep different numbers of tokens."""
    selection = select(record, plan)
    build = ragged_layer if selection.by_head else slot_layer
    return build(record, plan, selection)
