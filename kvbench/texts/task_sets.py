"""Published tasks as samples: from the hub through `datasets`, or from files of a folder in the same columns.

A sample of LongBench or RULER has a `context`, a `question` that may come after the context was compressed, an
`answer_prefix`, the references (`answers` or `answer`), `max_new_tokens`, and for classifications `all_classes`. Both
are on the hub in these columns. A mathematical problem has `problem` and `answer`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvbench.errors import UserError
from kvbench.hub import hub_or_cache
from kvbench.texts.answer_metrics import ANSWER_TOKENS, LONGBENCH, longbench, ruler
from kvbench.texts.load import one_line_errors
from kvbench.texts.math_answers import ANSWER_TOKENS as MATH_TOKENS
from kvbench.texts.math_answers import INSTRUCTION, math
from kvbench.texts.math_answers import TASKS as MATH
from kvbench.texts.templates import Template, template_of

RULER = (
    "cwe",
    "fwe",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multiquery",
    "niah_multivalue",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "qa_1",
    "qa_2",
    "vt",
)
HUB = {"longbench": "Xnhyacinth/LongBench", "ruler": "simonjegou/ruler"}
NAMES = {"longbench": tuple(LONGBENCH), "ruler": RULER, "math": MATH}
SCORES = {"longbench": longbench, "ruler": ruler, "math": math}
NO_LIMIT = 2**62
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class TaskSettings(Protocol):
    """Settings that samples are read by: see `kvbench.measures.tasks.Tasks`."""

    @property
    def set(self) -> str: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def samples(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def template(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def path(self) -> str | None: ...
    @property
    def answer_tokens(self) -> int | None: ...


@dataclass(frozen=True)
class Sample:
    """One question. classes: what a classification can answer."""

    context: str
    question: str
    answer_prefix: str
    references: list[str]
    answer_tokens: int
    classes: list[str]


def check_tasks(
    settings: TaskSettings, max_positions: int | None, tokenizer: Any, bos: Sequence[int] = ()
) -> dict[str, list[Sample]]:
    """The samples of every task. Raises UserError for names that the set does not have, files that are not there or
    hold something else, prompts and answers beyond the model, and prompts of RULER that would be cut: what is asked for
    could lie in the middle."""
    for name in settings.names:
        if name not in NAMES[settings.set]:
            known = ", ".join(NAMES[settings.set])
            raise UserError(f"tasks.names={name} is not in {settings.set}; choose from {known}")
        if settings.path is not None:
            local_file(settings, name)
    if settings.path is None and settings.set not in HUB:
        raise UserError(
            f"tasks.set={settings.set} reads files; type tasks.path=FOLDER with {settings.names[0]}.jsonl or "
            f"{settings.names[0]}.parquet, columns problem and answer"
        )
    if settings.path is None and not hub_or_cache():
        raise UserError(
            f"tasks.set={settings.set} is on the hub ({HUB[settings.set]}) and the hub cannot be reached; type "
            f"tasks.path=FOLDER with NAME.jsonl or NAME.parquet files (HF_HUB_OFFLINE=1 if it was loaded before)"
        )
    found = {name: load_samples(settings, name) for name in settings.names}
    answer = max(sample.answer_tokens for samples in found.values() for sample in samples)
    if max_positions is not None and settings.longest + answer > max_positions:
        raise UserError(
            f"tasks.longest={settings.longest} and answers of {answer} tokens do not fit the model's {max_positions} "
            f"positions; type tasks.longest={max(1, max_positions - answer)} or less"
        )
    if settings.set == "ruler":
        template = template_of(tokenizer, settings.template)
        needed = max(
            sum(map(len, encode(tokenizer, sample, NO_LIMIT, template, bos)))
            for samples in found.values()
            for sample in samples
        )
        if needed > settings.longest:
            raise UserError(
                f"tasks.longest={settings.longest} would cut prompts of {needed} tokens, and what they "
                f"hide with them; type tasks.longest={needed}"
            )
    return found


def load_samples(settings: TaskSettings, name: str) -> list[Sample]:
    """The first `tasks.samples` samples of a task. Raises UserError where they cannot be loaded."""
    if settings.path is not None and not local_file(settings, name).read_bytes().strip():
        raise UserError(f"{local_file(settings, name)} holds no samples")
    with one_line_errors(f"{name} of {settings.set}"):
        rows = list(_rows(settings, name))
    if not rows:
        raise UserError(f"{name} of {settings.set} holds no samples")
    read = _problem if settings.set == "math" else partial(_sample, of=settings.set)
    samples = [read(row, name, i) for i, row in enumerate(rows)]
    most = settings.answer_tokens
    return samples if most is None else [replace(sample, answer_tokens=most) for sample in samples]


def _rows(settings: TaskSettings, name: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    if settings.path is not None:
        file = local_file(settings, name)
        rows = load_dataset(FORMATS[file.suffix], data_files=str(file), split="train", streaming=True)
    elif settings.set == "ruler":
        every = load_dataset(HUB["ruler"], str(settings.length), split="test")
        rows = every.filter(lambda row: row["task"] == name)
    else:
        rows = load_dataset(HUB["longbench"], name, split="test")
    for i, row in enumerate(rows):
        if i == settings.samples:
            return
        yield row


def local_file(settings: TaskSettings, name: str) -> Path:
    """NAME.jsonl, .json or .parquet in `tasks.path`. Raises UserError where there is none."""
    folder = Path(str(settings.path)).expanduser()
    found = [folder / f"{name}{ending}" for ending in FORMATS if (folder / f"{name}{ending}").is_file()]
    if not found:
        raise UserError(
            f"tasks.path={settings.path} has no {name}.jsonl, {name}.json or {name}.parquet; "
            "give the folder that holds them"
        )
    return found[0]


def files_fingerprint(settings: TaskSettings) -> str:
    """sha256 of the local files; of a set on the hub its address, which the hub keeps under one name for good."""
    if settings.path is None:
        return HUB[settings.set]
    files = [local_file(settings, name) for name in settings.names]
    return hashlib.sha256("".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files).encode()).hexdigest()


def _sample(row: dict[str, Any], name: str, i: int, of: str) -> Sample:
    missing = [column for column in ("context", "question") if not isinstance(row.get(column), str)]
    references = row.get("answers") or row.get("answer")
    if missing or not references:
        raise UserError(
            f"sample {i} of {name} lacks {missing[0] if missing else 'answers'}; a sample has context, "
            "question and answers"
        )
    if not row["context"].strip():
        raise UserError(f"sample {i} of {name} has an empty context; leave it out")
    listed = [references] if isinstance(references, str) else [str(reference) for reference in references]
    tokens = row.get("max_new_tokens") or 64
    if isinstance(tokens, bool) or tokens != tokens or not isinstance(tokens, int | float) or not 1 <= tokens < 2**20:
        raise UserError(f"sample {i} of {name}: max_new_tokens={tokens} is not a whole number of at least 1")
    if of == "longbench":
        tokens = min(int(tokens), ANSWER_TOKENS[name]) if row.get("max_new_tokens") else ANSWER_TOKENS[name]
    prefix = row.get("answer_prefix") or ""
    if not isinstance(prefix, str):
        raise UserError(f"sample {i} of {name}: answer_prefix={prefix!r} is not text")
    classes = [str(label) for label in row.get("all_classes") or []]
    return Sample(row["context"], row["question"], prefix, listed, int(tokens), classes)


def _problem(row: dict[str, Any], name: str, i: int) -> Sample:
    """A mathematical problem: all of it is the prompt, and the working-out is generated."""
    problem, answer = row.get("problem"), row.get("answer")
    if not isinstance(problem, str) or not problem.strip() or answer is None or isinstance(answer, bool):
        raise UserError(f"sample {i} of {name} lacks problem or answer; a sample has these two columns")
    return Sample(problem + INSTRUCTION, "", "", [str(answer)], MATH_TOKENS, [])


def encode(
    tokenizer: Any, sample: Sample, longest: int, template: Template, bos: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Context, behind the tokens `bos`, and question in tokens, `longest` together at most.

    What is longer loses its middle as LongBench cuts it: the first and the last half of it all are left, the question
    being part of the last.
    """
    head, body, question = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for text in (template.before, sample.context, sample.question + template.after + sample.answer_prefix)
    )
    head = [*bos, *head]
    room = max(2, longest - len(head) - len(question))
    if len(body) > room:
        first = min(max(1, longest // 2 - len(head)), room - 1)
        body = body[:first] + body[len(body) - (room - first) :]
    return head + body, question
