"""Calling tools: what grammars allow is what parsers read, however it is cut; templates that know tools and those that
do not; what is no tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.constraint import Constraints
from octavo.errors import RequestError
from octavo.grammar import Grammar
from octavo.llm import LLM
from octavo.loading.chat import ChatTemplate
from octavo.params import SamplingParams
from octavo.server.tools import (
    BARE,
    TAGGED,
    Delta,
    ToolParser,
    Tools,
    describe_tools,
    plain_messages,
    prompted,
    template_knows_tools,
)

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "$defs": {"city": {"type": "string", "maxLength": 12}},
    },
}
STOP = {"name": "stop"}
BOTH = [{"type": "function", "function": WEATHER}, {"type": "function", "function": STOP}]

# How templates in use write tools and calls, cut down to that.
TAGGED_TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools> <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"""
BARE_TEMPLATE = """{%- for m in messages %}{{ m.role }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}{% endfor %}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson }}{% endfor %}<|python_tag|>{% endif %}"""
OTHER_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


def tools(choice: Any = None, parallel: bool | None = None, template: str | None = None, some: Any = BOTH) -> Tools:
    return Tools.of(some, choice, parallel, template=template)


def called(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def spelled(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def tagged(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{spelled(name, arguments)}\n</tool_call>"


# --- grammars ---------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of single bytes and an end."""

    special_ids = frozenset({256})

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"


CONSTRAINTS = Constraints(Bytes(), {256}, 257)


def allows(grammar: Grammar | None, text: str) -> bool:
    """Whether the text is a whole answer of the grammar."""
    assert grammar is not None
    matcher = CONSTRAINTS.compile(grammar).matcher()
    for token in [*text.encode(), 256]:
        logits = np.zeros((1, 257), np.float32)
        CONSTRAINTS.forbid(logits, [(0, matcher)])
        if logits[0, token] != 0 or not matcher.take(token):
            return False
    return matcher.ended


ROME, HALT = tagged("get_weather", {"city": "Rome", "days": 2}), tagged("stop", {})
WRONG = [
    tagged("get_weather", {"days": 2}),
    tagged("get_weather", {"city": "Rome", "days": 0}),
    tagged("get_weather", {"city": "Rome", "more": 1}),
    tagged("stop", {"now": True}),
    tagged("go", {}),
    "<tool_call>",
    "<tool_call>\nRome\n</tool_call>",
    ROME[:-1],
]


@pytest.mark.parametrize(
    ("choice", "parallel", "right", "wrong"),
    [
        (None, None, ["", "Hello {", "a<tool_call", ROME, f"Well.\n{ROME}\n{HALT}", f"{HALT}\nDone."], WRONG),
        ("auto", False, ["", "Hello", f"Well.\n{ROME}"], [*WRONG, f"{ROME}\n{HALT}", f"{ROME} Done."]),
        ("required", None, [ROME, f"{ROME}\n{HALT}", HALT + HALT], [*WRONG, "", "Hello", f"Well.\n{ROME}"]),
        ("required", False, [ROME, HALT], [*WRONG, "", f"{ROME}\n{HALT}"]),
        (called("stop"), None, [HALT], ["", ROME, f"{HALT}\n{HALT}"]),
        (called("get_weather"), False, [ROME], ["", HALT]),
    ],
)
def test_the_grammar_is_the_choices(choice: Any, parallel: bool | None, right: list[str], wrong: list[str]) -> None:
    grammar = tools(choice, parallel).grammar()
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


def test_bare_calls_are_whole_answers() -> None:
    call = spelled("get_weather", {"city": "Rome"}, "parameters")
    auto, must = (tools(choice, template=BARE_TEMPLATE).grammar() for choice in ("auto", "required"))
    for text in (call, spelled("stop", {}, "parameters")):
        assert allows(auto, text)
        assert allows(must, text)
    assert allows(auto, "Hello {")
    assert allows(auto, "")
    assert not allows(must, "Hello")
    for text in ("{}", "\n{", call + call, spelled("get_weather", {"city": "Rome"})):
        assert not allows(auto, text)


def test_without_calls_the_answer_is_what_it_would_be_anyway() -> None:
    schema = Grammar.json_schema({"enum": [1, "a"]})
    assert Tools.of(None).grammar(schema) is schema
    assert tools("none").grammar() is None
    assert tools("none").parser() is None
    assert Tools.of(None).parser() is None
    both = tools("auto").grammar(schema)
    assert allows(both, '"a"')
    assert allows(both, f"{ROME}\n{HALT}")
    assert not allows(both, "a")
    assert not allows(both, f"1\n{ROME}")
    assert allows(tools("required").grammar(Grammar("json_object")), ROME)
    assert allows(tools("auto", template=BARE_TEMPLATE).grammar(schema), "1")
    for choice in ("auto", "required"):
        with pytest.raises(RequestError, match="kind regex and tools cannot go together"):
            tools(choice).grammar(Grammar("regex", "a"))


def test_what_grammars_cannot_say_is_refused_of_strict_functions_only() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    some = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert allows(tools("required", some=some).grammar(), tagged("f", {"a": [1, 1]}))
    some[0]["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(RequestError, match="uniqueItems"):
        allows(tools("required", some=some).grammar(), "")


def test_functions_that_say_nothing_of_arguments_take_none_and_open_ones_any() -> None:
    def allowed(parameters: Any) -> bool:
        some = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return allows(tools("required", some=some).grammar(), tagged("f", {"x": 1}))

    assert not allowed(None)
    assert not allowed({"type": "object", "properties": {}})
    assert allowed({})
    assert allowed({"type": "object", "properties": {}, "additionalProperties": True})
    assert allowed({"allOf": [{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}]})


# --- parsing ----------------------------------------------------------------------------------------------------------


def read(spelling: Any, pieces: list[str]) -> tuple[ToolParser, list[Delta]]:
    ids = iter(range(100))
    parser = ToolParser(spelling, new_id=lambda: f"call_{next(ids)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return parser, deltas + parser.finish()


def joined(deltas: list[Delta]) -> tuple[str, list[dict[str, Any]]]:
    """What a client makes of deltas."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert set(piece["function"]) == {"name", "arguments"}
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return content, calls


json_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('a"\\{}[]<>/_\n'), st.just("</tool_call><tool_call>")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('a"}\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments_of_any_kind = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
said = st.one_of(st.just(""), st.text("ab <{\n"), st.just("a <tool_cal"), st.just("Well.\n\n"))
drawn_calls = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), arguments_of_any_kind), max_size=3)


@settings(max_examples=300, deadline=None)
@given(said, drawn_calls, said, st.sampled_from([None, 2]), st.data())
def test_however_it_is_cut_the_calls_are_the_same(
    before: str, made: list[tuple[str, Any]], after: str, indent: int | None, data: st.DataObject
) -> None:
    texts = [json.dumps({"name": name, "arguments": arguments}, indent=indent) for name, arguments in made]
    text = before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in texts) + after
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12), label="cuts"))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser, deltas = read(TAGGED, pieces)
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parser.calls] == made
    assert parser.content == (before.rstrip() + after.rstrip() if made else before + after)
    assert joined(deltas) == (parser.content, parser.calls)
    by_characters, _ = read(TAGGED, list(text))
    assert (by_characters.content, by_characters.calls) == (parser.content, parser.calls)


@settings(max_examples=100, deadline=None)
@given(arguments_of_any_kind, st.integers(0, 200))
def test_a_bare_call_is_read_too(arguments: Any, cut: int) -> None:
    text = spelled("f", arguments, "parameters")
    for whole in (text, "\n" + text):
        parser, deltas = read(BARE, [whole[:cut], whole[cut:]])
        assert json.loads(parser.calls[0]["function"]["arguments"]) == arguments
        assert parser.content == ""
        assert joined(deltas) == ("", parser.calls)
    parser, _ = read(BARE, [" Say ", text])
    assert (parser.content, parser.calls) == (" Say " + text, [])


def test_text_is_not_held_back_longer_than_it_must() -> None:
    parser = ToolParser(TAGGED)
    assert parser.push("Hello") == [{"content": "Hello"}]
    assert parser.push(" <tool") == []
    assert parser.push("s>") == [{"content": " <tools>"}]
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    (begun, piece) = parser.push('{"a": "x')
    assert begun["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert piece == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "x'}}]}
    assert parser.push('"}') == [{"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]}]
    assert parser.push("}</tool_call>\n") == []
    assert parser.finish() == []


@pytest.mark.parametrize("length", range(len(ROME)))
def test_a_call_that_was_cut_off_is_what_there_is_of_it(length: int) -> None:
    parser, deltas = read(TAGGED, ["So. ", ROME[:length]])
    assert joined(deltas) == (parser.content, parser.calls)
    if parser.calls:
        assert ROME[:length].rstrip("\n}").find(parser.calls[0]["function"]["arguments"].rstrip("}")) > 0
        assert parser.content == "So."
    else:
        assert parser.content == ("So. " + ROME[:length] if length < len("<tool_call>") else "So.")


@settings(max_examples=100, deadline=None)
@given(st.text('<tool_call>{"name":} \n', max_size=40), st.integers(0, 900))
def test_what_is_no_call_is_lost_to_nobody(text: str, count: int) -> None:
    whole = "<tool_call>" + "x" * count + text
    parser, deltas = read(TAGGED, [whole])
    again, _ = read(TAGGED, list(whole))
    assert (again.content, again.calls) == (parser.content, parser.calls)
    assert joined(deltas)[0] == parser.content
    if len(whole) > 600:
        assert parser.content == whole


def test_ids_differ() -> None:
    parsers = [ToolParser(TAGGED), ToolParser(TAGGED)]
    for parser in parsers:
        parser.push(ROME + HALT)
    ids = {call["id"] for parser in parsers for call in parser.calls}
    assert len(ids) == 4
    assert all(id.startswith("call_") for id in ids)


# --- what the model is told -------------------------------------------------------------------------------------------

TALK = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"id": "2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "tool", "content": "stopped", "tool_call_id": "2"},
    {"role": "user", "content": "Thanks"},
    {"role": "user", "content": "Bye"},
]


def render(template: str, messages: list[dict[str, Any]], some: Tools) -> str:
    prepared, variables = prompted(messages, some, template)
    return ChatTemplate(template).render(prepared, add_generation_prompt=True, variables=variables)


def test_templates_are_known_by_what_they_say() -> None:
    assert template_knows_tools(TAGGED_TEMPLATE)
    assert template_knows_tools(BARE_TEMPLATE)
    for template in (None, "", PLAIN_TEMPLATE, OTHER_TEMPLATE, "{{ messages }} the tools <tool_call>"):
        assert not template_knows_tools(template)
    assert template_knows_tools(
        '{% if tools %}{{ "<tool_call>{\\"name\\": <name>, \\"arguments\\": <json>}" }}{% endif %}'
    )
    assert not template_knows_tools('{% if tools %}{{ "<tool_call><function=name><parameter=city>" }}{% endif %}')
    assert tools(template=BARE_TEMPLATE).spelling is BARE
    assert tools(template=OTHER_TEMPLATE).spelling is TAGGED


def test_a_template_that_knows_tools_is_given_them_and_arguments_as_mappings() -> None:
    text = render(TAGGED_TEMPLATE, TALK, tools(template=TAGGED_TEMPLATE))
    assert json.dumps({"type": "function", "function": WEATHER}) in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "sunny" in text
    assert "<tools>" not in render(TAGGED_TEMPLATE, TALK[:1], tools("none", template=TAGGED_TEMPLATE))
    assert TALK[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'  # the client's own is as it was


def test_a_template_that_does_not_is_told_in_words() -> None:
    text = render(PLAIN_TEMPLATE, TALK, tools())
    assert text.startswith("system: You can call these functions")
    assert json.dumps(WEATHER) in text
    assert text.endswith(
        "user: Weather?\n"
        'assistant: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nsunny\n</tool_response>\n<tool_response>\nstopped\n</tool_response>\nThanks\nBye\n"
    )
    told = [{"role": "system", "content": "Be brief."}, *TALK]
    assert render(PLAIN_TEMPLATE, told, tools()).startswith("system: Be brief.\n\nYou can call")
    assert "You can call" not in render(PLAIN_TEMPLATE, told, tools("none"))
    assert "You can call" not in render(PLAIN_TEMPLATE, told, Tools.of(None))
    refusing = (
        PLAIN_TEMPLATE
        + "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    assert render(refusing, TALK, tools()).startswith("user: You can call")


def test_what_the_model_is_told_names_every_function_and_the_tags() -> None:
    text = describe_tools([WEATHER, {**STOP, "strict": True, "description": None}])
    for part in (json.dumps(WEATHER), '{"name": "stop"}', "<tool_call>", "</tool_call>", '"arguments"'):
        assert part in text


def test_calls_of_any_arguments_become_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}
    (message,) = plain_messages([{"role": "assistant", "content": "Hm.", "tool_calls": [call]}])
    assert message == {
        "role": "assistant",
        "content": 'Hm.\n<tool_call>\n{"name": "f", "arguments": "no JSON"}\n</tool_call>',
    }
    assert plain_messages([{"role": "assistant", "content": None, "tool_calls": None}])[0]["content"] == ""


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("some", "choice", "said"),
    [
        ([{"type": "retrieval"}], None, "Tool 0 must be an object of type 'function' with a function."),
        ([*BOTH, {"type": "function"}], None, "Tool 2 must be"),
        ([called("a b")], None, "Tool 0 has the name 'a b'; it must be 1 to 64 letters"),
        ([called("")], None, "1 to 64"),
        ([called("a" * 65)], None, "1 to 64"),
        ([called("f\n")], None, "1 to 64"),
        ([called(3)], None, "name 3;"),  # type: ignore[arg-type]
        ([called("f"), called("f")], None, "two tools of the name 'f'"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "must be a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], None, "of type 'object'"),
        (BOTH, "maybe", "tool_choice is 'maybe'; it must be 'none', 'auto', 'required' or a function"),
        (BOTH, {"type": "function"}, "by its name"),
        (BOTH, called("go"), "tool_choice names 'go'; the tools are get_weather, stop."),
        (None, "auto", "tool_choice is for requests with tools"),
        ([], called("go"), "tool_choice is for requests with tools"),
    ],
)
def test_what_is_no_tool_is_refused_in_a_sentence(some: Any, choice: Any, said: str) -> None:
    with pytest.raises(RequestError) as error:
        Tools.of(some, choice)
    assert said in str(error.value)
    assert str(error.value).endswith(".")


def test_a_function_may_have_the_name_of_a_choice() -> None:
    some = [called("auto"), called("none")]
    assert Tools.of(some, called("none")).candidates == (some[1]["function"],)
    assert Tools.of(some, "none").candidates == ()
    assert len(Tools.of(some, "auto").candidates) == 2


# --- a real model -----------------------------------------------------------------------------------------------------


def test_smollm2_calls_tools(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, kv_memory="64MiB")
    assert llm.tokenizer is not None
    template = llm.tokenizer.chat_template
    asked: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome? Use get_weather."}]
    for choice in ("required", "auto"):
        some = tools(choice, parallel=False, template=template)
        messages, variables = prompted(asked, some, template)
        prompt = llm.tokenizer.encode_chat(messages, **variables)
        params = SamplingParams(grammar=some.grammar(), temperature=1.0, n=2, seed=2, max_tokens=80)
        for completion in llm.generate(prompt, params)[0].completions:
            parser = some.parser()
            assert parser is not None
            parser.push(completion.text)
            parser.finish()
            for call in parser.calls if completion.finish_reason == "stop" else ():
                function = {f["name"]: f for f in (WEATHER, STOP)}[call["function"]["name"]]
                schema: Any = function.get("parameters", {"maxProperties": 0})
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            if choice != "auto":
                assert completion.finish_reason == "stop"
                assert len(parser.calls) == 1
