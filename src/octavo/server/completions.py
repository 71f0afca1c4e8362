"""POST /v1/completions: texts or token ids in, what follows them out. Knows no engine and no memory.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from octavo.loading.tokenizer import Tokenizer
from octavo.outputs import Completion, RequestOutput, TokenLogprobs
from octavo.server.assembly import Usage, chunks, whole
from octavo.server.errors import ApiError
from octavo.server.jobs import Job, check_length, grammar_of, params_of
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.schemas import CompletionRequest
from octavo.server.service import Service
from octavo.server.shapes import SERVED, TextCompletion, documented
from octavo.server.streaming import begun, unless_gone


@dataclass(slots=True)
class _Reply:
    """What all parts of one answer to the client share."""

    id: str
    model: str
    tokenizer: Tokenizer
    texts: list[str | None]  # the prompts that were texts
    n: int
    echo: bool
    prompt_only: bool  # max_tokens is 0: the one token that was drawn all the same is left out
    with_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    begun: set[tuple[int, int]] = field(default_factory=set)
    probs: dict[tuple[int, int], CompletionLogprobs] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def usage_dict(self) -> dict[str, Any]:
        usage = self.usage.as_dict()
        if self.prompt_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


def completions_router(service: Service) -> APIRouter:
    """The route over a service."""
    router = APIRouter()

    @router.post("/v1/completions", responses=documented(TextCompletion, *SERVED, stream=True))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """What follows a prompt, or each of several."""
        service.check_model(body.model)
        job, reply = await _prepare(service, body)
        deltas = service.deltas(job)
        if body.stream:
            last = reply.usage_dict if body.wants_usage else None
            per_step = partial(_choices, reply=reply)
            return await begun(request, chunks(deltas, reply.usage, reply.named(), per_step, last))
        outputs = enumerate(await unless_gone(request, whole(deltas, reply.usage)))
        choices = [_choice(c, place, output, reply) for place, output in outputs for c in output.completions]
        return JSONResponse({**reply.named(), "choices": choices, "usage": reply.usage_dict()})

    return router


async def _prepare(service: Service, body: CompletionRequest) -> tuple[Job, _Reply]:
    """Check a body and turn it into work. Raises ApiError or RequestError."""
    body.check_stream()
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0; that gives something only with echo.", param="max_tokens")
    tokenizer = service.tokenizer
    prompts, texts = await _prompts(service, body)
    for ids in prompts:
        check_length(len(ids), body.max_tokens or None, service.max_model_len, "max_tokens")
    params = params_of(
        body,
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        grammar=grammar_of(body),
    )
    name = f"cmpl-{uuid4().hex}"
    job = Job(id=name, prompts=prompts, params=params, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    reply = _Reply(
        id=name,
        model=service.model_name,
        tokenizer=tokenizer,
        texts=texts,
        n=body.n or 1,
        echo=bool(body.echo),
        prompt_only=body.max_tokens == 0,
        with_logprobs=body.logprobs is not None,
    )
    return job, reply


async def _prompts(service: Service, body: CompletionRequest) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and the texts of those that were given as texts."""
    asked = body.prompt
    items = [asked] if isinstance(asked, str) or isinstance(asked[0], int) else asked
    tokenizer = service.tokenizer
    prompts: list[list[int]] = []
    texts: list[str | None] = []
    for item in items:
        if isinstance(item, str):
            encode = partial(tokenizer.encode, item, special=body.add_special_tokens)
            prompts.append(await service.tokenized(len(item), encode))
            texts.append(item)
            await asyncio.sleep(0)  # others are served between two of hundreds
        else:
            assert isinstance(item, list)
            prompts.append(item)
            texts.append(None)
    return prompts, texts


def _choices(place: int, output: RequestOutput, reply: _Reply) -> list[dict[str, Any]]:
    """What a step adds to the choices of a prompt, where it adds something."""
    choices = [_choice(completion, place, output, reply) for completion in output.completions]
    return [choice for choice in choices if choice["text"] or choice["logprobs"] or choice["finish_reason"]]


def _choice(completion: Completion, place: int, output: RequestOutput, reply: _Reply) -> dict[str, Any]:
    """One choice, or what a step adds to it; the first part of it echoes the prompt if asked."""
    key = (place, completion.index)
    text = "" if reply.prompt_only else completion.text
    ids: list[int] = [] if reply.prompt_only else completion.token_ids
    entries: list[TokenLogprobs | None] = [] if reply.prompt_only else [*(completion.logprobs or ())]
    if reply.echo and key not in reply.begun:
        prompt = output.prompt_token_ids
        said = reply.texts[place]
        text = (reply.tokenizer.decode(prompt, skip_special_tokens=False) if said is None else said) + text
        ids = [*prompt, *ids]
        entries = [*(output.prompt_logprobs or ()), *entries]
    reply.begun.add(key)
    probs = None
    if reply.with_logprobs and (ids or completion.finish_reason is None):
        probs = reply.probs.setdefault(key, CompletionLogprobs(reply.tokenizer)).piece(ids, entries)
    return {
        "index": place * reply.n + completion.index,
        "text": text,
        "logprobs": probs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
