"""Reading a prompt in chunks: each chunk attends over what is kept and over itself, then the rule evicts.

So memory is bounded by budget + chunk, and not by the prompt. Every layer fills the cache that it will decode with; a
chunk's own keys and values are plain tensors until it has been attended to. Only tokens that stay are written, and
quantised, so no slot is needed for the others.

A rule that follows attention (`updated_scores`) or keys (`fresh_scores`) carries its scores from chunk to chunk, as
it does from step to step. A rule that decides by an observation window (`observed_scores`) scores all held tokens anew
at each chunk's end: the window is the chunk's last queries instead of the prompt's.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.caches import KVCache
from kvbench.cache.counters import Counters
from kvbench.cache.forward import check_prompt, forward
from kvbench.cache.from_prompt import empty_layer
from kvbench.cache.layer import SlotLayer
from kvbench.cache.layer_base import EngineLayer
from kvbench.cache.method import Method
from kvbench.cache.observe import Observation
from kvbench.cache.planner import Planner, kernels_on, planner_of
from kvbench.cache.record import LayerRecord, clock
from kvbench.cache.rule import KEEP, NO_SCORES, KeepRule, SlidingWindow, is_whole, keep_best
from kvbench.cache.state import empty_states, in_model_order
from kvbench.errors import UserError
from kvbench.heap import give_back_freed_memory
from kvbench.kernels.chunk import Held, attend_chunk
from kvbench.kernels.prefill import Scoring
from kvbench.models.shape import layer_windows


@torch.inference_mode()
def prefill_in_chunks(
    model: PreTrainedModel, method: Method, ids: Tensor, max_new_tokens: int, max_step: int, kernel: str
) -> KVCache:
    """A method's cache of the prompts ids [B, T], read `method.prefill_chunk` tokens at a time.

    `cache.prefill_ms` is the time of the forwards and `cache.compress_ms` that of evicting and writing. Arguments as
    `kvbench.cache.build.build_cache` takes them. Raises UserError where the rule or the store needs the prompt in one
    piece, and for a model whose layers keep a state.
    """
    assert method.prefill_chunk is not None
    check_prompt(model, ids)
    if empty_states(model.config):
        raise UserError(
            f"prefill.chunk={method.prefill_chunk}: {type(model).__name__} has layers that keep a state, which take "
            "the prompt in one piece; leave prefill.chunk out"
        )
    prompt = ids.shape[1]
    if isinstance(method.rule.budget, float):  # a share is one of the whole prompt
        method = replace(method, rule=replace(method.rule, budget=method.rule.tokens(prompt)))
    windows = layer_windows(model.config.get_text_config())
    compressed = [index for index, window in enumerate(windows) if window is None]
    devices = [parameter.device for parameter in model.parameters()]
    kernels = kernels_on(devices, method, model, model.dtype, kernel)
    planner = planner_of(model, method, compressed, kernels, max_new_tokens, max_step)
    layers = [ChunkLayer(index, prompt, planner) for index in range(len(windows))]
    cache = Cache(layers=in_model_order(layers, []))
    started = clock(ids.device)
    has_compressed = False
    with kvbench_attention(model):
        for chunk in ids.split(method.prefill_chunk, dim=1):
            has_compressed = any(layer.has_compressed for layer in layers)
            logits = forward(model, chunk, cache, logits_to_keep=1)[:, -1]
            if ids.device.type == "cpu":
                give_back_freed_memory()  # freed blocks of other sizes would make the peak grow with every chunk
    elapsed_ms = 1e3 * (clock(ids.device) - started)
    result = KVCache([layer.finished() for layer in layers], logits.clone(), prompt)
    result.compress_ms = sum(layer.compress_ms for layer in layers)
    result.prefill_ms = elapsed_ms - result.compress_ms
    result.compressed_before_last_logits = has_compressed
    return result


class ChunkLayer(EngineLayer):
    """One layer of a prompt that is read in chunks; it fills the `SlotLayer` that decode goes on with.

    scores: float32 [B, Hkv, n] of the held tokens, slot by slot, where the rule keeps scores. compress_ms: time of the
    rule's decisions and of writing what stays.
    """

    def __init__(self, index: int, prompt: int, planner: Planner) -> None:
        super().__init__(Counters())
        self.index, self.prompt, self.planner = index, prompt, planner
        self.latents = None if planner.latents is None else planner.latents[index]
        self.layer: SlotLayer | None = None
        self.scores = NO_SCORES
        self.compress_ms = 0.0
        self.chunk: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple["ChunkLayer", Tensor]:
        """Take a chunk's keys [B, Hkv, q, D] and values [B, Hkv, q, Dv]; returns the layer itself in place of keys."""
        self.chunk = (key, value) if self.latents is None else self.latents.keys_and_values(key, value)
        self.counters.accept(key.shape[2])
        return self, value

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the chunk over the held tokens and itself, [B, Hq, q, Dv]; then the rule evicts."""
        assert self.chunk is not None, "attention before update"
        key, value = self.chunk
        self.chunk = None
        if self.layer is None:
            record = LayerRecord(self.index, key, value, scoring)
            plan = self.planner.plan(record, self.prompt)
            kept = self.prompt if plan.budget is None else min(plan.budget, self.prompt)
            self.layer = empty_layer(record, plan, kept, keeps_scores=plan.rule.keeps_scores)
        layer, rule = self.layer, self.layer.rule
        first = self.seen - key.shape[2]
        heads = (key, value) if self.latents is None else self.latents.heads(key, value)
        decides = layer.plan.budget is not None and rule.keeps_scores
        reads = decides and (rule.reads_attention or observes_anew(rule))
        output, probabilities = attend_chunk(query, *heads, first, self._held(query), scoring, reads)
        started = clock(query.device)
        if probabilities is not None:
            probabilities = probabilities.unflatten(1, (key.shape[1], -1))
        self._take(key, value, first, probabilities)
        self.compress_ms += 1e3 * (clock(query.device) - started)
        return output

    @property
    def has_compressed(self) -> bool:
        """Whether the method has evicted or quantised a token; False in a layer that the model itself bounds."""
        layer = self.layer
        return layer is not None and not isinstance(layer.rule, SlidingWindow) and layer.has_compressed

    def finished(self) -> SlotLayer:
        """The layer of the whole prompt, ready to decode."""
        assert self.layer is not None, "no chunk was read"
        if self.layer.scores is not None:
            self.layer.scores[..., : self.layer.kept] = self.scores
        return self.layer

    def _held(self, query: Tensor) -> Held:
        layer = self.layer
        assert layer is not None
        slots = layer.slots
        if layer.kept == 0:
            return Held(query, [], [], layer.positions(), slots.restore_output)
        sink_query = None
        if layer.n_sink and layer.evicted and layer.rotate_back is not None:
            sink_query = slots.transform_query(layer.rotate_back(query, layer.evicted))
        return Held(
            slots.transform_query(query),
            slots.key_parts(),
            slots.value_parts(),
            layer.positions(),
            slots.restore_output,
            sink_query,
            0 if sink_query is None else layer.n_sink,
        )

    def _take(self, key: Tensor, value: Tensor, first: int, probabilities: Tensor | None) -> None:
        """Keep the best of the held and the chunk's tokens, as many as the budget allows.

        probabilities: [B, Hkv, Hq / Hkv, q, n + q], held slots first.
        """
        layer = self.layer
        assert layer is not None
        held, count = layer.kept, key.shape[2]
        budget = held + count if layer.plan.budget is None else layer.plan.budget
        own = torch.arange(first, first + count, dtype=torch.int32, device=key.device).expand(*key.shape[:2], count)
        position = torch.cat([layer.positions(), own], dim=-1)
        order = position.argsort(-1)
        if layer.rule.keeps_scores and layer.plan.budget is not None:
            self.scores = self._scored(key, value, order, probabilities)
        room = min(count, budget - held)
        if room:  # the chunk's first tokens take the free slots for now
            layer.fill(key[:, :, :room], value[:, :, :room], own[..., :room], None, self.seen)
        if held + count > budget:
            self._evict(key, value, position, order, budget)
        layer.adopt(layer.kept, self.seen)

    def _scored(self, key: Tensor, value: Tensor, order: Tensor, probabilities: Tensor | None) -> Tensor:
        """Scores of the held tokens and the chunk's, float32 [B, Hkv, n + q].

        order: [B, Hkv, n + q], where in the slots and the chunk the tokens stand, the oldest first.
        """
        assert self.layer is not None
        rule = self.layer.rule
        if observes_anew(rule) and probabilities is not None:
            rows = probabilities.gather(-1, order[:, :, None, None].expand_as(probabilities))
            scores = rule.observed_scores({each: each.of_chunk(rows) for each in rule.observations()})
            assert scores is not None
            return scores.new_empty(scores.shape).scatter_(-1, order, scores)
        fresh = torch.zeros(key.shape[:3], device=key.device)
        fresh[:] = rule.fresh_scores(key, value)
        scores = fresh if self.scores is NO_SCORES else torch.cat([self.scores, fresh], dim=-1)
        return scores if probabilities is None else rule.updated_scores(scores, probabilities).to(torch.float32)

    def _evict(self, key: Tensor, value: Tensor, position: Tensor, order: Tensor, budget: int) -> None:
        """Of position [B, Hkv, n + q] keep the best `budget`: tokens of the chunk that stay take slots of evicted ones.

        Of equal priorities the older token is evicted. The newest token stays.
        """
        layer = self.layer
        assert layer is not None
        priority = layer.rule.priority(self.scores, position, self.seen - 1, budget, layer.index).gather(-1, order)
        priority[..., -1] = KEEP
        stays = torch.zeros_like(position, dtype=torch.bool)
        stays.scatter_(-1, order.gather(-1, keep_best(priority, budget)), True)
        free, moved = ~stays[..., :budget], stays[..., budget:]
        counts = free.sum(-1, keepdim=True)  # of each head, at least the newest token
        nth = torch.minimum(torch.arange(int(counts.max()), device=key.device), counts - 1)
        slot = free.to(torch.int8).argsort(stable=True, dim=-1, descending=True).gather(-1, nth)
        source = moved.to(torch.int8).argsort(stable=True, dim=-1, descending=True).gather(-1, nth) + budget
        of_chunk = source - (position.shape[-1] - key.shape[2])
        new_key, new_value = (x.gather(2, of_chunk.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for x in (key, value))
        layer.put(slot, position.gather(-1, source), new_key, new_value, layer.slots.overwrite)
        if self.scores is not NO_SCORES:
            self.scores = self.scores[..., :budget].scatter(-1, slot, self.scores.gather(-1, source))
        layer.slots.settle()


def observes_anew(rule: KeepRule) -> bool:
    """Whether the rule scores what is held by an observation window at each chunk's end."""
    return type(rule).observed_scores is not KeepRule.observed_scores


