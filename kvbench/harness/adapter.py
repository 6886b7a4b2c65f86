"""A method as a model of lm-evaluation-harness, whose tasks then run through its compressed cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.build import Method, build_cache, check_model, prefill
from kvbench.cache.caches import AnyCache
from kvbench.cache.calibrate import calibrate
from kvbench.cache.decode import step
from kvbench.cache.record import PrefillRecord
from kvbench.errors import UserError
from kvbench.measures.perplexity import check_stream
from kvbench.models.load import LoadedModel, end_tokens

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ImportError(f"this needs lm-evaluation-harness ({error}); type pip install 'kvbench[lm_eval]'") from error

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens of an answer; the first that is given counts."""
GREEDY = {"do_sample": (False, None), "temperature": (0, None), "num_beams": (1, None), "repetition_penalty": (1, None)}
"""Settings of generation and the values that mean greedy decoding; with them top_k, top_p and min_p say nothing."""
IDLE = ("top_k", "top_p", "min_p")


@dataclass
class Counts:
    """What happened since the last `take`: tokens scored or generated, those of them that were predicted after an
    eviction or a quantisation, and those predicted by logits that were not finite; tokens kept at the end of each
    request, and contexts that were cut on the left."""

    predicted: int = 0
    engaged: int = 0
    not_finite: int = 0
    kept: list[float] = field(default_factory=list)
    cut: int = 0


