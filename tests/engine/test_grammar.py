"""Answers held to grammars: whatever is drawn and scheduled, what comes out is in the language; others never feel it.

The oracles are `json`, `jsonschema` and `re`; the model is the toy one with a vocabulary wide enough for JSON.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli.batch_line import Question, read_question
from octavo.config import EngineConfig
from octavo.engine import constraint
from octavo.engine.constraint import Matcher
from octavo.engine.engine import Engine
from octavo.engine.request import Request
from octavo.errors import RequestError
from octavo.grammar import Grammar
from octavo.llm import LLM
from octavo.params import BeamParams, SamplingParams
from tests.engine.toy import VOCAB, ToyModel, ToyOps, logits_of

CONTROL = [b"<pad>", b"<end>", b"<turn>"]  # ids 0, 1 and 2
EOS = frozenset({1, 2})
PIECES = [b'{"', b'":', b'",', b'"}', b": ", b", ", b"true", b"null", b"ab", b"abc", b"10", b"\n  ", b"a", b"]}"]
PIECES += ["é".encode(), b"\xe6\x97", b""]
TOKENS = [*CONTROL, *PIECES, *(bytes([b]) for b in range(256) if b != 0x07)]  # one byte no text can have
WIDTH = len(TOKENS) + 7  # the model's logits are wider than the tokenizer
PROJECTION = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32) / 4
A = TOKENS.index(b"a")


class WideModel(ToyModel):
    """The toy model's hash of the context, spread over more tokens."""

    vocab_size = WIDTH

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return (hidden - 3) @ PROJECTION


class ByteTokenizer:
    """What the engine asks of a tokenizer."""

    special_ids = frozenset({0, 1, 2})

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token] if token < len(TOKENS) else b""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in ids if not (skip_special_tokens and t in self.special_ids)]
        return b"".join(self.token_bytes(t) for t in kept).decode(errors="replace")


def make_engine(**options: Any) -> Engine:
    options = {"block_size": 4, "num_blocks": 4096, "swap_memory": 0, "max_num_seqs": 32, **options}
    return Engine(WideModel(4096), ToyOps(), EngineConfig(**options), tokenizer=ByteTokenizer(), eos_ids=EOS)


ENGINE = make_engine()


def run(engine: Engine, *asked: SamplingParams, prompt: tuple[int, ...] = (5, 6, 7)) -> list[Request]:
    """The requests of these parameters, all run to their ends together."""
    ids = (f"r{i}" for i in range(len(asked)))
    requests = [engine.add_request(next(ids), [*prompt, i], params) for i, params in enumerate(asked)]
    while engine.has_work:
        engine.step()
        engine.kv.check()
    return requests


def texts(request: Request) -> list[str]:
    assert request.error is None, request.error
    return [c.text for c in request.output().completions]


def one(grammar: Grammar, **options: Any) -> str:
    """The text of one answer, which must have ended by its grammar."""
    (request,) = run(ENGINE, SamplingParams(grammar=grammar, **{"max_tokens": 400, "seed": 0, **options}))
    (text,) = texts(request)
    assert request.ended[0].finish_reason == "stop"
    return text


# --- languages --------------------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "name", 'q"uote', "é", "tab\t"])
leaves = st.one_of(
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-200, 200),
        st.integers(0, 500),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]+)?z$", "maxLength": 12},
            {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        ]
    ),
    st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=4), st.none()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.one_of(st.booleans(), st.text(max_size=3)).map(lambda value: {"const": value}),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            },
            st.sets(st.sampled_from(sorted(properties))) if properties else st.just(set()),
        )
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}))


schemas = st.recursive(leaves, nested, max_leaves=5)


@settings(max_examples=40, deadline=None)
@given(schemas, st.integers(0, 99), st.sampled_from([0.0, 1.0, 2.0]))
def test_a_finished_answer_fits_its_schema(schema: dict[str, Any], seed: int, temperature: float) -> None:
    params = SamplingParams(
        grammar=Grammar.json_schema(schema), n=3, max_tokens=300, temperature=temperature, seed=seed
    )
    (request,) = run(ENGINE, params)
    assert request.error is None, request.error
    for completion in request.output().completions:
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        else:
            assert completion.finish_reason == "length"


