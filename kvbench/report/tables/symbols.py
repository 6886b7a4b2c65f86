"""What the columns of the tables mean, in one phrase each, for captions that stand alone in a paper."""

from __future__ import annotations

from collections.abc import Iterable

SYMBOLS = {
    "ppl": "ppl: perplexity of the scored tokens",
    "nll_minus_full": "ΔNLL: nats a token above the full cache on the same tokens",
    "kl": "KL: Kullback-Leibler divergence from the full cache's predictions, nats a token",
    "gap_closed_kl": "gap closed: share of the KL from random eviction (0%) to hindsight (100%) that a keep rule saves",
    "gap_closed_nll": "gap closed in NLL: the same of the NLL",
    "top1": "top-1: share of tokens for which the full cache predicts the same next token",
    "hit_rate": "needles: share of hidden needles found at the longest length that the full cache solves",
    "rate": "hit rate: share of hidden needles found",
    "held_bytes": "held: bytes of the cache, free slots included",
    "times_smaller": "x smaller: bytes of the full cache of the same run over bytes held",
    "x_smaller": "x smaller than 16-bit: bytes of a full cache in 16 bits over bytes held, free slots included",
    "scored_kept_tokens": "kept while scored: tokens held per KV head, mean over the scored tokens",
    "kept_tokens": "kept: tokens held per KV head",
    "engaged": "engaged: share of the scored tokens predicted after an eviction or a quantisation",
    "decode": "decode: append adds decoded tokens to the budget, evict holds the budget",
    "slack_bytes": "slack: bytes of slots that hold no token",
    "bits_per_value": "bits/value: bits in use over numbers kept",
    "bytes_per_token": "a token: held bytes over tokens seen",
    "ttft_ms": "TTFT: time to first token",
    "tpot_p50_ms": "TPOT: time per output token, median over steps",
    "tpot_to_full": "TPOT / full's: median step over the full cache's in the same run",
    "slope_ms_per_1k": "slope: growth of TPOT per 1,000 tokens of context",
    "bandwidth_share": "bandwidth: bytes read a second over the memory's measured bandwidth",
    "difference": "difference: the first value minus the second",
    "p": "p: probability of such a difference by chance, corrected for the number of pairs",
}
"""By the key of a column."""


def symbols_of(keys: Iterable[str]) -> list[str]:
    """The phrases for the columns that have one, in their order."""
    return [SYMBOLS[key] for key in keys if key in SYMBOLS]