class KVBenchLM(TemplateLM):
    """`lm_eval.simple_evaluate(KVBenchLM(load_model(), load_method("h2o", budget=256)), tasks=["arc_easy"])`.

    - `loglikelihood`: the context runs once with exact attention and is compressed; the continuation is fed one token
      at a time through the cache. Its first token is scored from the context's last logits, which no method has
      touched: of a continuation of one token compression changes nothing. `held_back=1` keeps the context's last token
      out of the prompt and feeds it through the cache first, so that every token is scored through it.
    - `generate_until`: compressed after the context, then greedy, to a stop string, an end token or `max_gen_toks`.
    - `loglikelihood_rolling`: a stream, as `perplexity.protocol=stream`: from a cache of one token (BOS, or EOS where
      there is none) token by token, the method at work from the beginning. Texts longer than the model's positions are
      cut into the windows of lm_eval. Methods that need a prompt are refused.

    One request at a time; requests in a row with the same context share its prefill. Contexts that do not fit the
    model's positions lose their beginning, as everywhere in lm_eval. Raises UserError where the method does not fit the
    model, and for generation that is not greedy.
    """

    def __init__(
        self, loaded: LoadedModel, method: Method, kernel: str = "auto", max_gen_toks: int = 256, held_back: int = 0
    ) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise UserError(f"{loaded.name} has no tokenizer, and tasks are text; choose another model")
        check_model(loaded.model, method.rule, method.store)
        self.loaded, self.method, self.kernel = loaded, calibrate(method, loaded), kernel
        self.max_gen_toks, self.held_back = max_gen_toks, held_back
        self.tokenizer = loaded.tokenizer
        self.counts = Counts()
        self._device = loaded.device
        self._record: PrefillRecord | None = None
        self._compressed_before = False  # the step that made the last prediction
        self._ends = set(end_tokens(loaded))

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text."""
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {self.loaded.name} names no end-of-text token; choose another model")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: BOS, or EOS where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer begins every text with BOS."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tok_encode("a")[:1] == [bos]

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the tokenizer's chat template."""
        if not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer of {self.loaded.name} has no chat template; leave chat=true out")
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, but no second BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, verbose=False, **given)["input_ids"]
        return ids

    def take(self) -> Counts:
        """The counts so far; counting starts anew, and the last context's prefill is released."""
        found, self.counts, self._record = self.counts, Counts(), None
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in self._each(requests, "loglikelihood", disable_tqdm):
            fed = max(0, len(continuation) - 1)  # nothing is predicted from the last
            cache, logits = self._compressed(self._fitting(context or [self.prefix_token_id], fed), fed)
            found.append(self._score(cache, logits, continuation))
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; see the class."""
        try:
            check_stream(self.method)
        except UserError as error:
            reason = str(error).rpartition(";")[0]
            raise UserError(f"log-likelihoods of whole texts are streams: {reason}; leave such tasks out") from error
        found = []
        for (text,) in self._each([request.args for request in requests], "loglikelihood_rolling", disable_tqdm):
            tokens = self.tok_encode(text, add_special_tokens=False)
            longest = self.loaded.max_positions or len(tokens) + 1
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, longest, context_len=1)
            total = 0.0
            for context, continuation in map(make_disjoint_window, windows):
                later = len(context) - 1 + len(continuation) - 1
                cache, logits = self._compressed(context[:1], later)
                total += self._score(cache, self._feed(cache, logits, context[1:]), continuation)[0]
            found.append(total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, without the stop string; see the class."""
        asked = [
            (context, *generation_of(kwargs, self.max_gen_toks))
            for context, kwargs in (request.args for request in requests)
        ]
        return [self._generate(*one) for one in self._each(asked, "generate_until", disable_tqdm)]

    def _generate(self, context: str, until: list[str], most: int) -> str:
        ids = self._fitting(self.tok_encode(context) or [self.prefix_token_id], most)
        cache, logits = self._compressed(ids, most)
        answer: list[int] = []
        while True:
            token = int(logits.argmax(-1))
            self._count(logits)
            if token in self._ends:
                break
            answer.append(token)
            # With special tokens: a stop string may be one.
            text = self.tokenizer.decode(answer, skip_special_tokens=False)
            if len(answer) == most or any(stop in text for stop in until):
                break
            logits = self._feed(cache, logits, [token])
        self.counts.kept.append(cache.kept_tokens)
        return cut_at(self.tokenizer.decode(answer, skip_special_tokens=True), until)

    def _compressed(self, context: Sequence[int], later: int) -> tuple[AnyCache, Tensor]:
        """The method's cache of a context, with room for `later` tokens, and what it predicts next, [V]."""
        prompt = max(1, len(context) - self.held_back)
        ids = torch.tensor([context[:prompt]], device=self.loaded.device)
        room = later + len(context) - prompt
        if self.method.reads_in_chunks(prompt):
            self._record = None
        elif self._record is None or not torch.equal(self._record.ids, ids):
            self._record = None  # room for the next
            self._record = prefill(self.loaded.model, ids, [self.method.rule])
        read = ids if self._record is None else self._record
        cache = build_cache(self.loaded.model, self.method, read, max_new_tokens=room, kernel=self.kernel)
        self._compressed_before = cache.compressed_before_last_logits
        return cache, self._feed(cache, cache.last_logits[0], context[prompt:])

    def _feed(self, cache: AnyCache, logits: Tensor, tokens: Iterable[int]) -> Tensor:
        """What the cache predicts after these tokens, one at a time; `logits` where there are none."""
        for token in tokens:
            self._compressed_before = cache.has_compressed
            logits = step(self.loaded.model, torch.tensor([[token]], device=self.loaded.device), cache)[0, -1]
        return logits

    def _score(self, cache: AnyCache, logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of the tokens that follow, in nats, and whether greedy decoding would give just them."""
        total, greedy = 0.0, True
        for i, token in enumerate(continuation):
            self._count(logits)
            total += float(logits.float().log_softmax(-1)[token])
            greedy &= int(logits.argmax(-1)) == token
            if i + 1 < len(continuation):
                logits = self._feed(cache, logits, [token])
        self.counts.kept.append(cache.kept_tokens)
        return total, greedy

    def _count(self, logits: Tensor) -> None:
        """One more token is predicted by logits [V]; an entry of -inf is ruled out and counts as finite."""
        self.counts.predicted += 1
        self.counts.engaged += self._compressed_before
        self.counts.not_finite += not bool(logits.float().logsumexp(-1).isfinite())

    def _fitting(self, context: list[int], later: int) -> list[int]:
        """The end of a context that leaves the model positions for `later` more tokens."""
        limit = self.loaded.max_positions
        if limit is None or len(context) + later <= limit:
            return context
        if later >= limit:
            raise UserError(
                f"{later} tokens after a context do not fit the {limit} positions of {self.loaded.name}; "
                "type a smaller max_gen_toks, or leave this task out"
            )
        self.counts.cut += 1
        return context[later - limit :]

    def _each(self, requests: list[Any], what: str, quiet: bool) -> Iterable[Any]:
        from tqdm import tqdm  # lm_eval's own

        bar: Iterable[Any] = tqdm(requests, desc=f"{self.method.name}: {what}", disable=quiet)
        return bar


def generation_of(kwargs: dict[str, Any], default: int) -> tuple[list[str], int]:
    """Stop strings and the most tokens of a task's generation settings. Raises UserError for what is not greedy."""
    if kwargs.get("do_sample") is False:
        kwargs = {key: value for key, value in kwargs.items() if key != "temperature"}
    for key, value in kwargs.items():
        if key in GREEDY and value not in GREEDY[key]:
            raise UserError(f"{key}={value} is not greedy, and answers here are; leave it out of generation_kwargs")
        if key not in (*GREEDY, *IDLE, *LENGTHS, "until"):
            raise UserError(f"generation_kwargs: {key} is unknown here; use until, max_gen_toks and do_sample=false")
    until = kwargs.get("until") or []
    most = next((kwargs[name] for name in LENGTHS if kwargs.get(name) is not None), default)
    if isinstance(most, bool) or int(most) < 1:
        raise UserError(f"max_gen_toks={most} is no number of tokens; use 1 or more")
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop], int(most)


def cut_at(text: str, until: Iterable[str]) -> str:
    """The text before the first stop string."""
    return text[: min((text.index(stop) for stop in until if stop in text), default=len(text))]
