"""What a tokenizer's chat template puts around messages."""

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvbench.errors import UserError

MARK = "<<<here>>>"

DAY = datetime(2024, 7, 26)
"""What chat templates that ask for the date are told."""


@dataclass(frozen=True)
class Template:
    """What the tokenizer's chat template puts before and after a user's message; nothing for a base model."""

    before: str = ""
    after: str = ""
    sha256: str | None = None


def dated(template: Any) -> Any:
    """A chat template with DAY where it asks for today's date.

    Raises UserError where it asks with a format that it computes.
    """
    if not isinstance(template, str):
        return None  # several templates under names: the tokenizer chooses
    found = re.sub(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)", lambda call: repr(DAY.strftime(call[2])), template)
    if "strftime_now(" in found:
        raise UserError(
            "needle.template=chat: this chat template writes today's date in a format that it computes, so prompts "
            "would change from day to day; type needle.template=base"
        )
    return found


def template_of(tokenizer: Any, kind: str) -> Template:
    """The `chat` template of the tokenizer, or none at all for `base`.

    A template that writes today's date writes DAY instead, so that prompts do not change from day to day. Raises
    UserError where there is no template, or one that fails or does not pass the message on once, as it is.
    """
    if kind == "base":
        return Template()
    text = _rendered(tokenizer, [{"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise UserError(
            f"needle.template=chat: this chat template writes the message {text.count(MARK)} times, not once as it is; "
            "type needle.template=base"
        )
    before, _, after = text.partition(MARK)
    return Template(before, after, hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest())


def between_turns(tokenizer: Any, kind: str) -> str:
    """What stands between an answer and the user's next message; nothing for a base model.

    Raises UserError as `template_of`, and for a template that cannot continue a conversation.
    """
    if kind == "base":
        return ""
    roles = ("user", "assistant", "user")
    text = _rendered(tokenizer, [{"role": role, "content": f"{MARK}{i}"} for i, role in enumerate(roles)])
    pieces = re.split(rf"{MARK}\d", text)
    if len(pieces) != len(roles) + 1:
        raise UserError(
            "turns.template=chat: this chat template does not write three messages once each; type turns.template=base"
        )
    return pieces[2]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise UserError("needle.template=chat: this tokenizer has no chat template; type needle.template=base")
    template = dated(tokenizer.chat_template)
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=template
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"needle.template=chat: this chat template fails ({reason}); type needle.template=base"
        ) from error
    return text