def test_answers_do_finish() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for seed in range(5):
        assert json.loads(one(Grammar.json_schema(schema), seed=seed))["a"] in (1, 2)


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3}",
        "a*",
        "(ab|abc|b)+x",
        "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        "[A-Za-zà-ö]{1,5}é",
        "",
        "a/b",
        r"(\{|\[)?\n\}",
        ".{5,7}",
        "é|日",
    ],
)
def test_an_answer_matches_its_regular_expression(pattern: str) -> None:
    params = SamplingParams(grammar=Grammar("regex", pattern), n=8, max_tokens=100, seed=1, temperature=1.5)
    (request,) = run(ENGINE, params)
    for text, seq in zip(texts(request), request.ended, strict=True):
        assert seq.finish_reason == "stop"
        assert re.fullmatch(pattern, text), text


def test_a_choice_gives_each_of_its_texts_and_no_other() -> None:
    options = ["no", "not", 'n"\n', "é"]
    (request,) = run(ENGINE, SamplingParams(grammar=Grammar.choice(options), n=30, temperature=50.0, seed=1))
    assert set(texts(request)) == set(options)


def test_grammars_of_both_dialects() -> None:
    assert re.fullmatch(r"a+(b|10)", one(Grammar("lark", 'start: "a"+ end\nend: "b" | "10"')))
    assert re.fullmatch(r"a+(b|10)", one(Grammar("ebnf", 'root ::= "a"+ end\nend ::= "b" | "10"')))
    assert isinstance(json.loads(one(Grammar("json_object"), max_tokens=2000, temperature=0.8)), dict)


@pytest.mark.parametrize("end", sorted(EOS))
def test_the_end_is_drawn_only_where_the_grammar_may_end(end: int) -> None:
    eager = {"logit_bias": {end: 100.0}}
    assert len(one(Grammar("regex", "[xy]{3,6}"), **eager)) == 3
    assert len(one(Grammar("regex", "[xy]{3,6}"), min_tokens=5, **eager)) == 5
    assert len(one(Grammar("regex", "[xy]{3,6}"), min_tokens=50, **eager)) == 6  # the grammar's end comes first
    assert one(Grammar("regex", "x{3}|x{3}ab?"), min_tokens=50) in ("xxxab", "xxxa", "xxx")
    assert one(Grammar("regex", "x\x07?"), min_tokens=50) == "x"  # it may go on, but this model has no token for that


def test_bias_and_penalties_choose_only_among_what_may_come() -> None:
    loved = dict.fromkeys(range(len(TOKENS), WIDTH), 50.0) | {TOKENS.index(b"~"): 90.0, A: 40.0}
    assert one(Grammar("regex", "[ab]{4}"), logit_bias=loved) == "aaaa"
    shunned = one(Grammar("regex", "[xyzw]{4}"), frequency_penalty=2.0, repetition_penalty=100.0, temperature=0.0)
    assert re.fullmatch("[xyzw]{4}", shunned)
    assert len(set(shunned)) > 1


def test_a_stop_string_ends_an_answer_before_its_grammar_does() -> None:
    (request,) = run(ENGINE, SamplingParams(grammar=Grammar("regex", "x{9}"), stop="xxx", seed=0))
    assert texts(request) == [""]
    assert request.ended[0].stop_reason == "xxx"


# --- whatever else happens --------------------------------------------------------------------------------------------

LISTS = Grammar.json_schema({"type": "array", "items": {"enum": ["a", "b", 10, None]}, "minItems": 9, "maxItems": 14})
PLAIN = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
HELD = [SamplingParams(grammar=LISTS, max_tokens=200, seed=seed, n=1 + seed % 3) for seed in range(6)]


