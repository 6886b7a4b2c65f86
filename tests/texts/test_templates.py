"""Chat templates: what stands before and after a message, and templates that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvbench.errors import UserError
from kvbench.texts.templates import between_turns, template_of


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    made.chat_template = template
    return made


def test_what_a_template_puts_around_a_message() -> None:
    found = template_of(tokenizer("<user>{{ messages[0]['content'] }}<assistant>"), "chat")
    assert (found.before, found.after) == ("<user>", "<assistant>")
    assert template_of(None, "base").before == ""


def test_a_template_with_todays_date_writes_the_same_every_day() -> None:
    found = template_of(tokenizer("{{ strftime_now('%d %B %Y') }}: {{ messages[0]['content'] }}"), "chat")
    assert found.before == "26 July 2024: "


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no users here') }}", "fails .no users here"),
        ("{{ messages[0]['content'] ", "this chat template fails"),
        ("{{ absent.part }}{{ messages[0]['content'] }}", "this chat template fails .*absent"),
        ("{{ messages[0]['content'] + 1 }}", "this chat template fails"),
        ("{{ messages[0]['content'] }} {{ messages[0]['content'] }}", "writes the message 2 times, not once"),
        ("{{ strftime_now('%d' + '%B') }}{{ messages[0]['content'] }}", "writes today's date in a format"),
        ("{{ messages[0]['content'] | upper }}", "writes the message 0 times, not once"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        template_of(tokenizer(template), "chat")
    assert "\n" not in str(refused.value) and "type needle.template=base" in str(refused.value)


def test_a_tokenizer_without_a_template_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        template_of(tokenizer(""), "chat")


CONVERSATION = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_a_template_puts_between_an_answer_and_the_next_question() -> None:
    assert between_turns(tokenizer(CONVERSATION), "chat") == "</s><user>"
    assert between_turns(None, "base") == ""


def test_a_template_that_takes_one_message_only_is_refused() -> None:
    with pytest.raises(UserError, match=r"three messages.*turns.template=base"):
        between_turns(tokenizer("<user>{{ messages[0]['content'] }}<assistant>"), "chat")
