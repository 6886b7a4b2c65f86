"""From a prompt to compressed caches: prefill once, then build any number of caches from the record.

record = prefill(model, ids, [method.rule])
cache = build_cache(model, method, record, max_new_tokens=128)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import AnyCache, KVCache, Layer, PrefixCache
from kvbench.cache.formula import store_of
from kvbench.cache.forward import check_ids, forward, n_layers
from kvbench.cache.layer import SlotLayer
from kvbench.cache.mla import Latents, check_store, latents_of
from kvbench.cache.observe import SOFTCAPPED, Observation
from kvbench.cache.ragged import ragged_layer
from kvbench.cache.record import LayerRecord, PrefillRecord, RecordLayer, clock, record_cache
from kvbench.cache.rotary import BEFORE, IN_CACHE, RotateBack, rotate_back
from kvbench.cache.rule import EMPTY, NO_SCORES, KeepRule, SlidingWindow, keep_best, keep_best_of_heads
from kvbench.cache.state import StateLayer, empty_states
from kvbench.cache.stock import NO_WINDOWS, StockCache, StockStore
from kvbench.cache.store import SlotShape, Store
from kvbench.errors import UserError
from kvbench.kernels import REFERENCE, Kernel, ReferenceKernel, choose
from kvbench.models.shape import layer_windows, mla_layout, shape_of

PROBE = 512
"""Tokens by which a kernel is asked whether it reads a store: enough for the usual residuals to be quantised."""


@dataclass(frozen=True)
class Method:
    """A keep rule and a store, under the name that the rows carry."""

    name: str
    rule: KeepRule
    store: Store

    def check_combination(self, mla: str | None = None) -> None:
        """Raise UserError where the rule evicts during decode, or has heads of different lengths, and the store cannot
        overwrite single slots, or where the store does not take the model's layout of latent attention, `mla`."""
        check_store(self.store, mla)
        if self.store.brings_cache and (self.rule.budget is not None or self.rule.needs_ids or mla is not None):
            raise UserError(
                "transformers' own caches take no keep rule and no latent attention; choose another store "
                f"for method={self.name}"
            )
        if self.rule.ragged_heads and mla is not None:
            raise UserError(
                f"method={self.name} moves budget between KV heads, which latent attention does without; "
                "choose method=snapkv or another rule"
            )
        if self.rule.ragged_heads and not (self.store.writable and self.store.poolable):
            raise UserError(
                f"method={self.name} gives heads different lengths in blocks of a pool, which "
                f"{type(self.store).__name__} cannot be held in; choose store=dense, int8, int4, int2 or rot4"
            )
        if self.rule.budget is not None and self.rule.holds_budget and not self.store.writable:
            raise UserError(
                f"method={self.name} evicts single tokens during decode, and {type(self.store).__name__} can only "
                f"append; choose a store with single slots (store=dense, int8, int4, int2)"
            )