def tokens(request: Request) -> list[list[int]]:
    assert request.error is None, request.error
    return [seq.output_token_ids for seq in sorted(request.ended, key=lambda seq: seq.index)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_answers_are_the_same(preemption: str) -> None:
    expected = [tokens(r) for r in run(ENGINE, *HELD)]
    engine = make_engine(num_blocks=60, preemption=preemption, swap_memory=1 << 16)
    found = run(engine, *HELD)
    assert sum(r.preemptions for r in found) > 3
    assert [tokens(r) for r in found] == expected


def test_neighbours_do_not_matter() -> None:
    alone = [tokens(run(make_engine(), params)[0])[0] for params in (PLAIN, HELD[0])]
    together = [tokens(r) for r in run(ENGINE, PLAIN, *HELD[1:])]
    assert together[0] == [alone[0]]
    assert tokens(run(ENGINE, HELD[0], PLAIN, *HELD)[0]) == [alone[1]]


def test_each_fork_goes_its_own_way() -> None:
    (several,) = run(ENGINE, SamplingParams(grammar=LISTS, max_tokens=200, seed=8, n=3, best_of=5))
    assert len(several.ended) == 5
    for text in texts(several):
        assert len(json.loads(text)) >= 9
    (single,) = run(ENGINE, SamplingParams(grammar=LISTS, max_tokens=200, seed=8))
    (forked,) = run(ENGINE, SamplingParams(grammar=LISTS, max_tokens=200, seed=8, n=3))
    assert tokens(forked)[0] == tokens(single)[0]
    assert len({tuple(ids) for ids in tokens(forked)}) == 3


def test_reported_logprobs_are_the_models_own() -> None:
    (request,) = run(ENGINE, SamplingParams(grammar=Grammar("regex", "xyz"), logprobs=2, seed=0, temperature=0.5))
    (completion,) = request.output().completions
    context = [*request.prompt_token_ids]
    for entry in completion.logprobs or []:
        logits = ((logits_of(np.array(context)) - 3) @ PROJECTION).astype(np.float64)
        own = logits - np.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(own[entry.token_id], abs=1e-4)
        assert set(entry.top) == set(np.argsort(-own)[:2].tolist())
        context.append(entry.token_id)
    assert len(completion.logprobs or []) == 3


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_fault_of_one_grammar_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Matcher.take
    taken = iter(range(1000))
    monkeypatch.setattr(Matcher, "take", lambda self, token: next(taken) != 12 and take(self, token))
    failed = [r for r in run(ENGINE, HELD[0], PLAIN, HELD[3]) if r.error]
    assert len(failed) == 1
    assert failed[0].error.startswith("The grammar cannot be followed any further")
    monkeypatch.undo()
    assert ENGINE.kv.usage().free + ENGINE.kv.usage().cached == ENGINE.kv.pool.num_blocks
    assert texts(run(ENGINE, HELD[0])[0])


def test_a_grammar_that_grows_without_bound_fails_and_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "_LEXER_STATES", 300)
    grammar = Grammar("regex", "([a-z]*a[a-z]{20}b[a-z]{20})*x{50}")
    engine = make_engine()
    before = engine.constraints.compile(grammar)
    request, other = run(engine, SamplingParams(grammar=grammar, max_tokens=900, seed=0), HELD[1])
    assert "states" in (request.error or "")
    assert tokens(other) == tokens(run(ENGINE, PLAIN, HELD[1])[1])
    assert engine.constraints.compile(grammar) is not before