def check_chunks(method: Method) -> None:
    """Raise UserError for a chunk that is no number of tokens, and for a rule or store that needs the whole prompt."""
    if method.prefill_chunk is None:
        return
    rule, store, given = method.rule, method.store, f"prefill.chunk={method.prefill_chunk} for method={method.name}"
    if not is_whole(method.prefill_chunk) or method.prefill_chunk < 1:
        raise UserError(f"prefill.chunk={method.prefill_chunk} is not a number of tokens; type prefill.chunk=512")
    reason: str | None = None
    if method.kind != "slots":
        reason = "it has no slots to fill chunk by chunk"
    elif store.static_scales:
        reason = f"{type(store).__name__} takes its scales from the whole prompt"
    elif rule.sees_future or any(not each.from_prompt for each in rule.observations()):
        reason = "it decides by more than the prompt's own attention, after the whole prompt"
    elif rule.merges:
        reason = "it merges the prompt's evicted tokens into those that stay, all at once"
    elif rule.ragged_heads:
        reason = "it divides the budget between heads by the whole prompt"
    elif rule.budget is not None and not store.writable:
        reason = f"it evicts after each chunk, and {type(store).__name__} can only append"
    elif rule.keeps_scores and (rule.rescores or not _scores_by_chunk(rule)):
        reason = "it scores the whole prompt at once"
    if reason is not None:
        raise UserError(f"{given}: {reason}; leave prefill.chunk out")


def _scores_by_chunk(rule: KeepRule) -> bool:
    if observes_anew(rule):
        return all(type(each).of_chunk is not Observation.of_chunk for each in rule.observations())
    return rule.reads_attention or type(rule).fresh_scores is not KeepRule.fresh_scores
