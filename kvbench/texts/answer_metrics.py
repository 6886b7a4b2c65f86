"""Scores of answers, from 0 to 1: the metrics of LongBench's English sets and of RULER.

LongBench: Bai et al., 2023, arXiv:2308.14508; the metrics are those of its published scores. A classification is
divided by the number of classes that the answer names. Code is compared by its first line that is no comment.
RULER: Hsieh et al., 2024, arXiv:2404.06654, section 3. No torch here.
"""

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from kvbench.errors import UserError

Metric = Callable[[str, str, Sequence[str]], float]
"""(answer, reference, all classes) -> score."""

FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Sets with examples in the prompt: a model continues with another example, so only the first line counts."""

WITHOUT_CHAT = (*FIRST_LINE, "lcc", "repobench-p")
"""Sets that LongBench runs without a chat template."""


def normal(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (Rajpurkar et al., 2016, arXiv:1606.05250)."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall over words."""
    ours, theirs = normal(answer), normal(reference)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else 0.0


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F of the longest common subsequences, as the package `rouge` computes it and LongBench publishes it.

    Raises UserError where the package is missing.
    """
    try:
        from rouge import Rouge
    except ImportError as error:
        raise UserError("this set is scored with ROUGE-L; type pip install 'kvbench[tasks]'") from error
    if not answer.strip(" .\n") or not reference.strip(" .\n"):
        return 0.0
    limit = sys.getrecursionlimit()
    # The package recurses over the words of two sentences; an answer that babbles without a full stop is one.
    sys.setrecursionlimit(limit + 4 * (len(answer.split()) + len(reference.split())))
    try:
        return float(Rouge().get_scores([answer], [reference])[0]["rouge-l"]["f"])
    finally:
        sys.setrecursionlimit(limit)


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the answer) where the right one is among them; parts of its name do not count."""
    named = [name for name in classes if name in answer]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def numbers(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the answer's numbers that are the reference's first; 0 where the reference has none."""
    right, found = re.search(r"\d+", reference), re.findall(r"\d+", answer)
    return found.count(right[0]) / len(found) if right and found else 0.0


def code(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line that is no comment and no fence, in hundredths."""
    lines = answer.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, first, reference).ratio()) / 100


LONGBENCH: dict[str, Metric] = {
    "narrativeqa": f1,
    "qasper": f1,
    "multifieldqa_en": f1,
    "hotpotqa": f1,
    "2wikimqa": f1,
    "musique": f1,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "trec": classification,
    "triviaqa": f1,
    "samsum": rouge_l,
    "passage_count": numbers,
    "passage_retrieval_en": numbers,
    "lcc": code,
    "repobench-p": code,
}
"""The English sets."""

ANSWER_TOKENS = {
    "narrativeqa": 128,
    "qasper": 128,
    "multifieldqa_en": 64,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "gov_report": 512,
    "qmsum": 512,
    "multi_news": 512,
    "trec": 64,
    "triviaqa": 32,
    "samsum": 128,
    "passage_count": 32,
    "passage_retrieval_en": 32,
    "lcc": 64,
    "repobench-p": 64,
}
"""Tokens of an answer at most, as in LongBench's published scores; copies of the set allow more, which lowers F1."""


def longbench(task: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The best score over the references."""
    said = answer.lstrip("\n").split("\n")[0] if task in FIRST_LINE else answer
    return max((LONGBENCH[task](said, reference, classes) for reference in references), default=0.0)


def ruler(task: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the references that the answer holds; for questions about documents (`qa`) one is enough."""
    found = [reference.lower() in answer.lower() for reference in references]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)
