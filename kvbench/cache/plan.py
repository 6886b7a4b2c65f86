"""What is decided about one layer's cache before it is built."""

from dataclasses import dataclass

from kvbench.cache.method import Method, store_of
from kvbench.cache.mla import Latents
from kvbench.cache.record import LayerRecord
from kvbench.cache.rotary import RotateBack
from kvbench.cache.rule import KeepRule, SlidingWindow
from kvbench.cache.slots import SlotShape
from kvbench.cache.store import Store
from kvbench.kernels import REFERENCE, Kernel
from kvbench.kernels.prefill import Scoring


@dataclass(frozen=True)
class LayerPlan:
    """How one layer's cache is built from the layer's record.

    index: the layer, as the model counts. rule, store: of this layer; a sliding-window layer has its own. budget:
    tokens of the prompt that each KV head keeps, the mean where heads differ; None: all. max_new_tokens: tokens that
    will be fed after the prompt, at most. step: most tokens of one forward. kernel: decode attention. rotate_back:
    takes positions off a query, where the rule needs that. scoring: how the layer scores. latents: of latent attention.
    """

    index: int
    rule: KeepRule
    store: Store
    budget: int | None = None
    max_new_tokens: int = 0
    step: int = 1
    kernel: Kernel = REFERENCE
    rotate_back: RotateBack | None = None
    latents: Latents | None = None
    scoring: Scoring | None = None

    @property
    def evicts_to(self) -> int | None:
        """Tokens that decode keeps when it evicts; None where decode only appends."""
        return self.budget if self.rule.holds_budget else None

    @property
    def most_evicted(self) -> int:
        """Tokens that one eviction gives up, at most; 0 where decode only appends."""
        return 0 if self.evicts_to is None else self.rule.evicts_every - 1 + self.step

    @property
    def has_positions(self) -> bool:
        """Whether slots may hold other positions than their own number: where the rule evicts in this layer."""
        return self.budget is not None

    def slots_for(self, kept: int) -> int:
        """Slots of a head that keeps `kept` tokens of the prompt."""
        return slots_needed(kept, self.evicts_to, self.max_new_tokens, self.step, self.rule.evicts_every)

    @property
    def room(self) -> int:
        """Slots for new tokens, of a head that evicts as many tokens as it accepts where the layer evicts."""
        return slots_needed(0, None if self.evicts_to is None else 0, self.max_new_tokens, self.step)

    def shape(self, record: LayerRecord, slots: int) -> SlotShape:
        """The shape of `slots` slots for the layer of the record."""
        return slot_shape(record, slots, self.step)


def plan_layer(
    method: Method,
    record: LayerRecord,
    layers: int = 1,
    depth: int | None = None,
    latents: Latents | None = None,
    prompt: int | None = None,
) -> LayerPlan:
    """The plan of one layer with room for no new token; `dataclasses.replace` sets the rest.

    layers, depth: how many layers the method applies to, and which of them this is, for rules that budget by depth;
    None: the layer's own index. prompt: tokens of the prompt, where the record holds only its first chunk. Raises
    UserError where the store cannot hold the layer's heads or the budget does not fit the prompt.
    """
    window = record.scoring.window
    rule = method.rule.of_layer(record) if window is None else SlidingWindow(budget=max(1, window - 1))
    store = store_of(record, method, latents)
    store.check(record.key.shape[-1], record.value.shape[-1])
    tokens = record.key.shape[2] if prompt is None else prompt
    budget = rule.layer_tokens(tokens, record.index if depth is None else depth, layers)
    rotation = record.rotation
    return LayerPlan(record.index, rule, store, budget, rotate_back=rotation, latents=latents, scoring=record.scoring)


def slots_needed(kept: int, evicts_to: int | None, new_tokens: int, step: int = 1, every: int = 1) -> int:
    """Slots for `kept` tokens and `new_tokens` more, fed `step` at a time; None: no token is evicted.

    every: `KeepRule.evicts_every`.
    """
    planned = kept + new_tokens
    return planned if evicts_to is None else min(planned, evicts_to + every - 1 + step)


def slot_shape(record: LayerRecord, slots: int, step: int = 1) -> SlotShape:
    """The shape of `slots` slots for the layer of the record, where the layer runs."""
    key, value = record.key, record.value
    return SlotShape(
        batch=key.shape[0],
        kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        slots=slots,
        step=step,
        dtype=key.dtype,
        device=record.device,
    )
