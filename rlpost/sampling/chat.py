"""Chat templates: conversations as token ids, and turns that join as they were."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from rlpost.sampling.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Characters of private use, so in no template and hardly in any text: what stands
# between the first two is data, and the third stands for a response.
_OPEN, _CLOSE, _RESPONSE = "\ue0d0", "\ue0d1", "\ue0d2"
_DATA = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    names: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """A conversation as text, by a checkpoint's Jinja template.

    Follows the conventions of Hugging Face templates: blocks are trimmed, and
    `raise_exception`, `strftime_now`, `tojson` and `{% generation %}` are there. The
    template runs in a sandbox, since a checkpoint is not code that one chose to run.

    Args:
        template: the text of the template.
        messages: [{"role": ..., "content": ...}, ...].
        tools: descriptions of tools, JSON values, if the template knows of any.
        add_generation_prompt: end with the opening of the assistant's turn.
        names: further variables, such as bos_token.
        now: what `strftime_now` tells; the present where None. A run that must repeat
            exactly gives it.

    Raises:
        ValueError: if the template is not valid, refuses these messages, or reaches for
            what the sandbox withholds.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            raise_exception=_refuse,
            strftime_now=(now or datetime.datetime.now()).strftime,
            **(names or {}),
        )
    except SecurityError as error:
        raise ValueError(
            f"the chat template reaches for what its sandbox withholds: {error}"
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is wrong in line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # whatever an expression of the template may raise
        raise ValueError(
            f"the chat template failed on these messages: {error}"
        ) from error


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    **names: Any,
) -> list[int]:
    """The token ids of a prompt: plain text, or messages through the chat template.

    Control tokens are read as such where the template writes them. Where a user or a
    tool writes them they stay text: data cannot forge a turn.

    Args:
        tokenizer: of the checkpoint, with its templates.
        prompt: plain text, which is begun with `bos_id` if the checkpoint asks for it,
            or messages, as in `render`.
        tools, add_generation_prompt, now, names: as in `render`.

    Raises:
        ValueError: as `render`; if messages meet a tokenizer without a template.
    """
    if isinstance(prompt, str):
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        return ([] if bos is None else [bos]) + tokenizer.encode(prompt)
    text = render(
        template_of(tokenizer, tools),
        _guarded(prompt, tokenizer),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        names={**tokenizer.names, **names},
        now=now,
    )
    return _ids(tokenizer, text)


def turn_ids(
    tokenizer: Tokenizer,
    response_ids: Sequence[int],
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
    **names: Any,
) -> list[int]:
    """The ids that follow a sampled response when the conversation goes on.

    What was sampled stays as it is; only what comes after it is written and encoded,
    alone: the close of the assistant's turn as far as the response lacks it, the new
    messages, and the opening of the next turn. So a row is the prompt's ids, the
    response's, these, the next response's, and so on, and no id is ever re-encoded.

    Args:
        tokenizer: of the checkpoint, with its templates.
        response_ids: what was sampled, the stop token included if there was one.
        messages: a tool's result, say, or the user's next question.
        tools, add_generation_prompt, now, names: as in `render`.

    Raises:
        ValueError: as `render`; if the template does not show an assistant's words as
            they are, exactly once.
    """
    history: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _RESPONSE},
    ]
    text = render(
        template_of(tokenizer, tools),
        history + _guarded(messages, tokenizer),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        names={**tokenizer.names, **names},
        now=now,
    )
    if text.count(_RESPONSE) != 1:
        raise ValueError(
            f"the chat template shows an assistant's message {text.count(_RESPONSE)} "
            "times instead of once: turns cannot be joined by it"
        )
    after = text.partition(_RESPONSE)[2]
    if len(response_ids) and response_ids[-1] in tokenizer.stop_ids:
        after = after.removeprefix(tokenizer.token_text(response_ids[-1]))
    return _ids(tokenizer, after)


def template_of(tokenizer: Tokenizer, tools: Sequence[Any] | None = None) -> str:
    """The template for a conversation, the one for tools where there is one."""
    if not tokenizer.templates:
        raise ValueError(
            "the prompt has messages but the tokenizer has no chat template: give "
            "plain text, or a tokenizer with `templates`"
        )
    if tools and "tool_use" in tokenizer.templates:
        return tokenizer.templates["tool_use"]
    if "default" not in tokenizer.templates:
        raise ValueError(
            "no chat template is called 'default', only "
            f"{sorted(tokenizer.templates)}: rename one"
        )
    return tokenizer.templates["default"]


def _guarded(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Message]:
    """The messages with what looks like control tokens in data marked as such."""
    control = _control_texts(tokenizer)

    def guard(message: Message) -> Message:
        content = message.get("content")
        if message.get("role") not in ("user", "tool") or not isinstance(content, str):
            return message
        plain = re.sub(f"[{_OPEN}{_CLOSE}{_RESPONSE}]", "\ufffd", content)
        if control is not None:
            plain = control.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", plain)
        return {**message, "content": plain}

    return [guard(message) for message in messages]


def _control_texts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    texts = [
        piece.decode() for i in tokenizer.control if (piece := tokenizer.pieces[i])
    ]
    texts.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for index, part in enumerate(_DATA.split(text)):  # data at odd places
        if part:
            ids += tokenizer.encode(part, special=index % 2 == 0)
    return ids


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words; here it lets them through."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)
