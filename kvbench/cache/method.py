"""A method: a keep rule and a store, under one name."""

from dataclasses import dataclass
from typing import Literal

from kvbench.cache.mla import Latents, LatentStore, check_store
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError

Kind = Literal["slots", "stock", "recompute"]
"""What a method's cache is: slots of this package, a cache of transformers', or no cache at all."""


@dataclass(frozen=True)
class Method:
    """A keep rule and a store, under the name that the rows carry."""

    name: str
    rule: KeepRule
    store: Store
    prefill_chunk: int | None = None
    """Tokens of the prompt that are read at a time, the rule evicting after each; None: the prompt in one piece."""

    def reads_in_chunks(self, prompt: int) -> bool:
        """Whether a prompt of that length is read in several chunks."""
        return self.prefill_chunk is not None and self.prefill_chunk < prompt

    @property
    def kind(self) -> Kind:
        """Which kind of cache `build_cache` makes of this method."""
        if self.rule.needs_ids:
            return "recompute"
        return "stock" if self.store.brings_cache else "slots"

    @property
    def recomputes(self) -> bool:
        """Whether the method keeps no keys and values and runs the whole prefix at every step."""
        return self.kind == "recompute"

    def check_combination(self, mla: str | None = None) -> None:
        """Raise UserError where the rule cannot work with the store, or the store with the latent attention `mla`.

        A rule that evicts during decode needs a store that overwrites single slots; a rule whose heads keep different
        numbers of tokens needs a store that can lie in blocks.
        """
        check_store(self.store, mla)
        if self.store.brings_cache and (self.rule.budget is not None or self.recomputes or mla is not None):
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
        if self.rule.merges and (mla is not None or not self.store.mergeable):
            held = "latent attention" if mla is not None else type(self.store).__name__
            raise UserError(
                f"method={self.name} merges tokens, which {held} cannot be written back after; "
                "choose store=dense, bf16, int8, int4, int2 or rot4, or another method"
            )
        if self.rule.budget is not None and self.rule.holds_budget and not self.store.writable:
            raise UserError(
                f"method={self.name} evicts single tokens during decode, and {type(self.store).__name__} can only "
                f"append; choose a store with single slots (store=dense, int8, int4, int2)"
            )


def store_of(record: LayerRecord, method: Method, latents: Latents | None) -> Store:
    """The store of one layer: the method's, or a dense store for a sliding-window layer, which no method compresses."""
    store = method.store.for_layer(record.index) if record.scoring.window is None else DenseStore()
    return store if latents is None or latents.layout == "expand" else LatentStore(store, latents)
