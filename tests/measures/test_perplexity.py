"""Perplexity: equal to plain transformers where nothing is compressed, and through the compressed cache where it is."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from kvbench import load_method
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.decode import generate, step
from kvbench.cache.store import DenseSlots, DenseStore, SlotShape
from kvbench.config.sources import BUILT_IN
from kvbench.kernels import compiled
from kvbench.measures import fallbacks as prefills
from kvbench.measures.perplexity.token_scores import divergence
from kvbench.measures.perplexity.windows import score_windows
from kvbench.measures.statistics import wilson
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.models.load import LoadedModel
from kvbench.results.row import flags_of
from tests.shared.models import random_llama
from tests.shared.scoring import CONTEXT, MODEL, TEXT, TOKENS, bench, plain_nll, settings
from tests.shared.text import Breaks, methods, rows_of, run_context_of, value


def stored_logits(method: Method, ids: Tensor, context: int) -> np.ndarray:
    """Logits [T, V] of each scored token, one step after another through the method's cache."""
    record = prefill(MODEL, ids[None, :context], [method])
    cache = build_cache(MODEL, method, record, max_new_tokens=len(ids) - context)
    logits = [cache.last_logits] + [
        step(MODEL, ids[None, t : t + 1], cache)[:, -1] for t in range(context, len(ids) - 1)
    ]
    return torch.cat(logits).double().numpy()


@dataclass(frozen=True)
class Zeroed(DenseStore):
    """Loses every value that it is given."""

    def allocate(self, shape: SlotShape) -> DenseSlots:
        slots = super().allocate(shape)
        append = slots.append
        slots.append = lambda key, value: append(key, torch.zeros_like(value))  # type: ignore[method-assign]
        return slots


def test_full_is_a_plain_forward() -> None:
    offsets = settings(windows=3).offsets([len(TEXT)])
    rows = rows_of(score_windows(bench(methods("full")), settings(windows=3)))
    expected = np.mean([plain_nll(MODEL, TEXT[o : o + CONTEXT + TOKENS], CONTEXT) for o in offsets])
    assert value(rows, "full", "nll") == pytest.approx(expected, abs=1e-4)
    assert value(rows, "full", "ppl") == pytest.approx(math.exp(expected), rel=1e-4)
    assert value(rows, "full", "kl") == 0
    assert value(rows, "full", "top1") == 1
    assert value(rows, "full", "nll_minus_full") == 0


