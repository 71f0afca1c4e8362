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

_LONGEST = 1 << 24  # characters, of a prompt or of a text made by multiplication
_MOST_BITS = 1 << 12  # of a power


class ChatTemplate:
    """A template, compiled once. Raises RequestError if it is no valid Jinja."""

    def __init__(self, source: str) -> None:
        self._template = _compile(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt. Raises RequestError for messages of a wrong form and whatever the template refuses."""
        _check_messages(messages)
        known = {"tools": None, "documents": None, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        parts, size = [], 0
        try:
            for part in self._template.generate(**known):
                size += len(part)
                if size > _LONGEST:
                    raise ValueError(f"its prompt is longer than {_LONGEST} characters")
                parts.append(part)
        except Exception as error:  # a template may fail in any way
            raise RequestError(f"The model's chat template refuses these messages: {_reason(error)}.") from error
        return "".join(parts)


def _check_messages(messages: object) -> None:
    fits = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not fits or not messages:
        raise RequestError("A chat must be a list of at least one message.")
    for place, message in enumerate(messages):  # type: ignore[arg-type, var-annotated]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"Message {place} of the chat is {_shown(message)}; it must be a mapping with a 'role' and a 'content'."
            )


def _reason(error: Exception) -> str:
    """What an error says, as the end of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _compile(source: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's way)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Without products and powers that take all memory or time, be it when the template is compiled."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except RecursionError:
        raise RequestError("The model's chat template is nested too deeply.") from None
    except Exception as error:  # constant parts are worked out here
        raise RequestError(f"The model's chat template is no valid Jinja template: {_reason(error)}.") from error


def _check_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS:
            raise ValueError(f"a power has more than {_MOST_BITS} bits")
        return
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > _LONGEST:
            raise ValueError(f"a product is longer than {_LONGEST}")


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
