"""Run a prompt once with exact attention, and record what caches are built from."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.forward import check_prompt, forward, n_layers
from kvbench.cache.future import Future, FutureAttention, MassByHead, future_attention
from kvbench.cache.mla import latents_of
from kvbench.cache.observe import SOFTCAPPED, Observation
from kvbench.cache.output_norms import OutputNorms, output_norms
from kvbench.cache.record import LayerRecord, PrefillRecord, RecordLayer, clock, record_cache
from kvbench.cache.replay import ReplayAttention, replay
from kvbench.cache.rotary import BEFORE, IN_CACHE, RotateBack, rotate_back
from kvbench.cache.rule import KeepRule
from kvbench.cache.state import StateLayer, empty_states
from kvbench.cache.stock import NO_WINDOWS
from kvbench.cache.store import Store
from kvbench.errors import UserError
from kvbench.models.shape import layer_windows


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    rules: Iterable[KeepRule] = (),
    on_host: bool = False,
    future: Future | None = None,
    observations: Iterable[Observation] = (),
) -> PrefillRecord:
    """Run prompts once with exact attention and record what the rules ask for.

    Args:
        ids: int64 [B, T], prompts of one length, no padding.
        on_host: layer by layer the record goes to the host's memory, and comes back when a cache is built from it.
        future: the tokens to come, for rules that see them. Without it such rules keep the newest tokens: enough for
            bytes and times, which do not depend on which tokens are kept.
        observations: what to record beside what the rules ask for.

    Raises UserError for ids that are not such a batch of this model's tokens, and for families that cannot be recorded.
    """
    check_prompt(model, ids)
    wanted = [*observations, *(observation for rule in rules for observation in rule.observations())]
    record = _prefill(model, ids, [observation for observation in wanted if observation.from_prompt], on_host)
    for observation in dict.fromkeys(wanted):
        if isinstance(observation, OutputNorms):
            _add(record, observation, partial(output_norms, model, record, observation.order))
        if isinstance(observation, ReplayAttention):
            _add(record, observation, partial(replay, model, record, observation))
    ahead = [observation for observation in dict.fromkeys(wanted) if isinstance(observation, FutureAttention)]
    if ahead:
        _look_ahead(model, record, ahead, future)
    return record


def _prefill(model: PreTrainedModel, ids: Tensor, observations: list[Observation], on_host: bool) -> PrefillRecord:
    rotations = rotations_of(model, any(observation.before_rotation for observation in observations), BEFORE)
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


def _add(record: PrefillRecord, observation: Observation, compute: Callable[[], Iterable[Tensor | None]]) -> None:
    """Add to the record what `compute` gives for each layer, and its time; None: nothing for that layer."""
    started = clock(record.ids.device)
    for layer, seen in zip(record.layers, compute(), strict=True):
        if seen is not None:
            layer.observed[observation] = seen.to(layer.key.device)
    record.observe_ms[observation] = 1e3 * (clock(record.ids.device) - started)


def _look_ahead(
    model: PreTrainedModel, record: PrefillRecord, ahead: list[FutureAttention], future: Future | None
) -> None:
    """Add to the record what its tokens receive from the future's queries, from a second prefill over both."""
    started = clock(record.ids.device)
    first = record.prompt_tokens if future is None else future.first_query
    whole = None
    if future is not None:
        ids = torch.cat([record.ids, future.tokens], dim=1)
        whole = _prefill(model, ids, [MassByHead(first)], record.layers[0].home is not None)
    for i, layer in enumerate(record.layers):
        if layer.scoring.window is not None:
            continue
        for observation in ahead:
            if whole is None:
                seen = layer.key.new_zeros(layer.key.shape[:3], dtype=torch.float32)
            else:
                seen = future_attention(model, whole.layers[i].at_home(), first, observation.output_weighted)
            layer.observed[observation] = seen.to(layer.key.device)
    elapsed_ms = 1e3 * (clock(record.ids.device) - started)
    record.observe_ms.update(dict.fromkeys(ahead, elapsed_ms / len(ahead)))


def check_model(model: PreTrainedModel, rule: KeepRule, store: Store | None = None) -> None:
    """Raise UserError where a rule or a store needs something of the model that the model cannot give.

    That is: rotary embeddings that can be taken off, scores without a soft cap, latent attention as in DeepSeek V2 and
    V3, and no sliding window in a cache of transformers'.
    """
    latents_of(model)
    if store is not None and store.brings_cache and any(layer_windows(model.config.get_text_config())):
        raise UserError(NO_WINDOWS)
    before_rotation = any(observation.before_rotation for observation in rule.observations())
    rotations_of(model, rule.sinks_in_place > 0, IN_CACHE)
    rotations_of(model, before_rotation, BEFORE)
    if before_rotation and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise UserError(SOFTCAPPED)


def rotations_of(model: PreTrainedModel, needed: bool, instead: str) -> list[RotateBack | None]:
    """How each layer's rotary embedding is taken off; None where not `needed` and for layers that keep a state.

    Raises UserError, ending in `instead`, where a rotation cannot be taken off.
    """
    states = {state.index for state in empty_states(model.config)}
    return [rotate_back(model, i, instead) if needed and i not in states else None for i in range(n_layers(model))]
