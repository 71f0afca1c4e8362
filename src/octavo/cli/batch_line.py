"""One line of a batch file, in Octavo's own form or OpenAI's: JSON in, prompt and parameters out. Knows no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.cli.options import sampling_params
from octavo.errors import RequestError
from octavo.grammar import Grammar
from octavo.params import BeamParams, SamplingParams

_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_IGNORED = {"model", "user", "metadata"}  # of an OpenAI body: they do not change the answer here
_SAMPLING = {f.name for f in fields(SamplingParams)}
_BEAM = {f.name for f in fields(BeamParams)}
_SWITCHES = {f.name for f in (*fields(SamplingParams), *fields(BeamParams)) if f.type == "bool"}


@dataclass(slots=True)
class Question:
    """What a line asks. Filled as far as the line could be read."""

    custom_id: Any = None
    prompt: Any = None
    params: SamplingParams | BeamParams = field(default_factory=SamplingParams)


def read_question(line: bytes, defaults: dict[str, Any], question: Question) -> None:
    """Fill the question from a line; `defaults` are parameters for what it does not say.

    Raises RequestError for a line that is not JSON, has no prompt or more than one, or a parameter that cannot be.
    """
    asked = _object(line)
    custom_id = asked.pop("custom_id", None)
    if isinstance(custom_id, (dict, list)):  # nested deeply enough it could be read but not written
        raise RequestError("custom_id must be a text or a number.")
    question.custom_id = custom_id
    if "body" in asked:
        asked = _from_openai(asked["body"])
    given = [name for name in _PROMPTS if name in asked]
    if len(given) != 1:
        raise RequestError(f"A line needs one of prompt, messages and prompt_token_ids; it has {len(given)} of them.")
    question.prompt = _prompt(given[0], asked.pop(given[0]))
    question.params = _params(asked, defaults)


def _prompt(name: str, value: Any) -> Any:
    """The value, if it is of the kind that its name promises."""
    kinds: dict[str, tuple[type, str]] = {"messages": (dict, "messages"), "prompt_token_ids": (int, "token ids")}
    if name == "prompt" and isinstance(value, str):
        return value
    kind, words = kinds.get(name, (int, "token ids, or a text"))
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise RequestError(f"{name} must be a list of {words}.")
    return value


def _object(line: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"The line is not JSON: {problem}.") from None
    if not isinstance(asked, dict):
        raise RequestError(f"The line is not a JSON object but {type(asked).__name__}.")
    return asked


def _from_openai(body: Any) -> dict[str, Any]:
    """The body of an OpenAI request, with Octavo's names; a key that is null is as if it were not there."""
    if not isinstance(body, dict):
        raise RequestError(f"body is not a JSON object but {type(body).__name__}.")
    asked = {name: value for name, value in body.items() if name not in _IGNORED and value is not None}
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    top_logprobs = asked.pop("top_logprobs", 0)
    if isinstance(asked.get("logprobs"), bool):
        asked["logprobs"] = top_logprobs if asked["logprobs"] else None
    if asked.get("stream") is False:
        del asked["stream"]
    return asked


def _params(asked: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams | BeamParams:
    known = _BEAM if "width" in asked else _SAMPLING
    unknown = sorted(asked.keys() - known)
    if unknown:
        raise RequestError(f"There is no parameter {unknown[0]!r}; there are {', '.join(sorted(known))}.")
    for name, value in asked.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise RequestError(f"{name} is {value!r}; it must be true or false.")
        if name not in ("logit_bias", "grammar") and isinstance(value, dict):
            raise RequestError(f"{name} is {value!r}; it cannot be a JSON object.")
    if isinstance(bias := asked.get("logit_bias"), dict):
        asked["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    try:
        if isinstance(grammar := asked.get("grammar"), dict):  # {"kind": "regex", "text": "[a-z]+"}
            asked["grammar"] = Grammar(**grammar)
        if "width" in asked:
            return BeamParams(**{**{k: v for k, v in defaults.items() if k in _BEAM}, **asked})
        return sampling_params({**defaults, **asked})
    except (TypeError, AttributeError) as problem:
        raise RequestError(f"A parameter is of the wrong kind: {problem}.") from None


def _token_id(key: str) -> int:
    """JSON has only texts for keys."""
    try:
        return int(key)
    except ValueError:
        raise RequestError(f"logit_bias has the key {key!r}; keys must be token ids.") from None
