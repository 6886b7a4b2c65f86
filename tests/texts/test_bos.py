"""The BOS rule: what windows and prompts begin with, told by the tokenizer or by data.bos, and said in the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.checks import check_measures_fit
from kvbench.errors import UserError
from kvbench.measures.memory import Memory
from kvbench.measures.perplexity import Perplexity
from kvbench.measures.perplexity.windows import score_windows
from kvbench.measures.target import Target
from kvbench.models.checkpoint import model_spec
from kvbench.models.shape import shape_of
from kvbench.texts.load import Text, data_spec
from kvbench.texts.tokens import Stretch, bos_tokens
from tests.shared.models import random_llama
from tests.shared.text import light, methods, rows_of, run_context_of, value


class Tokenizer:
    """One that begins a text with BOS 7, or does not."""

    def __init__(self, adds: bool, bos: int | None = 7) -> None:
        self.adds, self.bos_token_id = adds, bos

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        added = self.adds and add_special_tokens
        return SimpleNamespace(input_ids=[*self.prefix, 11] if added else [11])

    @property
    def prefix(self) -> list[int | None]:
        """What stands before a text."""
        return [self.bos_token_id]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{id}>" for id in ids]


class OtherPrefix(Tokenizer):
    """One that begins a text with tokens of its own, as GLM does with [gMASK]<sop>, and names no BOS."""

    def __init__(self, prefix: list[int]) -> None:
        super().__init__(True, None)
        self.own = prefix

    @property
    def prefix(self) -> list[int | None]:
        return [*self.own]


@pytest.mark.parametrize(
    ("rule", "adds", "bos"), [("auto", True, (7,)), ("auto", False, ()), ("first", False, (7,)), ("none", True, ())]
)
def test_the_rule(rule: str, adds: bool, bos: tuple[int, ...]) -> None:
    assert bos_tokens(rule, Tokenizer(adds)) == bos


def test_auto_takes_what_the_tokenizer_puts_before_a_text_whatever_it_is_called() -> None:
    for prefix in ([], [5], [5, 6]):
        assert bos_tokens("auto", OtherPrefix(prefix)) == tuple(prefix)


def test_what_cannot_be() -> None:
    assert bos_tokens("auto", None) == ()
    with pytest.raises(UserError, match="type data.bos=none"):
        bos_tokens("first", Tokenizer(False, None))
    with pytest.raises(UserError, match="data.bos=yes is unknown: choose from auto, none, first"):
        data_spec({"fetched": "essays", "bos": "yes"})


def test_a_prompt_or_a_stream_that_several_bos_tokens_do_not_fit_is_refused() -> None:
    spec, text = model_spec({"random": {"model_type": "llama"}}), Text("text", "", "0")
    shape = shape_of(random_llama(2, 1, 8).config)
    parts = (Stretch("t", 0, 100),)
    target = Target(spec, shape, text, torch.zeros(100, dtype=torch.int64), parts, None, (5, 6), 0)
    check_measures_fit([Memory([2], 4)], target)
    with pytest.raises(UserError, match="a prompt is shorter than the 2 tokens that begin a text; type data.bos=none"):
        check_measures_fit([Memory([1], 4)], target)
    with pytest.raises(UserError, match="begins a text with 2 tokens; type data.bos=none"):
        Perplexity(tokens=4, protocol="stream").prepare(target)


def test_bos_takes_the_first_tokens_place_and_the_same_tokens_are_scored() -> None:
    model, text = random_llama(2, 1, 8, dtype=torch.float32), torch.arange(3, 90)
    settings = Perplexity(context=20, tokens=4, windows=2, batch=2)
    nll = {}
    with light():
        for bos in ((), (1,), (1, 2)):
            bench = run_context_of(model, methods("full"), text, bos=bos)
            assert bench.window(5, 4).tolist() == [*bos, *[8, 9, 10, 11][len(bos) :]]
            rows = rows_of(score_windows(bench, settings))
            nll[bos] = value(rows, "full", "nll")
            said = ("no BOS added", "the first is BOS", "the first 2 are BOS")[len(bos)]
            assert all(said in (row.note or "") for row in rows if row.metric == "nll")
    for bos in ((1,), (1, 2)):
        want = []
        for offset in (0, len(text) - 24):
            ids = torch.cat([torch.tensor(bos), text[offset + len(bos) : offset + 24]])[None]
            logits = model(ids).logits[0, 19:-1].log_softmax(-1)
            want.append(-logits.gather(-1, ids[0, 20:, None]).mean())
        assert nll[bos] == pytest.approx(float(sum(want) / 2), abs=1e-5) and abs(nll[bos] - nll[()]) > 1e-4
