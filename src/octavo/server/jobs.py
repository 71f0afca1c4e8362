"""From a body to what the engine takes: token ids and parameters. Knows both; runs nothing.

Raises ApiError or RequestError, naming the parameter, for what cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.grammar import Grammar
from octavo.params import BeamParams, SamplingParams
from octavo.server.errors import ApiError
from octavo.server.schemas import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

_DEFAULT_BEAMS = 4


@dataclass(slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine: the same for each of its prompts."""

    id: str
    prompts: list[list[int]]
    params: SamplingParams | BeamParams
    priority: int = 0
    cache_salt: str = ""

    @property
    def request_ids(self) -> list[str]:
        """What the engine calls its requests."""
        return [self.id] if len(self.prompts) == 1 else [f"{self.id}-{place}" for place in range(len(self.prompts))]

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.num_samples


def params_of(
    body: ChatRequest | CompletionRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams | BeamParams:
    """The engine's parameters; what beam search has no use for is refused by name."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}; it must be at least n ({body.n or 1}).", param="best_of")
    if body.use_beam_search:
        return _beam_params(body, max_tokens, logprobs, prompt_logprobs, grammar)
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is for beam search; set use_beam_search.", param=name)
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise ApiError(400, "best_of chooses when all answers are there, so it cannot be streamed.", param="best_of")
    given: dict[str, Any] = {
        "n": body.n,
        "best_of": body.best_of,
        "seed": body.seed,
        "stop": body.stop,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": None if body.logit_bias is None else {int(t): b for t, b in body.logit_bias.items()},
        "include_stop": body.include_stop_str_in_output,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": grammar,
        **_ends_of(body),
    }
    return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in given.items() if v is not None})


def _ends_of(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    return {
        "min_tokens": body.min_tokens,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
    }


_NOT_FOR_BEAMS = (
    "seed",
    "stop",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "include_stop_str_in_output",
)


def _beam_params(
    body: ChatRequest | CompletionRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> BeamParams:
    unfit = [name for name in _NOT_FOR_BEAMS if getattr(body, name) is not None]
    unfit += ["temperature"] if body.temperature else []
    unfit += ["logprobs"] if logprobs is not None or prompt_logprobs is not None else []
    unfit += ["grammar"] if grammar is not None else []
    if unfit:
        raise ApiError(400, f"Beam search has no {unfit[0]}; leave out that, or use_beam_search.", param=unfit[0])
    width = body.best_of or max(body.n or 1, _DEFAULT_BEAMS)
    given = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping, **_ends_of(body)}
    given = {name: value for name, value in given.items() if value is not None}
    return BeamParams(width=width, n=body.n or 1, max_tokens=max_tokens, **given)


def grammar_of(body: ChatRequest | CompletionRequest) -> Grammar | None:
    """What an answer must follow, asked for in one of several ways."""
    outputs = body.structured_outputs or StructuredOutputs(json=None)
    named = {
        "response_format": _format_of(body.response_format),
        "grammar": _grammar(body.grammar),
        "structured_outputs.json": None if outputs.json_ is None else Grammar.json_schema(outputs.json_),
        "structured_outputs.json_object": Grammar("json_object") if outputs.json_object else None,
        "structured_outputs.regex": None if outputs.regex is None else Grammar("regex", outputs.regex),
        "structured_outputs.choice": None if outputs.choice is None else Grammar.choice(outputs.choice),
        "structured_outputs.grammar": _grammar(outputs.grammar),
    }
    given = [name for name, grammar in named.items() if grammar is not None]
    if len(given) > 1:
        raise ApiError(400, f"An answer cannot follow both {given[0]} and {given[1]}; give one.", param=given[1])
    return named[given[0]] if given else None


def _format_of(asked: ResponseFormat | None) -> Grammar | None:
    if isinstance(asked, JsonObjectFormat):
        return Grammar("json_object")
    if isinstance(asked, JsonSchemaFormat):
        return Grammar.json_schema({} if asked.json_schema.schema_ is None else asked.json_schema.schema_)
    return None


def _grammar(text: str | None) -> Grammar | None:
    """Lark as llguidance reads it (`start: "a" | "b"`), or llama.cpp's GBNF (`root ::= "a" | "b"`)."""
    return None if text is None else Grammar("ebnf" if "::=" in text else "lark", text)


def check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Refuse what would not fit the context, before anything is computed."""
    if num_prompt_tokens + (max_tokens or 1) > max_model_len:
        asked = "" if max_tokens is None else f" and {max_tokens} of answer ({param})"
        raise ApiError(
            400,
            f"The context holds {max_model_len} tokens; the prompt has {num_prompt_tokens}{asked}: shorten them.",
            param="messages" if param == "max_completion_tokens" else "prompt",
            code="context_length_exceeded",
        )
