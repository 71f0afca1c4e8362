"""What the server answers with, for its OpenAPI document: shapes only, nothing is built from them. Knows no engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class _Reply(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetail(_Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Reply):
    error: ErrorDetail


class PromptTokensDetails(_Reply):
    cached_tokens: int  # found in the prefix cache


class Usage(_Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatLogprobs(_Reply):
    content: list[dict[str, Any]]
    refusal: None


class CalledFunction(_Reply):
    name: str
    arguments: str


class ToolCallReply(_Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(_Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(_Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(_Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class TextCompletion(_Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(_Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Reply):
    prompt: str


class Health(_Reply):
    status: str


class Version(_Reply):
    version: str


def documented(reply: type[BaseModel], *statuses: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with `reply`, and with errors of these statuses."""
    answer: dict[str, Any] = {"model": reply}
    if stream:
        answer["content"] = {"text/event-stream": {}}
    return {200: answer, **errors(*statuses)}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of `responses` on errors."""
    return {status: {"model": ErrorReply} for status in statuses}


SERVED = (400, 401, 404, 413, 429, 500, 503, 504)  # what asking the model for something can come to
