"""Messages and tools to the tokens the model is asked with, and what the answer then may look like. Knows no engine."""

from __future__ import annotations

import json
from typing import Any

from octavo.grammar import Grammar
from octavo.loading.tokenizer import Tokenizer
from octavo.server.errors import ApiError
from octavo.server.schemas import AssistantMessage, ChatRequest, Content, Message, TokenizeChat, ToolMessage
from octavo.server.tools import ToolParser, Tools, prompted

_OURS = ("messages", "tools", "add_generation_prompt")  # variables of a template that have parameters of their own


class Conversation:
    """The messages and tools of a body, ready to be rendered. Raises ApiError or RequestError for what cannot be."""

    def __init__(self, body: ChatRequest | TokenizeChat, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        chat = body if isinstance(body, ChatRequest) else None
        self._tools = Tools.of(
            [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            _choice(chat),
            chat.parallel_tool_calls if chat else None,
            template=tokenizer.chat_template,
        )
        messages = [_plain(message) for message in body.messages or ()]
        self._messages, self._variables = prompted(messages, self._tools, tokenizer.chat_template)
        self._variables |= _extra(body)
        self._add_generation_prompt = body.add_generation_prompt is not False
        said = json.dumps([self._messages, self._variables], ensure_ascii=False)
        self.length = len(said)  # characters, some more than the texts'

    def encode(self) -> list[int]:
        """The tokens of the prompt."""
        return self._tokenizer.encode_chat(
            self._messages, add_generation_prompt=self._add_generation_prompt, **self._variables
        )

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """What the answer must follow: `answer`, if it calls no tool."""
        return self._tools.grammar(answer)

    def parser(self) -> ToolParser | None:
        """What reads the calls out of one answer; None if there can be none."""
        return self._tools.parser()


def _choice(body: ChatRequest | None) -> Any:
    choice = body.tool_choice if body else None
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()


def _extra(body: ChatRequest | TokenizeChat) -> dict[str, Any]:
    """Variables of the template that the client sets itself."""
    extra = dict(body.chat_template_kwargs or {})
    taken = next((name for name in _OURS if name in extra), None)
    if taken is not None:
        message = f"chat_template_kwargs has {taken}, which is a parameter of its own."
        raise ApiError(400, message, param="chat_template_kwargs")
    return extra


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        plain["name"] = message.name
    return plain


def _text(content: Content | None) -> str:
    """Parts one after another: of texts only, they are one text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
