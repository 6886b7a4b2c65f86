"""DuoAttention: retrieval heads keep every token, streaming heads keep sinks and a window."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.record import LayerRecord, PrefillRecord
from kvbench.cache.rule import KeepRule
from kvbench.cache.rule_settings import whole
from kvbench.errors import UserError


@dataclass(frozen=True)
class Duo(KeepRule):
    """Retrieval and streaming heads (Xiao et al., 2024, arXiv:2410.10819; github.com/mit-han-lab/duo-attention).

    A streaming head keeps `n_sink` first tokens and at least `window` newest ones, and evicts during decode too. A
    retrieval head keeps every token and grows. The budget B decides how many KV heads of the model are retrieval heads:
    of N heads and a prompt of T tokens floor(N (B - s) / (T - s)), with s = n_sink + window. What rounding leaves makes
    the windows of streaming heads larger, so that the mean over heads is B tokens of the prompt. Heads hold blocks of
    a pool, as many as they need.

    The heads that retrieve most are those of `kvbench.cache.retrieval`: the attention from a repeated passkey to its
    first mention, measured once for each model. The paper finds them by gradient: a gate for each head mixes full and
    streaming attention, and is trained to change the answers about synthetic passkeys least. Its 64 sinks and window of
    256 are for prompts of 32,000 tokens; 16 and 64 here are for short ones.

    retrieval: each head's number, [Hkv] for each layer's index, from the calibration. counts: tokens that each head
    keeps, and here: those of one layer; set for each prompt.
    """

    n_sink: int = whole(16, least=0, knob="sinks", protects="first")
    window: int = whole(64, least=1, protects="last")
    retrieval: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    counts: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    here: Tensor | None = field(default=None, repr=False, compare=False)
    prompt: int = 0

    ragged_heads = True
    calibrates = True

    def calibrated(self, retrieval: dict[int, Tensor]) -> KeepRule:
        return replace(self, retrieval=retrieval)

    def of_prompt(self, record: PrefillRecord) -> KeepRule:
        prompt, budget = record.prompt_tokens, self.tokens(record.prompt_tokens)
        if budget is None or budget >= prompt:
            return replace(self, decode="append")  # every head keeps the whole prompt, as a retrieval head
        if not self.retrieval:
            raise UserError("duo is not calibrated; type method = calibrate(method, loaded)")
        layers = [layer.index for layer in record.layers if layer.scoring.window is None]
        found = torch.cat([self.retrieval[index] for index in layers])
        heads, fixed = len(found), self.first_tokens + self.last_tokens(budget)
        whole_heads = heads * (budget - fixed) // (prompt - fixed)
        each, more = divmod(heads * budget - whole_heads * prompt, heads - whole_heads)
        ranked = torch.full((heads,), each, dtype=torch.int64)
        ranked[:whole_heads] = prompt
        ranked[whole_heads : whole_heads + more] += 1
        counts = torch.empty_like(ranked).scatter_(0, found.sort(descending=True, stable=True).indices, ranked)
        by_layer = counts.split([len(self.retrieval[index]) for index in layers])
        return replace(self, counts=dict(zip(layers, by_layer, strict=True)), prompt=prompt)

    def of_layer(self, record: LayerRecord) -> KeepRule:
        counts = self.counts.get(record.index)
        return self if counts is None else replace(self, here=counts.to(record.device))

    def head_tokens(self, priority: Tensor, budget: int) -> Tensor | None:
        return None if self.here is None else self.here.expand(priority.shape[:2])

    def growing_heads(self) -> Tensor | None:
        return None if self.here is None else self.here == self.prompt
