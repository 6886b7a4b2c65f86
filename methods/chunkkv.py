"""ChunkKV: whole chunks of the prompt stay or go."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from kvbench.cache.observe import LastQueries, Observation
from kvbench.cache.record import LayerRecord
from kvbench.cache.rule import Decode, KeepRule
from kvbench.cache.rule_settings import whole


@dataclass(frozen=True)
class ChunkKV(KeepRule):
    """Neighbouring tokens stay or go together (Liu et al., 2025, arXiv:2502.00299).

    The prompt before the observation window is cut into chunks of `chunk` tokens. A chunk's score is the probability
    that the last `window` queries give its tokens, averaged over tokens, queries and the query heads of a KV head. The
    window and the best chunks stay; where the budget ends inside a chunk, the chunk's newest tokens stay. With chunk=1
    the choice is SnapKV's with pool=1. Each layer chooses for itself: layers do not reuse the choice of another, as the
    paper's faster form does. Decode appends; with decode="evict" it holds the budget by the attention since the end of
    the prompt. A prompt that is read in chunks (`prefill.chunk`) has an observation window at each of their ends, and
    the tokens that are still held are cut anew into chunks of `chunk`.
    """

    chunk: int = whole(10, least=1)
    window: int = whole(32, least=1, protects="last")
    decode: Decode = "append"

    reads_attention = True
    pick = "one picked token"

    def observations(self) -> tuple[Observation, ...]:
        return (LastQueries(self.window),)

    def initial_scores(self, record: LayerRecord) -> Tensor:
        return self.observed_scores(record.observed)

    def observed_scores(self, observed: Mapping[Observation, Tensor]) -> Tensor:
        seen = observed[LastQueries(self.window)].mean(2).mean(-2)  # [B, Hkv, T]
        length = seen.shape[-1]
        before = max(0, length - self.window)
        chunks = pad(seen[..., :before], (0, -before % self.chunk), value=float("nan")).unflatten(-1, (-1, self.chunk))
        scores = seen.clone()
        scores[..., :before] = chunks.nanmean(-1, keepdim=True).expand_as(chunks).flatten(-2)[..., :before]
        return scores

    def updated_scores(self, scores: Tensor, probabilities: Tensor) -> Tensor:
        return scores + probabilities.mean(2).sum(-2)
