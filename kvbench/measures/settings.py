"""The settings of each measure, checked. A `perplexity:` node becomes a `Perplexity`."""

import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from kvbench.errors import UserError


@dataclass(frozen=True)
class Perplexity:
    """`windows` windows of `context` prompt tokens and `tokens` scored ones, `batch` windows at a time.

    protocol: `prefill_decode` scores token by token after the prompt; `stream` token by token from an empty cache, and
    `context` plays no part; `chunked` as the first, in blocks of `chunk` tokens. buckets: parts of the scored tokens
    that are reported apart as well.
    """

    context: int
    tokens: int
    windows: int
    batch: int
    protocol: Literal["prefill_decode", "stream", "chunked"] = "prefill_decode"
    chunk: int = 64
    buckets: int = 4

    @property
    def prompt(self) -> int:
        """Tokens that are fed before the first is scored; a stream needs one."""
        return 1 if self.protocol == "stream" else self.context

    @property
    def longest(self) -> int:
        return self.prompt + self.tokens

    @property
    def step(self) -> int:
        """Tokens in one forward."""
        return self.chunk if self.protocol == "chunked" else 1

    @property
    def name(self) -> str:
        """The protocol as rows name it: blocks of another size are another protocol."""
        return f"chunked{self.chunk}" if self.protocol == "chunked" else self.protocol


NeedleTask = Literal[
    "single_number",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
]


@dataclass(frozen=True)
class Needle:
    """Prompts of each length with a needle at each depth, `samples` of each kind, `batch` at a time.

    tasks: names of `kvbench.texts.needle_tasks`. question: whether the cache is compressed before the question is known
    (`after`: it comes afterwards), or with it. template: `chat` wraps prompts in the tokenizer's own. values: what is
    hidden, where it is not to be the task's own kind.
    """

    lengths: list[int]
    depths: list[float]
    samples: int
    question: list[Literal["after", "before"]]
    batch: int
    tasks: list[NeedleTask] = field(default_factory=lambda: ["single_number"])
    template: Literal["base", "chat"] = "base"
    values: Literal["task", "number", "word", "uuid"] = "task"


@dataclass(frozen=True)
class Fidelity:
    """`samples` prompts of each context, each continued greedily by `tokens` tokens at most, `batch` at a time."""

    contexts: list[int]
    tokens: int
    samples: int
    batch: int


@dataclass(frozen=True)
class Tasks:
    """The first `samples` samples of the tasks `names` of a published set, contexts cut to `longest` tokens.

    path: a folder with NAME.jsonl or NAME.parquet files instead of the hub. length: which of RULER's lengths.
    """

    set: Literal["longbench", "ruler"]
    names: list[str]
    samples: int
    longest: int
    question: list[Literal["after", "before"]]
    template: Literal["base", "chat"] = "base"
    length: int = 4096
    path: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes after each context and `tokens` decoded tokens, each in a process of its own where `isolate`."""

    contexts: list[int]
    tokens: int
    isolate: bool = True


@dataclass(frozen=True)
class Latency:
    """Decode times after each context, in each batch: `warmup` discarded steps, then `steps` timed ones.

    graph: on CUDA a step is the replay of a captured graph, unless False. tokens_natural: most tokens of a generation
    that goes on to the end of its text; 0: none. throughput: also search for the largest batch that fits, and time it.
    """

    contexts: list[int]
    steps: int
    warmup: int
    graph: Literal["auto", False] = "auto"
    batches: list[int] = field(default_factory=lambda: [1])
    tokens_natural: int = 0
    throughput: bool = False


@dataclass(frozen=True)
class Paging:
    """Requests that have `prefix` tokens in common and `own` ones behind them, one of each; `tokens` decoded after."""

    prefix: int
    own: list[int]
    tokens: int


Setting = Perplexity | Needle | Tasks | Fidelity | Memory | Latency | Paging
Settings = TypeVar("Settings", bound=Setting)

KINDS: dict[str, type[Setting]] = {
    "perplexity": Perplexity,
    "needle": Needle,
    "tasks": Tasks,
    "fidelity": Fidelity,
    "memory": Memory,
    "latency": Latency,
    "paging": Paging,
}


def one_by_one(setting: Setting) -> list[Setting]:
    """The same settings split by context, latency's by batch too: what is measured, and kept, as a whole."""
    if isinstance(setting, Perplexity | Paging):
        return [setting]
    if isinstance(setting, Needle):
        return [replace(setting, lengths=[length]) for length in setting.lengths]
    if isinstance(setting, Tasks):
        return [replace(setting, names=[name]) for name in setting.names]
    alone = [replace(setting, contexts=[context]) for context in setting.contexts]
    return [one for setting in alone for one in _by_batch(setting)]


def _by_batch(setting: Setting) -> list[Setting]:
    if not isinstance(setting, Latency):
        return [setting]
    apart: list[Setting] = [replace(setting, batches=[batch], throughput=False) for batch in setting.batches]
    return [*apart, replace(setting, batches=[])] if setting.throughput else apart


def context_of(setting: Setting) -> int:
    """Tokens of prompt: of one of `one_by_one`, else of the longest."""
    if isinstance(setting, Perplexity):
        return setting.tokens if setting.protocol == "stream" else setting.context
    if isinstance(setting, Paging):
        return setting.prefix + max(setting.own)
    if isinstance(setting, Tasks):
        return setting.longest
    return max(setting.lengths if isinstance(setting, Needle) else setting.contexts)


def without_context(setting: Setting) -> dict[str, Any]:
    """The settings but the context: what cells of different sizes have in common."""
    sizes = ("context", "lengths", "contexts", "longest")
    return {key: value for key, value in asdict(setting).items() if key not in sizes}


def read_settings(kind: type[Settings], name: str, node: Mapping[str, Any]) -> Settings:
    """A settings object from the config node `name`. Raises UserError, naming the key, for a value of a wrong kind."""
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(node) - set(hints))
    if unknown:
        raise UserError(f"{name}.{unknown[0]} is no setting; choose from {', '.join(f.name for f in fields(kind))}")
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}
    asked = [key for key in hints if key in node or key not in optional]
    return kind(**{key: _checked(f"{name}.{key}", node.get(key), hints[key]) for key in asked})


def _checked(key: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UserError(f"{key}={value} is unknown; type {' or '.join(f'{key}={choice}' for choice in choices)}")
        return value
    if typing.get_origin(hint) is list:
        items = list(value) if isinstance(value, list | tuple) else [value]
        if not items:
            raise UserError(f"{key}=[] lists nothing; type at least one value")
        # A value given twice would be measured twice and counted as two.
        return list(dict.fromkeys(_checked(key, item, typing.get_args(hint)[0]) for item in items))
    if hint is str or hint == str | None:
        if not (isinstance(value, str) and value.strip()) and not (value is None and hint is not str):
            raise UserError(f"{key}={value} is no name; type {key}=NAME")
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise UserError(f"{key}={value} is not a depth; type numbers from 0 to 1")
        return float(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"{key}={value} is not true or false")
        return value
    lowest = 0 if key.endswith(("warmup", "tokens_natural")) else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{key}={value} is not a whole number of at least {lowest}; type {key}=16, for example")
    return value
