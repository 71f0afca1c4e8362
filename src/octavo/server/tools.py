"""Calling tools: what the model is told of them, what its answer may then look like, how calls are read out of it.

Pure functions and small classes over plain data; knows no HTTP, no engine and no tokens. Calls are spelled as the
model's chat template spells them, or, where that knows no tools, as most models are trained to: JSON in tags
(NousResearch's Hermes, Qwen).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from octavo.errors import RequestError
from octavo.grammar import Grammar, lark_json

Json = Mapping[str, Any]
Delta = dict[str, Any]  # of a streamed message: {"content": ...} or {"tool_calls": [...]}

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a model writes a call: a JSON object of "name" and arguments between two texts.

    With `begin` empty the object alone is the call, and the whole answer.
    """

    begin: str
    end: str
    arguments: str  # the key


TAGGED = Spelling("<tool_call>", "</tool_call>", "arguments")
BARE = Spelling("", "", "parameters")  # Llama 3


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a request offers, and which of them the answer may or must call.

    choice: whether the answer calls none of them, some or none, or some; with `only` it must call that one, once.
    """

    functions: tuple[Json, ...]  # as the client gave them: {"name", "description", "parameters", "strict"}
    choice: Literal["none", "auto", "required"]
    only: str | None
    parallel: bool
    spelling: Spelling

    @classmethod
    def of(
        cls,
        tools: Sequence[Json] | None,
        tool_choice: str | Json | None = None,
        parallel_tool_calls: bool | None = None,
        *,
        template: str | None = None,
    ) -> Tools:
        """Check what a request says of tools, in OpenAI's words; `template` is the model's chat template.

        Raises RequestError for tools that cannot be, a choice that is none, and a choice without tools.
        """
        functions = tuple(_function(place, tool) for place, tool in enumerate(tools or ()))
        names = [function["name"] for function in functions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RequestError(f"There are two tools of the name {twice!r}; names must differ.", param="tools")
        choice, only = _choice(tool_choice, names)
        return cls(functions, choice, only, parallel_tool_calls is not False, _spelling(template) or TAGGED)

    @property
    def candidates(self) -> tuple[Json, ...]:
        """The functions the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(function for function in self.functions if self.only in (None, function["name"]))

    def grammar(self, answer: Grammar | None = None) -> Grammar | None:
        """What the answer must look like; `answer` is what its content would have to look like without tools.

        Raises RequestError for an answer's grammar that tools do not go with.
        """
        if not self.candidates:
            return answer
        if self.choice == "auto":
            return Grammar("lark", _auto(self, answer))
        _text_rule(answer)  # refused as ever, though an answer of calls has no content
        return Grammar("lark", _must(self))

    def parser(self) -> ToolParser | None:
        """What reads the calls out of one answer; None if there can be none."""
        return ToolParser(self.spelling) if self.candidates else None


def _function(place: int, tool: Any) -> Json:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f"Tool {place} must be an object of type 'function' with a function.", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"Tool {place} has the name {_shown(name)}; it must be 1 to 64 letters, digits, underscores and dashes."
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"The parameters of tool {name!r} are {_shown(parameters)}; they must be a JSON schema.", param="tools"
        )
    if parameters is not None and parameters.get("type", "object") != "object":
        kind = _shown(parameters["type"])
        raise RequestError(
            f"The parameters of tool {name!r} are of type {kind}; they must be of type 'object'.", param="tools"
        )
    return function


def _choice(tool_choice: str | Json | None, names: list[str]) -> tuple[Literal["none", "auto", "required"], str | None]:
    if tool_choice == "none" or (tool_choice is None and not names):
        return "none", None
    if not names:
        raise RequestError("tool_choice is for requests with tools; give tools.", param="tool_choice")
    if tool_choice in (None, "auto"):
        return "auto", None
    if tool_choice == "required":
        return "required", None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {_shown(tool_choice)}; it must be 'none', 'auto', 'required' or a function by its name."
        )
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}; the tools are {', '.join(names)}.", param="tool_choice")
    return "required", name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- what the model is told -------------------------------------------------------------------------------------------


