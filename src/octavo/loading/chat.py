"""Chat templates: messages to a prompt, in Jinja's sandbox. Knows no tokens and no model.

A template comes with the model and is not to be trusted: it runs in an immutable sandboxed environment, as in
Transformers, whose conventions (variables, `tojson`, `strftime_now`, `raise_exception`, `{% generation %}`) it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """A template, compiled once. Raises RequestError if it is no valid Jinja."""

    def __init__(self, source: str) -> None:
        self._template = _compile(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt. Raises RequestError for messages of a wrong form and whatever the template refuses."""
        _check_messages(messages)
        known = {"tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                **{**known, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # a template may fail in any way
            raise RequestError(f"The model's chat template refuses these messages: {error}.") from error


def _check_messages(messages: object) -> None:
    fits = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not fits or not messages:
        raise RequestError("A chat must be a list of at least one message.")
    for place, message in enumerate(messages):  # type: ignore[arg-type, var-annotated]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"Message {place} of the chat is {_shown(message)}; it must be a mapping with a 'role' and a 'content'."
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _compile(source: str) -> Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's way)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise RequestError(f"The model's chat template is no valid Jinja template: {error}.") from error
    except RecursionError:
        raise RequestError("The model's chat template is nested too deeply.") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