@torch.inference_mode()
def prefill(
    model: PreTrainedModel, ids: Tensor, rules: Iterable[KeepRule] = (), on_host: bool = False
) -> PrefillRecord:
    """Run prompts once with exact attention and record what the rules ask for.

    Args:
        ids: int64 [B, T], prompts of one length, no padding.
        on_host: layer by layer the record goes to the host's memory, and comes back when a cache is built from it.

    Raises UserError for ids that are not such a batch, and for families that cannot be recorded.
    """
    check_ids(ids)
    observations = [observation for rule in rules for observation in rule.observations()]
    rotations = _rotations(model, any(observation.before_rotation for observation in observations), BEFORE)
    states = empty_states(model.config)
    cache = record_cache(observations, rotations, latents_of(model), states, on_host)
    with kvbench_attention(model):
        started = clock(ids.device)
        logits = forward(model, ids, cache, logits_to_keep=1)[:, -1]
        elapsed_ms = 1e3 * (clock(ids.device) - started)
    layers: list[LayerRecord] = []
    observe_ms: dict[Observation, float] = {}
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            continue
        if not isinstance(layer, RecordLayer) or layer.record is None:
            raise UserError(f"{type(model).__name__} has layers that keep no keys and values of their own")
        layers.append(layer.record)
        for observation, ms in layer.observe_ms.items():
            observe_ms[observation] = observe_ms.get(observation, 0.0) + ms
    return PrefillRecord(ids, logits.clone(), layers, elapsed_ms - sum(observe_ms.values()), observe_ms, states)


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
        prompt: the record of `prefill` (made with this method's rule among `rules`), or ids [B, T] to prefill here.
        max_new_tokens: tokens that will be fed afterwards, at most. max_step: most tokens in one forward of those.
        kernel: which decode attention to use; see `kvbench.kernels.choose`.

    Raises UserError where the method does not fit the model or the prompt, or the kernel cannot be had.
    """
    if max_new_tokens < 0 or max_step < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}, max_step={max_step}; give 0 or more, and 1 or more")
    record = prefill(model, prompt, [method.rule]) if isinstance(prompt, Tensor) else prompt
    missing = [observation for observation in method.rule.observations() if observation not in record.observe_ms]
    if missing:
        raise UserError(f"the record lacks {missing} for {method.rule.name}; type prefill(model, ids, [method.rule])")
    if method.rule.needs_ids:
        return PrefixCache(record.ids.clone(), record.logits.clone())
    method.check_combination(mla_layout(model.config))
    latents = latents_of(model)
    if isinstance(method.store, StockStore):
        started = clock(record.ids.device)
        stock = StockCache(method.store, record)
        stock.compress_ms = 1e3 * (clock(record.ids.device) - started)
        return stock
    # Before the clock starts: it may compile.
    decode = {
        device.type: decode_kernel(method, model, record.layers[0].key.dtype, kernel, device)
        for device in {layer.device for layer in record.layers}
    }
    started = clock(record.ids.device)
    rotations = _rotations(model, method.rule.sinks_in_place > 0, IN_CACHE)
    free = [layer.index for layer in record.layers if layer.scoring.window is None]  # those that the method applies to
    layers = [
        _build_layer(
            layer.at_home(),
            len(free),
            method,
            rotations,
            max_new_tokens,
            max_step,
            decode[layer.device.type],
            None if latents is None else latents[layer.index],
            free.index(layer.index) if layer.index in free else 0,
        )
        for layer in record.layers
    ]
    states = [state.copy() for state in record.states]
    cache = KVCache(layers, record.logits.clone(), record.prompt_tokens, states)
    cache.compress_ms = 1e3 * (clock(record.ids.device) - started)
    return cache


def decode_kernel(
    method: Method, model: PreTrainedModel, dtype: torch.dtype, wanted: str, device: torch.device | None = None
) -> Kernel:
    """The kernel that a method's caches decode on, see `kvbench.kernels.choose`: the reference, with the reason, where
    the one chosen does not read what the store holds. Rows name what really runs.

    device: of the layer, where a device map spreads them; else the model's.
    """
    device = model.device if device is None else device
    kernel = choose(device, dtype, wanted)
    shape, store = shape_of(model.config), method.store
    if kernel.name == "triton" and (method.rule.ragged_heads or store.in_blocks):
        return ReferenceKernel("the Triton kernel does not read blocks of a pool")
    if kernel.name == "triton" and shape.mla == "absorbed":
        return ReferenceKernel("the Triton kernel does not read rows whose channels lie in two places")
    if store.calibrates or store.brings_cache or store.in_blocks or shape.mla in ("latent", "absorbed"):
        return kernel
    store.check(shape.head_dim, shape.value_dim)
    slots = store.allocate(SlotShape(1, 1, shape.head_dim, shape.value_dim, PROBE, 1, dtype, device))
    slots.fill(
        *(torch.zeros(1, 1, PROBE, width, dtype=dtype, device=device) for width in (shape.head_dim, shape.value_dim))
    )
    slots.settle()
    query = torch.zeros(1, 1, 1, shape.head_dim, dtype=dtype, device=device)
    reason = kernel.refusal(query, slots.key_parts(), slots.value_parts())
    return kernel if reason is None else ReferenceKernel(reason)


def check_model(model: PreTrainedModel, rule: KeepRule, store: Store | None = None) -> None:
    """Raise UserError where a rule turns rotary embeddings back and the model's cannot be, or its scores are capped,
    where the model's latent attention cannot be taken over, or its windows are not in a stock cache."""
    latents_of(model)
    if store is not None and store.brings_cache and any(layer_windows(model.config.get_text_config())):
        raise UserError(NO_WINDOWS)
    before_rotation = any(observation.before_rotation for observation in rule.observations())
    _rotations(model, rule.sinks_in_place > 0, IN_CACHE)
    _rotations(model, before_rotation, BEFORE)
    if before_rotation and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise UserError(SOFTCAPPED)


def _rotations(model: PreTrainedModel, needed: bool, instead: str) -> list[RotateBack | None]:
    elsewhere = {state.index for state in empty_states(model.config)}  # without queries and keys
    return [rotate_back(model, i, instead) if needed and i not in elsewhere else None for i in range(n_layers(model))]


def _build_layer(
    record: LayerRecord,
    layer_count: int,
    method: Method,
    rotations: list[RotateBack | None],
    max_new_tokens: int,
    step: int,
    kernel: Kernel = REFERENCE,
    latents: Latents | None = None,
    depth: int | None = None,
) -> Layer:
    """depth: which of the `layer_count` layers that the method applies to this is, for rules that budget by depth; None
    where the model has no others."""
    prompt = record.key.shape[2]
    window = record.scoring.window
    rule: KeepRule = method.rule if window is None else SlidingWindow(budget=max(1, window - 1))
    store = store_of(record, method, latents)
    store.check(record.key.shape[-1], record.value.shape[-1])
    budget = rule.layer_tokens(prompt, record.index if depth is None else depth, layer_count)
    scores = rule.initial_scores(record)
    worth = _worth(rule, scores, record, budget)
    if worth is not None and budget is not None and (share := rule.head_tokens(worth, budget)) is not None:
        return ragged_layer(
            record, rule, store, budget, keep_best_of_heads(worth, share), scores, max_new_tokens, step, kernel
        )
    kept = _positions(record) if worth is None or budget is None else keep_best(worth, budget)
    held = budget if rule.holds_budget else None
    planned = kept.shape[2] + max_new_tokens
    shape = SlotShape(
        batch=record.key.shape[0],
        kv_heads=record.key.shape[1],
        key_dim=record.key.shape[-1],
        value_dim=record.value.shape[-1],
        slots=planned if held is None else min(planned, held + step),
        step=step,
        dtype=record.key.dtype,
        device=record.key.device,
    )
    lead = shape.batch, shape.kv_heads, shape.slots
    if budget is None:
        position = torch.arange(shape.slots, dtype=torch.int32, device=shape.device).expand(lead)
    else:
        position = torch.full(lead, EMPTY, dtype=torch.int32, device=shape.device)
    # A cache that only appends from here on decides nothing any more.
    held_scores = None if scores is None or held is None else torch.zeros(lead, device=shape.device)
    rotation = rotations[record.index] if window is None else None
    layer = SlotLayer(
        record.index, store.allocate(shape), rule, held, position, held_scores, step, rotation, kernel, latents
    )
    layer.fill(
        _rows(record.key, kept),
        _rows(record.value, kept),
        kept.to(torch.int32),
        None if scores is None else scores.gather(-1, kept),
        prompt,
    )
    return layer


def _worth(rule: KeepRule, scores: Tensor | None, record: LayerRecord, budget: int | None) -> Tensor | None:
    """Priorities of the prompt's tokens, [B, Hkv, T]; None where all of them stay."""
    prompt = record.key.shape[2]
    if budget is None or budget >= prompt:
        return None
    known = NO_SCORES if scores is None else scores
    return rule.priority(known, _positions(record), prompt - 1, budget, record.index)


def _positions(record: LayerRecord) -> Tensor:
    """Positions of the prompt's tokens, ascending: int64 [B, Hkv, T]."""
    prompt: Tensor = torch.arange(record.key.shape[2], device=record.key.device)
    return prompt.expand(record.key.shape[:3])


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at index [B, Hkv, n]: [B, Hkv, n, D]."""
    if index.shape[2] == tensor.shape[2]:
        return tensor
    return tensor.gather(2, index.unsqueeze(-1).expand(*index.shape, tensor.shape[-1]))