def test_where_no_token_can_come_next_the_request_says_so() -> None:
    (request,) = run(ENGINE, SamplingParams(grammar=Grammar("regex", "a\x07"), seed=0))
    assert request.error == "The grammar cannot be followed any further: no token of this model fits it."


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json_schema", "{"), "The JSON schema is no JSON"),
        (Grammar("json_schema", "[1]"), "it must be an object, true or false"),
        (Grammar("json_schema", '{"type": "objekt"}'), "objekt"),
        (Grammar("json_schema", '{"type": "string", "not": {"const": "a"}}'), "not"),
        (Grammar("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}'), "minimum (5) is greater"),
        (Grammar("json_schema", '{"$ref": "#/$defs/x"}'), "$defs/x"),
        (Grammar("json_schema", '{"$ref": "http://localhost/x"}'), "localhost"),
        (Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), ""),
        (Grammar("json_schema", "false"), "Unsatisfiable"),
        (Grammar("regex", "(("), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "(" * 5000 + ")" * 5000), "nested"),
        (Grammar("regex", "\x07"), "no token of this model fits it"),
        (Grammar("choice", "[]"), "one or more texts"),
        (Grammar("choice", '["a", ""]'), "none empty"),
        (Grammar("choice", '"a"'), "one or more texts"),
        (Grammar("lark", "start: foo"), "foo"),
        (Grammar("lark", "start: ((("), "Expected token"),
        (Grammar("lark", ""), "start"),
        (Grammar("ebnf", "root := ("), "Expected ::="),
        (Grammar("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(9000))), "9001 lines"),
        (
            Grammar("lark", "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(99)) + '\nR99: "a"'),
            "big",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_in_a_sentence(grammar: Grammar, said: str) -> None:
    with pytest.raises(RequestError) as error:
        ENGINE.add_request("bad", [1], SamplingParams(grammar=grammar))
    message = str(error.value)
    assert said in message
    assert message.startswith("The ")
    assert message.endswith(".")
    assert not message.endswith("..")
    assert "\n" not in message
    assert len(message) < 500
    assert not ENGINE.has_work


def test_definitions_that_lead_deep_do_not_exhaust_the_stack() -> None:
    """Recursion in native code would end the process."""
    count = 6000
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"const": 10}}
    assert one(Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": definitions})) == "10"
    assert (
        one(Grammar("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "a"')) == "a"
    )


def test_what_cannot_be_asked_is_refused_when_it_is_made() -> None:
    with pytest.raises(RequestError, match="no grammar of kind 'yaml'; there are json_schema"):
        Grammar("yaml", "")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a text, not dict"):
        Grammar("json_schema", {})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="characters; at most"):
        Grammar("regex", "a" * 300_000)
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        Grammar.json_schema({"enum": [object()]})
    with pytest.raises(RequestError, match="list of texts"):
        Grammar.choice("ab")
    with pytest.raises(RequestError, match="ignore_eos is True; it must be False where there is a grammar"):
        SamplingParams(grammar=LISTS, ignore_eos=True)
    with pytest.raises(RequestError, match="grammar is 'a'; it must be a Grammar"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]
    assert "grammar" not in BeamParams.__dataclass_fields__


def test_a_line_of_a_batch_may_have_a_grammar() -> None:
    question = Question()
    read_question(b'{"prompt": "a", "grammar": {"kind": "choice", "text": "[\\"a\\"]"}}', {}, question)
    assert isinstance(question.params, SamplingParams)
    assert question.params.grammar == Grammar.choice(["a"])
    for wrong in (b'"a"', b'{"kind": "yaml"}', b'{"kind": "regex", "txt": "a"}', b"{}"):
        with pytest.raises(RequestError):
            read_question(b'{"prompt": "a", "grammar": ' + wrong + b"}", {}, question)


def test_without_a_tokenizer_or_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Engine(WideModel(), ToyOps(), EngineConfig(block_size=4, num_blocks=9, swap_memory=0), eos_ids=EOS)
    with pytest.raises(RequestError, match="this model has no tokenizer"):
        bare.add_request("a", [1], SamplingParams(grammar=LISTS))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'octavo\[server\]'"):
        make_engine().add_request("a", [1], SamplingParams(grammar=LISTS))


# --- compiling --------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_whoever_asks() -> None:
    constraints = make_engine().constraints
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: constraints.compile(Grammar("regex", "[a-z]{9}")), range(16)))
    assert len(set(map(id, found))) == 1
    for i in range(40):
        constraints.compile(Grammar("regex", f"a{{{i}}}"))
    assert constraints.compile(Grammar("regex", "[a-z]{9}")) is not found[0]  # others were used since
    assert threading.stack_size() == 0


def test_what_was_compiled_elsewhere_is_not_compiled_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    compiled = engine.constraints.compile(Grammar("regex", "ab+x"))
    monkeypatch.setattr(engine.constraints, "compile", None)
    request = engine.add_request(
        "r", [1], SamplingParams(grammar=Grammar("regex", "ab+x"), seed=0), constraint=compiled
    )
    while engine.has_work:
        engine.step()
    assert re.fullmatch("ab+x", texts(request)[0])


# --- a real model -----------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "integer", "minimum": 1700, "maximum": 2100},
        "kind": {"enum": ["poet", "engineer"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "born", "kind", "tags"],
    "additionalProperties": False,
}


def test_smollm2_fills_in_a_schema(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, kv_memory="64MiB")
    params = [
        SamplingParams(grammar=Grammar.json_schema(PERSON), temperature=t, n=2 if t else 1, max_tokens=200, seed=1)
        for t in (0.0, 1.0, 2.0)
    ]
    asked = [{"role": "user", "content": "Describe Ada Lovelace as JSON."}]
    for output in llm.chat([asked] * 3, params):
        for completion in output.completions:
            assert completion.finish_reason == "stop", completion
            jsonschema.validate(json.loads(completion.text), PERSON)
