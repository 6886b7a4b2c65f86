"""KVzip: keeps the tokens that the model needs to repeat the prompt."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.observe import Observation
from kvbench.cache.output_norms import OutputNorms
from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.cache.replay import ReplayAttention
from kvbench.cache.rule import KEEP, Decode, KeepRule
from kvbench.cache.rule_settings import choice, whole

INSTRUCTION = "\n\nRepeat the text above word for word:\n"


@dataclass(frozen=True)
class KVzip(KeepRule):
    """Scores by a replay of the prompt, whatever is asked later (Kim et al., 2025, arXiv:2505.23416).

    After the prefill the prompt is repeated in chunks of `chunk` tokens. The score of a key and value is the largest
    probability that they receive from the replay, over queries and the query heads of a KV head. The best pairs of all
    heads and layers stay: a head keeps as many as it has among them. With share="uniform" every head keeps the same
    number. With share="plus" each query head's probability is multiplied by ||W_o v||. The newest token stays. Decode
    appends. The instruction before each chunk is worded here; a model without a tokenizer replays without it.

    counts: tokens that each head keeps, [B, Hkv] for each layer's index; set for each prompt.
    """

    chunk: int = whole(2048, least=1)
    share: str = choice("shared", "uniform", "plus", knob="variant")
    decode: Decode = "append"
    instruction: tuple[int, ...] = ()
    counts: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    of_this_layer: Tensor | None = field(default=None, repr=False, compare=False)

    decodes = ("append",)
    ragged_heads = True

    def for_tokenizer(self, tokenizer: Any) -> KeepRule:
        ids = tokenizer(INSTRUCTION, add_special_tokens=False).input_ids if tokenizer is not None else ()
        return replace(self, instruction=tuple(ids))

    def observations(self) -> tuple[Observation, ...]:
        seen = ReplayAttention(self.instruction, self.chunk)
        return (seen, OutputNorms(2)) if self.share == "plus" else (seen,)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        seen = record.observed[self.observations()[0]]  # [B, Hkv, Hq / Hkv, T]
        return (seen * record.observed[OutputNorms(2)] if self.share == "plus" else seen).amax(2)

    def of_prompt(self, record: PrefillRecord) -> KeepRule:
        """The rule with each head's number of the best pairs of all layers and heads."""
        layers = [layer for layer in record.layers if layer.scoring.window is None]
        budget = self.tokens(record.prompt_tokens)
        if self.share == "uniform" or budget is None or budget >= record.prompt_tokens:
            return self
        position = torch.arange(record.prompt_tokens, device=record.ids.device)
        protected = (position < self.first_tokens) | (position >= record.prompt_tokens - self.last_tokens(budget))
        scores = torch.stack([self.initial_scores(layer).masked_fill(protected, KEEP) for layer in layers], dim=1)
        batch, n_layers, heads, tokens = scores.shape
        order = scores.flatten(1).sort(dim=-1, stable=True).indices // tokens  # the head of each pair, best last
        best = order[:, n_layers * heads * (tokens - budget) :]
        counts = torch.zeros(batch, n_layers * heads, dtype=torch.int64, device=order.device)
        counts = counts.scatter_add_(1, best, torch.ones_like(best)).unflatten(1, (n_layers, heads))
        return replace(self, counts={layer.index: counts[:, i] for i, layer in enumerate(layers)})

    def of_layer(self, record: LayerRecord) -> KeepRule:
        return replace(self, of_this_layer=self.counts.get(record.index))

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor | None:
        return self.of_this_layer
