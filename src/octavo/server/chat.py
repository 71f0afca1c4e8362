"""POST /v1/chat/completions: a conversation in, an answer out, whole or as events. Knows no engine and no memory.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import Completion, RequestOutput
from octavo.server import logprobs
from octavo.server.assembly import Usage, chunks, whole
from octavo.server.conversation import Conversation
from octavo.server.errors import ApiError
from octavo.server.jobs import Job, check_length, grammar_of, params_of
from octavo.server.schemas import ChatRequest
from octavo.server.service import Service
from octavo.server.shapes import SERVED, ChatCompletion, documented
from octavo.server.streaming import begun, unless_gone
from octavo.server.tools import ToolParser


@dataclass(slots=True)
class _Answer:
    """One choice as it grows."""

    parser: ToolParser | None
    begun: bool = False


@dataclass(slots=True)
class _Reply:
    """What all parts of one answer to the client share."""

    id: str
    model: str
    tokenizer: Tokenizer
    conversation: Conversation
    with_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    answers: dict[int, _Answer] = field(default_factory=dict)

    def answer(self, index: int) -> _Answer:
        if index not in self.answers:
            self.answers[index] = _Answer(self.conversation.parser())
        return self.answers[index]

    def named(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def logprobs(self, completion: Completion) -> dict[str, Any] | None:
        return logprobs.of_chat(self.tokenizer, completion.logprobs or ()) if self.with_logprobs else None


def chat_router(service: Service) -> APIRouter:
    """The route over a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=documented(ChatCompletion, *SERVED, stream=True))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The model's next message of a conversation."""
        service.check_model(body.model)
        job, reply = await _prepare(service, body)
        deltas = service.deltas(job)
        if body.stream:
            last = reply.usage.as_dict if body.wants_usage else None
            named, per_step = reply.named("chat.completion.chunk"), partial(_delta_choices, reply=reply)
            return await begun(request, chunks(deltas, reply.usage, named, per_step, last))
        (output,) = await unless_gone(request, whole(deltas, reply.usage))
        choices = [_choice(completion, reply) for completion in output.completions]
        return JSONResponse({**reply.named("chat.completion"), "choices": choices, "usage": reply.usage.as_dict()})

    return router


async def _prepare(service: Service, body: ChatRequest) -> tuple[Job, _Reply]:
    """Check a body and turn it into work. Raises ApiError or RequestError."""
    body.check_stream()
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one.", param="max_tokens")
    max_tokens = body.max_completion_tokens or body.max_tokens
    tokenizer = service.tokenizer
    conversation = Conversation(body, tokenizer)
    ids = await service.tokenized(conversation.length, conversation.encode)
    check_length(len(ids), max_tokens, service.max_model_len, "max_completion_tokens")
    params = params_of(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=conversation.grammar(grammar_of(body)),
    )
    name = f"chatcmpl-{uuid4().hex}"
    job = Job(id=name, prompts=[ids], params=params, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    return job, _Reply(name, service.model_name, tokenizer, conversation, bool(body.logprobs))


# --- whole ------------------------------------------------------------------------------------------------------------


def _choice(completion: Completion, reply: _Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    parser = reply.answer(completion.index).parser
    finish_reason: str | None = completion.finish_reason
    if parser is not None:
        parser.push(completion.text)
        parser.finish()
        if parser.calls:
            message["content"], message["tool_calls"] = parser.content or None, parser.calls
            finish_reason = _ended(parser, finish_reason)
        else:
            message["content"] = parser.content
    return {
        "index": completion.index,
        "message": message,
        "logprobs": reply.logprobs(completion),
        "finish_reason": finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _ended(parser: ToolParser, finish_reason: str | None) -> str | None:
    """An answer that calls tools ends for that; one that was cut off says so."""
    return "tool_calls" if parser.calls and finish_reason == "stop" else finish_reason


# --- as events --------------------------------------------------------------------------------------------------------


def _delta_choices(place: int, output: RequestOutput, reply: _Reply) -> list[dict[str, Any]]:
    """What a step adds to the choices."""
    return [choice for completion in output.completions for choice in _deltas_of(completion, reply)]


def _deltas_of(completion: Completion, reply: _Reply) -> list[dict[str, Any]]:
    """What a step adds to one choice."""
    answer = reply.answer(completion.index)
    found: list[dict[str, Any]] = []

    def say(delta: dict[str, Any], probs: dict[str, Any] | None = None, reason: str | None = None) -> None:
        found.append({"index": completion.index, "delta": delta, "logprobs": probs, "finish_reason": reason})

    if not answer.begun:
        answer.begun = True
        say({"role": "assistant", "content": ""})
    finish_reason: str | None = completion.finish_reason
    probs = reply.logprobs(completion) if completion.logprobs else None
    if answer.parser is None:
        if completion.text or probs:
            say({"content": completion.text}, probs)
    else:
        pieces = answer.parser.push(completion.text)
        if finish_reason is not None:
            pieces += answer.parser.finish()
        for delta in pieces or ([{"content": ""}] if probs else []):
            say(delta, probs)
            probs = None
        if finish_reason is not None:
            finish_reason = _ended(answer.parser, finish_reason)
    if finish_reason is not None:
        say({}, None, finish_reason)
        found[-1]["stop_reason"] = completion.stop_reason
    return found
