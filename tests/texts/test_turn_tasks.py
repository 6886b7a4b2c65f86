"""Tasks with several questions: what is hidden answers each of them, and only its own."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch

from kvbench.errors import UserError
from kvbench.measures.turns import Turns
from kvbench.texts.drafts import Question, Words
from kvbench.texts.needle_tasks import TASKS, score
from kvbench.texts.prompts import Prompt, check_prompts, make_prompts
from kvbench.texts.turn_tasks import MOST_TURNS, TURN_TASKS
from tests.shared.text import CHARACTERS, character_tokenizer, prose

TOKENIZER = character_tokenizer(CHARACTERS + "[]/")
TEXT = torch.tensor(TOKENIZER(prose(6_000))["input_ids"])
LENGTH = 2_500
NAMES = [task.name for task in TURN_TASKS]
SETTINGS = Turns(lengths=[LENGTH], samples=6)


def prompts(task: str) -> list[Prompt]:
    asked = dataclasses.replace(SETTINGS, tasks=[task])
    return make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)


def answered(task: str, text: str, asked: Question) -> str:
    """The answer that a reader of the text finds, by rules written down again."""
    if task == "key_value":
        (key,) = re.findall(r"value of (\S+) is$", asked.lead)
        (found,) = re.findall(rf"^The value of {key} is (\d+)\.$", text, re.M)
    elif task == "multi_needle":
        (word,) = re.findall(r"number for (\w+) is:$", asked.lead)
        (found,) = re.findall(rf"magic number for {word} is: (\d+)\.", text)
    elif task == "variables":
        (name,) = re.findall(r"does VAR (\w+) hold", asked.text)
        (source,) = re.findall(rf"^VAR {name} = VAR (\w+)$", text, re.M)
        (found,) = re.findall(rf"^VAR {source} = (\d+)$", text, re.M)
        assert text.index(f"VAR {source} = {found}") < text.index(f"VAR {name} = VAR {source}")
    elif task == "prefix_suffix":
        ((first, last),) = re.findall(r"string from (\w+) to (\w+) is", asked.lead)
        (middle,) = re.findall(rf"^{first}-(\d+)-{last}$", text, re.M)
        found = f"{middle}-{last}"
    else:
        (code,) = re.findall(r"^Begin every answer with (\w+)\.", text)
        (word,) = re.findall(r"number for (\w+)\?", asked.text)
        (number,) = re.findall(rf"magic number for {word} is: (\d+)\.", text)
        found = f"{code}. {number}"
    return str(found)


@pytest.mark.parametrize("task", NAMES)
def test_a_reader_answers_every_question(task: str) -> None:
    for prompt in prompts(task):
        text, turns = TOKENIZER.decode(prompt.ids), prompt.turns
        assert len(prompt.ids) == LENGTH and len(turns) == MOST_TURNS
        right = [answered(task, text, turn.asked) for turn in turns]
        assert len({turn.asked.text + turn.asked.lead for turn in turns}) == MOST_TURNS
        for i, turn in enumerate(turns):
            assert turn.asked.right_answer.strip() == right[i]
            assert score(turn.asked, turn.asked.right_answer) == 1
            assert TOKENIZER.decode(turn.right) == turn.asked.right_answer
            others = [other for j, other in enumerate(right) if j != i]
            obeyed = task == "instruction"  # every answer begins with the code word
            assert all(score(turn.asked, other) == obeyed for other in others)


@pytest.mark.parametrize("task", NAMES)
def test_texts_differ_by_sample_and_not_by_the_number_of_turns(task: str) -> None:
    found = prompts(task)
    assert len({tuple(prompt.ids) for prompt in found}) == len(found) == 6
    fewer = dataclasses.replace(SETTINGS, tasks=[task], turns=1)
    again = make_prompts(TOKENIZER, TEXT, 0, fewer, LENGTH)
    assert [(prompt.ids, prompt.turns) for prompt in again] == [(prompt.ids, prompt.turns) for prompt in found]


def test_an_instruction_stands_in_the_first_2_percent() -> None:
    for prompt in prompts("instruction"):
        end = TOKENIZER.decode(prompt.ids).index(".\n") + 2
        assert end <= 0.02 * LENGTH
    short = dataclasses.replace(SETTINGS, tasks=["instruction"], lengths=[1_000])
    with pytest.raises(UserError, match=r"turns.lengths=1000: the \d+ tokens.*2% of the prompt; type turns.lengths="):
        check_prompts(TOKENIZER, TEXT, 0, short, None)


def test_other_strings_share_a_beginning_or_an_end_and_never_both() -> None:
    for prompt in prompts("prefix_suffix"):
        lines = re.findall(r"^(\w+)-\d+-(\w+)$", TOKENIZER.decode(prompt.ids), re.M)
        asked = [re.findall(r"from (\w+) to (\w+) is", turn.asked.lead)[0] for turn in prompt.turns]
        assert all(lines.count(pair) == 1 for pair in asked)
        shared = [pair for pair in lines if any((pair[0] == a) != (pair[1] == b) for a, b in asked)]
        assert len(shared) > len(lines) / 4


def test_positions_of_all_turns_are_checked() -> None:
    asked = dataclasses.replace(SETTINGS, mode=["conversation"], samples=1)
    (prompt,) = make_prompts(TOKENIZER, TEXT, 0, asked, LENGTH)
    needed = LENGTH + asked.most_asked_tokens(prompt)
    check_prompts(TOKENIZER, TEXT, 0, asked, needed, (), asked.most_asked_tokens)
    with pytest.raises(UserError, match=rf"turns.lengths={LENGTH} needs {needed} positions"):
        check_prompts(TOKENIZER, TEXT, 0, asked, needed - 1, (), asked.most_asked_tokens)


def test_drafts_do_not_depend_on_words_of_the_text() -> None:
    for name in NAMES:
        drafts = [TASKS[name].draft(random.Random(3), Words(pool, LENGTH)) for pool in ((), ("a", "b"))]
        assert drafts[0].needles == drafts[1].needles and drafts[0].questions == drafts[1].questions