def template_knows_tools(template: str | None) -> bool:
    """Whether a chat template tells the model of tools, and has it call them in a way that is understood here."""
    return _spelling(template) is not None


def _spelling(template: str | None) -> Spelling | None:
    """How a template has calls spelled; None if it knows no tools, or spells calls in another way."""
    inside = " ".join(re.findall(r"\{[%{].*?[%}]\}", template or "", re.DOTALL))
    if not re.search(r"\btools\b", inside):
        return None
    for spelling, mark in ((TAGGED, TAGGED.begin), (BARE, "<|python_tag|>")):
        if mark in (template or "") and re.search(rf'"{spelling.arguments}\\?"', template or ""):
            return spelling
    return None


def prompted(
    messages: Sequence[Json], tools: Tools, template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages (contents are texts) and further variables to render a chat with, such that the model knows of the
    tools, and of the calls so far, whether or not its template does."""
    offered = tools.functions if tools.choice != "none" else ()
    if template_knows_tools(template):
        variables = {"tools": [{"type": "function", "function": dict(function)} for function in offered]}
        return [_with_mappings(message) for message in messages], variables if offered else {}
    plain = plain_messages(messages)
    return (_with_system_text(plain, describe_tools(offered), template) if offered else plain), {}


def describe_tools(functions: Sequence[Json]) -> str:
    """What a model is told of tools where its template does not do it."""
    shown = "\n".join(json.dumps(_without_strict(function), ensure_ascii=False) for function in functions)
    return (
        "You can call these functions, each given by its name, its purpose and a JSON schema of its arguments:\n"
        f"<tools>\n{shown}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between two tags, and nothing after it:\n"
        f'{TAGGED.begin}\n{{"name": "...", "{TAGGED.arguments}": {{...}}}}\n{TAGGED.end}\n'
        "What the function returns then follows between <tool_response> and </tool_response>."
    )


def _without_strict(function: Json) -> Json:
    return {key: value for key, value in function.items() if key != "strict" and value is not None}


def plain_messages(messages: Sequence[Json]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: calls and what came of them are texts.

    What came of calls made together is one message of the user's, and so is what the user says right afterwards: many
    templates insist on user and assistant taking turns.
    """
    plain: list[dict[str, Any]] = []
    answers = False  # whether the last message holds what tools returned
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role in ("tool", "user") and answers:
            plain[-1]["content"] += f"\n{content}"
        elif role == "assistant":
            calls = [_spelled(call["function"]) for call in message.get("tool_calls") or ()]
            plain.append({"role": role, "content": "\n".join([content, *calls] if content else calls)})
        else:
            plain.append({"role": "user" if role == "tool" else role, "content": content})
        answers = role == "tool" or (answers and role == "user")
    return plain


def _spelled(function: Json) -> str:
    arguments = json.dumps(_parsed(function["arguments"]), ensure_ascii=False)
    name = json.dumps(function["name"])
    return f'{TAGGED.begin}\n{{"name": {name}, "{TAGGED.arguments}": {arguments}}}\n{TAGGED.end}'


def _with_mappings(message: Json) -> dict[str, Any]:
    """A message whose calls have their arguments parsed: templates write them as JSON themselves."""
    copy = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        copy["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return copy


def _parsed(arguments: Any) -> Any:
    """Arguments as clients give them back: JSON in a text, and whatever else as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _with_system_text(messages: list[dict[str, Any]], text: str, template: str | None) -> list[dict[str, Any]]:
    """The messages with a text before all that is said: in the system's message, or the first one if there is none."""
    refuses = "system role not supported" in (template or "").lower()  # Gemma 2
    first = messages[0] if messages else {"role": "system", "content": ""}
    if first["role"] == "system" or (refuses and first["role"] == "user"):
        parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
        return [{**first, "content": "\n\n".join(part for part in parts if part)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# --- what an answer may look like -------------------------------------------------------------------------------------

_SPACE = r"[ \t\n]{0,40}"  # where JSON may have white space; without bounds some models write nothing else
_ANYTHING = r"(?s:.*)"

# With these in a schema its properties are not all there are.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}


def _must(tools: Tools) -> str:
    """Lark of an answer that is calls."""
    spelling = tools.spelling
    if not spelling.begin:
        return "\n".join(["start: call", *_call(tools)])
    several = tools.parallel and tools.only is None
    rules = [f"start: tool{'+' if several else ''}", "tool: BEGIN call END"]
    rules += [rf"BEGIN: /{_SPACE}{_literal(spelling.begin)}/"]
    return "\n".join([*rules, *_call(tools)])


def _auto(tools: Tools, answer: Grammar | None) -> str:
    """Lark of an answer that may be calls, or text and calls, or (with a grammar for it) that or calls."""
    spelling, text = tools.spelling, _text_rule(answer)
    if not spelling.begin:
        text = text or rf"/[ \t\n]*[^{{ \t\n]{_ANYTHING}/"
        return "\n".join(["start: (text | call)?", f"text: {text}", *_call(tools)])
    if text is not None:
        rules = [f"start: tool{'+' if tools.parallel else ''} | text", f"text: {text}", "tool: BEGIN call END"]
        rules += [rf"BEGIN: /{_SPACE}{_literal(spelling.begin)}/"]
    else:
        # The text ends as soon as a call begins, for `begin` is lazy.
        rules = ["start: tool* TEXT" if tools.parallel else "start: tool | TEXT", "tool: begin call END"]
        rules += [f"begin[lazy]: /{_ANYTHING}{_literal(spelling.begin)}/", f"TEXT: /{_ANYTHING}/"]
    return "\n".join([*rules, *_call(tools)])


def _text_rule(answer: Grammar | None) -> str | None:
    """What the answer's text must be, in Lark; None if anything."""
    if answer is None:
        return None
    if answer.kind == "json_object":
        return lark_json({"type": "object"})
    if answer.kind != "json_schema":
        raise RequestError(f"A grammar of kind {answer.kind} and tools cannot go together; a response_format can.")
    try:
        return lark_json(json.loads(answer.text))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema is no JSON: {error}.") from None


def _call(tools: Tools) -> list[str]:
    """Rules of `call`, the JSON object of any callable function, and END, what is after its arguments."""
    functions, key = tools.candidates, tools.spelling.arguments
    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = rf'{_SPACE}\{{{_SPACE}"name" ?: ?"{function["name"]}" ?,{_SPACE}"{key}" ?: ?'
        rules += [f"call{i}: HEAD{i} arguments{i}{'' if tools.spelling.begin else ' END'}", f"HEAD{i}: /{head}/"]
        rules += [f"arguments{i}: {lark_json(_arguments(function))}"]
    end = _SPACE + _literal(tools.spelling.end) if tools.spelling.end else ""
    return [*rules, rf"END: /{_SPACE}\}}{end}/"]


def _arguments(function: Json) -> dict[str, Any]:
    """The schema of a function's arguments.

    Where it lists them there are no others: JSON Schema would allow them, but functions do not take them. What a schema
    asks beyond what grammars can say is an error only where the function is strict.
    """
    parameters = function.get("parameters")
    schema = {"type": "object", "properties": {}} if parameters is None else {"type": "object", **parameters}
    if "properties" in schema and _OPEN.isdisjoint(schema):
        schema["additionalProperties"] = False
    return schema if function.get("strict") else {"x-guidance": {"lenient": True}, **schema}


def _literal(text: str) -> str:
    """A text of letters, <, >, / and underscores as a regular expression within slashes."""
    return text.replace("/", r"\/")


# --- calls read out of an answer --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Object:
    """Finds the end of a JSON object that is read piece by piece."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def read(self, text: str) -> int | None:
        """Where in the text the object is complete; None if it goes on. The first text begins with its brace."""
        for place, character in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped = character == "\\"
                self.in_string = character != '"'
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place + 1
        return None


@dataclass(slots=True)
class ToolParser:
    """Reads one answer, piece by piece: what is said, and which calls are made. However it is cut, it is the same.

    An answer that its grammar held to the spelling is taken apart without loss, but for white space before and after
    calls. What nevertheless has another form is content.
    """

    spelling: Spelling
    new_id: Callable[[], str] = lambda: f"call_{uuid4().hex[:24]}"
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    _state: Callable[[], bool] = field(init=False)  # does what can be done with _rest; whether there is more to do
    _rest: str = ""  # read, but not understood yet
    _deltas: list[Delta] = field(default_factory=list)
    _object: _Object = field(default_factory=_Object)
    _head: re.Pattern[str] = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"{self.spelling.arguments}"\s*:\s*(?=\{{)')
        self._state = self._read_text if self.spelling.begin else self._read_start

    def push(self, text: str) -> list[Delta]:
        """Read on; returns what of the message became known, in OpenAI's form of a delta."""
        self._rest += text
        while self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """The answer has ended: returns what was held back. A call that was cut off before its arguments is dropped."""
        self._ended = True
        return self.push("")

    def _say(self, text: str) -> None:
        if text:
            self.content += text
            self._deltas.append({"content": text})

    def _read_text(self) -> bool:
        """Before, between and after calls."""
        begin = self._rest.find(self.spelling.begin)
        if begin >= 0:
            self._say(self._rest[:begin].rstrip())
            self._rest = self._rest[begin + len(self.spelling.begin) :]
            self._state = self._read_head
            return True
        held = 0 if self._ended else _held(self._rest, self.spelling.begin)
        said = self._rest[: len(self._rest) - held]
        kept = said.rstrip() if self.calls or not self._ended else said
        self._say(kept)
        self._rest = "" if self._ended else self._rest[len(kept) :]
        return False

    def _read_start(self) -> bool:
        """Of an answer that is a call or text, as its first character tells."""
        first = self._rest.lstrip()[:1]
        if not first and not self._ended:
            return False
        self._state = self._read_head if first == "{" else self._read_all
        return True

    def _read_all(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _read_head(self) -> bool:
        """Of a call, up to its arguments."""
        match = self._head.match(self._rest)
        if match is None or match.end() > _LONGEST_HEAD:
            if len(self._rest) > _LONGEST_HEAD:  # this is no call
                self._rest, self._state = self.spelling.begin + self._rest, self._read_all
                return True
            self._rest = "" if self._ended else self._rest
            return False
        function = {"name": match[1], "arguments": ""}
        self.calls.append({"id": self.new_id(), "type": "function", "function": function})
        self._deltas.append(
            {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}]}
        )
        self._rest = self._rest[match.end() :]
        self._object, self._state = _Object(), self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._object.read(self._rest)
        piece = self._rest[:end]
        if piece:
            self.calls[-1]["function"]["arguments"] += piece
            self._deltas.append({"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": piece}}]})
        self._rest = self._rest[len(piece) :]
        if end is None:
            return False
        self._state = self._read_end
        return True

    def _read_end(self) -> bool:
        """What closes a call: a brace, and its tag."""
        closing = self.spelling.end or "}"
        end = self._rest.find(closing)
        if end < 0:
            self._rest = "" if self._ended else self._rest
            return False
        self._rest = self._rest[end + len(closing) :]
        self._state = self._read_text if self.spelling.begin else self._read_all
        return True


_LONGEST_HEAD = 512  # characters; with all white space the grammar allows it is shorter


def _held(text: str, mark: str) -> int:
    """How many characters at the text's end may be the head of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