@pytest.mark.slow
def test_full_is_a_plain_forward_on_a_real_model(smollm2: LoadedModel, essays_folder: Any) -> None:
    text = (essays_folder / "worked.txt").read_text()
    tokens = torch.tensor(smollm2.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    asked = settings(context=256, tokens=32, windows=2)
    rows = rows_of(score_windows(run_context_of(smollm2.model, methods("full", "h2o", budget=64), tokens), asked))
    windows = [tokens[o : o + asked.longest] for o in asked.offsets([len(tokens)])]
    expected = np.mean([plain_nll(smollm2.model, ids, asked.context) for ids in windows])
    assert value(rows, "full", "nll") == pytest.approx(expected, abs=1e-4)
    assert value(rows, "h2o", "kl") > 1e-3


def test_recompute_is_full() -> None:
    rows = rows_of(score_windows(bench(methods("full", "recompute")), settings(windows=2)))
    assert value(rows, "recompute", "nll") == pytest.approx(value(rows, "full", "nll"), abs=1e-5)
    assert value(rows, "recompute", "kl") == pytest.approx(0, abs=1e-6)
    assert value(rows, "recompute", "kept_tokens") == 0
    assert value(rows, "recompute", "held_bytes") == 0


@pytest.mark.parametrize("name", ["h2o", "kivi", "streaming_llm", "random"])
def test_distance_from_full_by_hand(name: str) -> None:
    named = methods("full", name)
    rows = rows_of(score_windows(bench(named), settings()))
    ids = TEXT[: CONTEXT + TOKENS]
    full, other = (special.log_softmax(stored_logits(m, ids, CONTEXT), axis=-1) for m in named.values())
    kl = np.sum(np.exp(full) * (full - other), axis=-1)
    assert kl[1:].min() > 1e-6, "this model does not notice the compression"
    assert value(rows, name, "kl") == pytest.approx(kl.mean(), rel=1e-4)
    reverse = np.sum(np.exp(other) * (other - full), axis=-1)
    assert value(rows, name, "kl_reverse") == pytest.approx(reverse.mean(), rel=1e-4)
    assert value(rows, name, "top1") == np.mean(full.argmax(-1) == other.argmax(-1))
    fives = [(set(np.argsort(p)[-5:]), set(np.argsort(q)[-5:])) for p, q in zip(full, other, strict=True)]
    assert value(rows, name, "top5") == pytest.approx(np.mean([len(p & q) / 5 for p, q in fives]))
    nll = -other[np.arange(TOKENS), ids[CONTEXT:].numpy()]
    assert value(rows, name, "nll") == pytest.approx(nll.mean(), abs=1e-5)
    assert value(rows, name, "nll_minus_full") == pytest.approx(
        nll.mean() + full[np.arange(TOKENS), ids[CONTEXT:].numpy()].mean(), abs=1e-5
    )


def test_a_cache_that_loses_its_values_changes_every_prediction_but_the_first() -> None:
    named = methods("full") | {"zeroed": Method("zeroed", Full(), Zeroed())}
    one = rows_of(score_windows(bench(named), settings(tokens=1)))
    assert value(one, "zeroed", "nll") == value(one, "full", "nll")  # from the prompt's own logits
    rows = rows_of(score_windows(bench(named), settings()))
    assert abs(value(rows, "zeroed", "nll_minus_full")) > 0.01
    assert value(rows, "zeroed", "kl") > 0.01


@pytest.mark.parametrize(
    ("method", "context", "tokens", "engaged"),
    [
        (Method("x", Full(), DenseStore()), 40, 10, 0),
        (Method("x", H2O(12), DenseStore()), 40, 10, 9 / 10),
        (Method("x", H2O(50), DenseStore()), 40, 10, 0),
        (Method("x", H2O(49), DenseStore()), 40, 10, 0),  # 49 tokens are fed: none is given up
        # Token 4 after the prompt is the first over the budget; predictions 5 .. 9 come after it.
        (Method("x", H2O(43), DenseStore()), 40, 10, 5 / 10),
        (Method("x", Full(), Kivi(4, 4, 8, 16)), 16, 10, 9 / 10),
        # Keys are quantised once 32 are there, 12 tokens after the prompt; predictions 13 .. 19 come after that.
        (Method("x", Full(), Kivi(4, 4, 8, 32)), 20, 20, 7 / 20),
        (Method("x", Full(), Kivi(4, 4, 8, 64)), 20, 20, 0),
    ],
)
def test_engaged_is_the_share_predicted_after_a_compression(
    method: Method, context: int, tokens: int, engaged: float
) -> None:
    rows = rows_of(score_windows(bench(methods("full") | {"x": method}), settings(context=context, tokens=tokens)))
    assert value(rows, "x", "engaged") == pytest.approx(engaged)
    assert (value(rows, "x", "kl") > 1e-9) == (engaged > 0)


def test_kept_and_processed() -> None:
    rows = rows_of(score_windows(bench(methods("full", "h2o", "kivi", budget=12)), settings(windows=3, batch=2)))
    fed = CONTEXT + TOKENS - 1
    assert [value(rows, name, "kept_tokens") for name in ("full", "h2o", "kivi")] == [fed, 12, fed]
    assert [value(rows, name, "positions_processed") for name in ("full", "h2o", "kivi")] == [fed] * 3


def test_windows_of_a_batch_are_windows_one_by_one() -> None:
    named = methods("full", "h2o", "kivi", "random")
    together = rows_of(score_windows(bench(named), settings(windows=5, batch=3)))
    alone = rows_of(score_windows(bench(named), settings(windows=5, batch=1)))
    assert len(together) == len(alone)
    for a, b in zip(together, alone, strict=True):
        assert (a.method, a.metric, a.n) == (b.method, b.metric, b.n)
        if a.metric not in ("held_bytes", "scored_bytes", "x_smaller"):  # rows of a batch share their positions
            assert a.value == pytest.approx(b.value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("windows", [1, 2, 3, 7, 13])
@pytest.mark.parametrize("tokens", [650, 651, 1_000, 1_999])
def test_windows_are_spread_over_the_text_and_do_not_overlap(windows: int, tokens: int) -> None:
    offsets = settings(windows=windows).offsets([tokens])
    assert len(offsets) == windows
    assert offsets[0] == 0
    assert all(later - earlier >= CONTEXT + TOKENS for earlier, later in itertools.pairwise(offsets))
    assert windows == 1 or offsets[-1] + CONTEXT + TOKENS == tokens
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_samples_can_be_recomputed() -> None:
    named = methods("full", "h2o")
    (finding,) = score_windows(bench(named, save_tokens=True), settings(windows=3, batch=2))
    assert [sample["window"] for sample in finding.samples] == [0, 1, 2]
    nll: dict[str, list[float]] = {name: [] for name in named}
    kl: dict[str, list[float]] = {name: [] for name in named}
    for sample in finding.samples:
        ids = sample["ids"]
        assert ids == TEXT[sample["offset"] :][: CONTEXT + TOKENS].tolist()
        assert sample["sha256"] == hashlib.sha256(",".join(str(i) for i in ids).encode()).hexdigest()
        (full,) = (m for m in sample["methods"] if m["method"] == "full")
        assert full["nll"] == pytest.approx(plain_nll(MODEL, torch.tensor(ids), CONTEXT).mean(), abs=1e-4)
        for method in sample["methods"]:
            nll[method["method"]].append(method["nll"])
            kl[method["method"]].append(method["kl"])
    for name in named:
        assert np.mean(nll[name]) == pytest.approx(value(finding.rows, name, "nll"))
        assert np.mean(kl[name]) == pytest.approx(value(finding.rows, name, "kl"))


def test_tokens_are_stored_only_on_demand() -> None:
    (finding,) = score_windows(bench(methods("full")), settings())
    assert "ids" not in finding.samples[0]


def test_intervals_draw_windows() -> None:
    asked = settings(windows=12)
    rows = rows_of(score_windows(bench(methods("full")), asked))
    windows = [TEXT[o : o + CONTEXT + TOKENS] for o in asked.offsets([len(TEXT)])]
    means = np.array([plain_nll(MODEL, ids, CONTEXT).mean() for ids in windows])
    draw = np.random.default_rng(7)
    drawn = means[draw.integers(0, 12, (4_000, 12))].mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    (row,) = (row for row in rows if row.metric == "nll")
    # BCa against plain percentiles: the same but for a shift of the skewness.
    assert row.n == 12 * TOKENS
    assert (row.low, row.high) == pytest.approx((low, high), abs=0.2 * (high - low))
    assert row.note is not None and "bootstrap over 12 windows" in row.note
    (ppl,) = (row for row in rows if row.metric == "ppl")
    assert row.low is not None and row.high is not None
    assert (ppl.low, ppl.high) == (pytest.approx(math.exp(row.low)), pytest.approx(math.exp(row.high)))


def test_samples_that_got_worse_are_counted_and_the_worst_are_shown() -> None:
    asked = settings(windows=12, batch=5)
    (finding,) = score_windows(bench(methods("full", "random")), asked)
    per_window = {m["method"]: [] for m in finding.samples[0]["methods"]}  # type: ignore[var-annotated, index]
    for sample in finding.samples:
        for m in sample["methods"]:
            per_window[m["method"]].append(m["nll"])
    differences = np.array(per_window["random"]) - np.array(per_window["full"])
    assert value(finding.rows, "random", "worse_share") == np.mean(differences > 1e-4)
    worst = np.sort(differences)[-2:].mean()  # of twelve
    assert value(finding.rows, "random", "nll_minus_full_worst_decile") == pytest.approx(worst)
    assert value(finding.rows, "full", "worse_share") == 0
    assert value(finding.rows, "full", "nll_minus_full_worst_decile") == 0


def test_nll_by_position() -> None:
    asked = settings(windows=3, tokens=10, buckets=4)
    rows = rows_of(score_windows(bench(methods("full", "h2o")), asked))
    offsets = asked.offsets([len(TEXT)])
    nll = np.stack([plain_nll(MODEL, TEXT[o : o + asked.longest], CONTEXT) for o in offsets])
    curve = {row.position: row for row in rows if row.metric == "nll_at" and row.method == "full"}
    assert list(curve) == [CONTEXT, CONTEXT + 3, CONTEXT + 6, CONTEXT + 9]  # of width 3, the last of 1
    for position, row in curve.items():
        part = nll[:, position - CONTEXT : position - CONTEXT + 3]
        assert (row.value, row.n) == (pytest.approx(part.mean(), abs=1e-4), part.size)
    kl = [row for row in rows if row.metric == "kl_at" and row.method == "h2o"]
    whole = sum(row.value * row.n for row in kl) / sum(row.n for row in kl)  # type: ignore[operator, misc]
    assert whole == pytest.approx(value(rows, "h2o", "kl"))
    assert value(rows, "h2o", "kl_at", position=CONTEXT) < value(rows, "h2o", "kl_at", position=CONTEXT + 3)


def test_rows_say_how_they_were_measured() -> None:
    rows = rows_of(score_windows(bench(methods("full", "h2o")), settings(windows=2)))
    for row in rows:
        assert (row.measure, row.context, row.batch, row.status) == ("perplexity", CONTEXT, 2, "ok")
        assert (row.protocol, row.stride) == ("prefill_decode", len(TEXT) - CONTEXT - TOKENS)
    for metric in ("nll", "ppl", "kl", "kl_reverse", "top1", "top5", "nll_minus_full"):
        for row in (row for row in rows if row.metric == metric):
            assert row.n == 2 * TOKENS and row.low is not None and row.high is not None
            assert row.note is not None and "2 windows of 40 + 10 tokens" in row.note and "no BOS" in row.note
            if metric in ("top1", "top5") and row.value == 1:
                assert (row.low, row.high) == wilson(row.n, row.n)  # nothing to draw, and no certainty
            assert "bootstrap over 10 blocks of 2 scored tokens; covers these windows only" in row.note


def test_better_than_full_beyond_the_interval_is_said() -> None:
    """The text is what the model itself says, and the baseline a cache that loses its values."""
    prompt = TEXT[None, :CONTEXT]
    said = generate(MODEL, None, build_cache(MODEL, methods("full")["full"], prompt, TOKENS), TOKENS)
    named = {"full": Method("full", Full(), Zeroed()), "real": Method("real", Full(), DenseStore())}
    context = run_context_of(MODEL, named, torch.cat([prompt, said], dim=1)[0])
    for windows in (9, 10):
        rows = rows_of(score_windows(context, settings(windows=windows)))
        notes = {row.method: row for row in rows if row.metric == "nll_minus_full"}
        assert notes["real"].high is not None and notes["real"].high < 0
        assert ("better_than_full" in flags_of(notes["real"])) == (windows == 10)  # below, the units are blocks
        assert "better_than_full" not in flags_of(notes["full"])


# failures


@pytest.mark.parametrize(("how", "note"), [("failed", "RuntimeError: broken"), ("oom", "OutOfMemoryError: broken")])
def test_one_broken_method_leaves_the_others_whole(how: str, note: str) -> None:
    clean = rows_of(score_windows(bench(methods("full", "h2o")), settings(windows=3, batch=1)))
    broken = {"breaks": Method("breaks", Breaks(12, how=how, at=CONTEXT + 5), DenseStore())}
    here = bench(methods("full") | broken | methods("h2o"))
    rows = rows_of(score_windows(here, settings(windows=3, batch=1)))
    assert rows == clean
    ((label, row),) = here.journal.failures
    assert (label, row.measure, row.context, row.status) == ("breaks", "perplexity", CONTEXT, how)
    assert row.note is not None and row.note.startswith(note)
    assert row.value is None


def test_without_a_baseline_there_is_an_nll_and_nothing_to_compare() -> None:
    clean = rows_of(score_windows(bench(methods("full", "h2o")), settings(windows=2, batch=1)))
    named = {"full": Method("full", Breaks(12, how="failed", at=CONTEXT + 5), DenseStore())} | methods("h2o")
    here = bench(named, save_tokens=True)
    (finding,) = score_windows(here, settings(windows=2, batch=1))
    assert {label for label, _ in here.journal.failures} == {"full"}
    assert value(finding.rows, "h2o", "nll") == value(clean, "h2o", "nll")
    assert {row.metric for row in finding.rows}.isdisjoint({"kl", "top1", "nll_minus_full"})
    assert [sample["methods"][0]["kl"] for sample in finding.samples] == [None, None]


def test_a_prefill_that_fails_is_a_row_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("too long")

    monkeypatch.setattr(prefills, "prefill", out_of_memory)
    here = bench(methods("full", "h2o"))
    (finding,) = score_windows(here, settings(windows=2, batch=1))
    assert (finding.rows, [s["methods"] for s in finding.samples]) == ([], [[], []])
    assert [(label, row.status, row.context) for label, row in here.journal.failures] == [
        ("full", "oom", CONTEXT),
        ("h2o", "oom", CONTEXT),
    ]


ON_KERNELS = [
    name
    for name in BUILT_IN.names("method")
    if name not in ("duo", "lagkv", "recompute") and not name.startswith("hf_")
]
THROUGH_KERNELS = [
    *ON_KERNELS,
    "h2o+int8",
    "h2o+int4",
    "h2o+int2",
    "h2o+rot4",
    "h2o+rot3",
    "h2o+turbo4",
    "h2o+turbo3",
    "h2o+fp8",
    "h2o+bf16",
    "streaming_llm+int4",
    "full+paged",
]


@pytest.mark.skipif(isinstance(compiled(), str), reason="the compiled kernel cannot be had")
def test_the_fast_kernel_gives_every_method_the_reference_s_perplexity() -> None:
    """To 1e-4 nats a token, past evictions and flushes."""
    named = {"full": load_method("full")} | {entry: load_method(entry, budget=48) for entry in THROUGH_KERNELS}
    named["lagkv"] = load_method("lagkv", budget=4 + 2 * 128)
    model = random_llama(4, 2, 32, dtype=torch.float32)
    found = {}
    for kernel in ("cpu", "reference"):
        rows = rows_of(
            score_windows(run_context_of(model, named, TEXT, kernel=kernel), settings(context=300, tokens=40))
        )
        found[kernel] = {entry: value(rows, entry, "nll") for entry in named}
    assert all(value is not None for value in found["cpu"].values()) and len(found["cpu"]) >= 20
    differences = {entry: abs(found["cpu"][entry] - found["reference"][entry]) for entry in named}
    assert 0 < max(differences.values()) <= 1e-4, differences  # not 0: they add up in another order


def test_what_the_full_cache_rules_out_adds_nothing_to_kl() -> None:
    """Some models give tokens that nobody may say a logit of minus infinity."""
    p, q = (torch.tensor([[a, b, -torch.inf]], dtype=torch.float64).log_softmax(-1) for a, b in ((0, 1), (1, 0.5)))
    want = float((p[:, :2].exp() * (p[:, :2] - q[:, :2])).sum())
    assert float(divergence(p, q)) == pytest.approx(want)
    assert float(divergence(q, p)) > 0
    assert float(divergence(p, torch.tensor([[0.0, -torch.inf, 0.0]]).log_softmax(-1))) == torch.inf


# bytes of the cache that was scored


def test_bytes_are_those_of_the_scored_cache_against_a_full_cache_in_16_bits() -> None:
    """Two layers, 2 KV heads of 16 numbers, float32: a full cache holds twice the bytes of one in 16 bits."""
    rows = rows_of(score_windows(bench(methods("full", "h2o", "recompute")), settings(windows=2, batch=2)))
    number, tokens = 2 * 2 * 2 * 16, CONTEXT + TOKENS  # keys and values of two layers
    seen = CONTEXT + (TOKENS - 1) / 2  # when the first token is scored 40, when the last one is 49
    full = 2 * 4 * number * tokens + 2 * 4 * tokens  # batch 2; positions of two layers, shared by the batch
    assert value(rows, "full", "scored_bytes") == full
    assert value(rows, "full", "x_smaller") == pytest.approx(2 * 2 * number * seen / full)
    assert value(rows, "full", "scored_kept_tokens") == seen and value(rows, "h2o", "scored_kept_tokens") == 12
    small = value(rows, "h2o", "scored_bytes")
    assert small == value(rows, "h2o", "held_bytes") < full / 2
    assert value(rows, "h2o", "x_smaller") == pytest.approx(2 * 2 * number * seen / small)
    assert not [row for row in rows if row.method == "recompute" and row.metric == "x_smaller"]  # nothing is held
    assert {value(rows, method, "windows") for method in ("full", "h2o", "recompute")} == {2}
