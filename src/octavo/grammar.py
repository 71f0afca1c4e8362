"""What an answer must look like: a JSON schema, a regular expression, a choice, a grammar. Plain data, checked when
made; knows no tokens and no engine. `engine.constraint` says how answers are held to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]

# Between JSON's tokens: a blank or two, or a new line and its indentation. More is allowed by JSON, but models that may
# put as much as they like get caught in it.
_WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,2}"
_LONGEST = 1 << 18  # characters; bounds how deep definitions can lead to one another, which is recursion for a compiler


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language of answers. Raises RequestError for a kind that does not exist or a text too long.

    kind: what `text` is: "json_schema" a JSON schema (draft 2020-12 as far as llguidance knows it), "json_object"
        nothing, any JSON object fits; "regex" a regular expression in the syntax of Rust's `regex`, which the whole
        answer must match; "choice" a JSON list of the possible answers; "lark" a grammar in llguidance's dialect of
        Lark; "ebnf" one in llama.cpp's GBNF.

    Whether a schema, expression or grammar is a valid one is found out when it is compiled.
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RequestError(f"There is no grammar of kind {self.kind!r}; there are {', '.join(get_args(Kind))}.")
        if not isinstance(self.text, str):
            raise RequestError(f"A grammar of kind {self.kind} must be a text, not {type(self.text).__name__}.")
        if len(self.text) > _LONGEST:
            raise RequestError(f"The grammar has {len(self.text)} characters; at most {_LONGEST} are taken.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """The JSON texts that a schema allows. Raises RequestError if it is no JSON itself."""
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"The JSON schema cannot be written as JSON: {error}.") from None
        return cls("json_schema", text)

    @classmethod
    def choice(cls, answers: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise RequestError(f"A choice is {answers!r}; it must be a list of texts.")
        return cls("choice", json.dumps(list(answers), ensure_ascii=False))


def lark_json(schema: Mapping[str, Any] | bool) -> str:
    """The JSON texts that a schema allows, as a part of a Lark grammar. They have no more white space than is usual."""
    keywords: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {} if schema else {"enum": []}
    asked = keywords.get("x-guidance")  # llguidance's own options
    options = {"whitespace_pattern": _WHITESPACE, **(asked if isinstance(asked, Mapping) else {})}
    return "%json " + json.dumps({**keywords, "x-guidance": options})
