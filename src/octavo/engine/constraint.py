"""Holds answers to grammars: which tokens may come next. llguidance behind; knows rows of logits, not requests.

A grammar is compiled once, in whatever thread asks, and each answer walks through it with a matcher of its own. The
tokens a matcher does not allow become impossible (-inf) before one is drawn.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.grammar import Grammar, lark_json

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_KEPT = 32  # compiled grammars
_STACK = 1 << 29  # bytes: definitions of the longest grammar, each leading to the next, are compiled by recursion
_LINES = 4096  # of a grammar: definitions that lead to one another take seconds from here, and soon no end
_LEXER_STATES = 50_000  # at 1 to 2 kB each; they come into being as answers need them
_SHOWN = 300  # characters of what is wrong with a grammar

_PREFIX = re.compile(r"^(at \d+\(\d+\): failed to compile JSON schema|(Parser Error|lexer error)): ", re.IGNORECASE)

_lock_of_stack_size = threading.Lock()  # threading.stack_size is the whole process's


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which are no text."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """What a token adds to a text; nothing where an id has no token."""
        ...


class Matcher:
    """Where one answer stands in its grammar."""

    __slots__ = ("_constraint", "_inner")

    def __init__(self, constraint: Constraint, inner: LLMatcher) -> None:
        self._constraint, self._inner = constraint, inner

    def take(self, token: int) -> bool:
        """Go on by a token that was drawn. False if that failed; `fault` then says why."""
        taken = self._inner.consume_token(token) and not self._inner.is_error()
        if not taken:
            self._constraint.broken = True
        return taken

    @property
    def ended(self) -> bool:
        """Whether nothing can follow any more."""
        return self._inner.is_stopped()

    @property
    def fault(self) -> str:
        """Why the grammar cannot be followed further, as a sentence."""
        return f"The grammar cannot be followed any further: {_fault(self._inner)}."

    def copy(self) -> Matcher:
        """An independent matcher at the same place, for an answer that forks."""
        return Matcher(self._constraint, self._inner.deep_copy())


class Constraint:
    """A compiled grammar, from which matchers are made. Safe to use from several threads."""

    def __init__(self, start: LLMatcher) -> None:
        self.broken = False  # an answer went beyond the bounds of what its matchers share: compile it anew
        self._start = start

    def matcher(self) -> Matcher:
        """One that stands at the beginning."""
        return Matcher(self, self._start.deep_copy())


class Constraints:
    """The grammars of one model, compiled and kept while they are in use. Safe to use from several threads.

    vocab_size: the width of the model's logits; ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, sorted(eos_ids), vocab_size
        self._compiled: OrderedDict[Grammar, Constraint] = OrderedDict()  # the one used last comes last
        self._vocabulary: LLTokenizer | None = None  # made with the first grammar: that takes up to a second or two
        self._executor: LLExecutor | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Constraint:
        """Takes from nothing to a second or two: not to be called where others wait.

        Raises RequestError for a grammar that is none, is not supported or too large, or if llguidance is missing.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None or found.broken:
                found = self._compiled[grammar] = _with_deep_stack(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return found

    def forbid(self, logits: NDArray[np.float32], matchers: Sequence[tuple[int, Matcher]]) -> None:
        """Make what cannot come next impossible, in place: in row `r` of logits [R, V] by m, for each (r, m)."""
        assert self._executor is not None  # a matcher was compiled
        words = np.empty((len(matchers), -(-self._vocab_size // 32)), np.uint32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher._inner, i) for i, (_, matcher) in enumerate(matchers)],
            words.ctypes.data,
            words.strides[0],
            len(words),
        )
        bits = words.astype("<u4", copy=False).view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, count=self._vocab_size, bitorder="little")
        for (row, _), may_come in zip(matchers, allowed, strict=True):
            np.copyto(logits[row], -np.inf, where=may_come == 0)

    def _compile(self, grammar: Grammar) -> Constraint:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RequestError(
                "Answers that follow a grammar need llguidance; pip install 'octavo[server]' brings it."
            ) from None
        if self._vocabulary is None:
            self._vocabulary, self._executor = self._read_vocabulary()
        limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        start = LLMatcher(self._vocabulary, _as_llguidance(grammar), log_level=0, limits=limits)
        trial = start.deep_copy()
        trial.compute_bitmask()  # what is too large, or fits no text, shows here at the latest
        if trial.is_error():
            raise RequestError(f"The {_NAMES[grammar.kind]} cannot be used: {_fault(trial)}.")
        return Constraint(start)

    def _read_vocabulary(self) -> tuple[LLTokenizer, LLExecutor]:
        from llguidance import LLExecutor, LLTokenizer

        if self._tokenizer is None or not self._eos_ids:
            lacking = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise RequestError(f"Answers cannot be held to a grammar: this model has no {lacking}.")
        tokens = _Tokens(self._tokenizer, self._eos_ids[0], self._vocab_size)
        return LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=self._eos_ids), LLExecutor()  # type: ignore[arg-type]


class _Tokens:
    """A vocabulary as llguidance wants to be told of it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_id: int, vocab_size: int) -> None:
        self.eos_token_id = eos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)

    def __call__(self, _: str) -> list[int]:
        raise NotImplementedError("Only asked when grammars force tokens, which they do not.")


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "lark": "grammar",
    "ebnf": "grammar",
}


def _as_llguidance(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises RequestError for a text that is not of the grammar's kind."""
    kind, text = grammar.kind, grammar.text
    if kind == "json_object":
        return _lark("start: " + lark_json({"type": "object"}))
    if kind == "json_schema":
        return _lark("start: " + lark_json(_schema(text)))
    if kind == "regex":
        return _lark(f"start: {_regex(text)}")
    if kind == "choice":
        answers = _parsed("choice", text)
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a for a in answers):
            raise RequestError("The choice cannot be used: it must be a list of one or more texts, none empty.")
        return _lark("start: " + " | ".join(json.dumps(answer) for answer in answers))
    return _lark(_lark_of_ebnf(text) if kind == "ebnf" else text)


def _lark(text: str) -> str:
    """Without forcing: where but one text can follow, its tokenisation is still the model's choice."""
    lines = text.count("\n") + 1
    if lines > _LINES:
        raise RequestError(f"The grammar has {lines} lines; at most {_LINES} are taken.")
    return json.dumps({"grammars": [{"lark_grammar": text + '\n%llguidance {"no_forcing": true}'}]})


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The {name} is no JSON: {error}.") from None


def _schema(text: str) -> Any:
    schema = _parsed("JSON schema", text)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"The JSON schema is {text[:_SHOWN]}; it must be an object, true or false.")
    return schema


def _regex(text: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(text, '')}/"


def _lark_of_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever the converter trips over
        raise RequestError(f"The grammar cannot be used: {_reason(str(error))}.") from None


def _fault(matcher: LLMatcher) -> str:
    """Why a matcher is at fault, as the end of a sentence."""
    message = matcher.get_error()
    return "no token of this model fits it" if message.startswith("NoExtension") else _reason(message)


def _reason(message: str) -> str:
    """What an error message of several lines, excerpts and arrows says, as the end of a sentence."""
    lines = message.strip().splitlines() or ["no reason is known"]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    told = _PREFIX.sub("", " ".join(told.split())).rstrip(".")
    return told if len(told) <= _SHOWN else told[: _SHOWN - 3] + "..."


def _with_deep_stack(function: Any, argument: Any) -> Any:
    """Call it in a thread whose stack cannot run out; what it raises, this raises."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(argument))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="octavo-grammar")
    with _lock_of_stack_size:
        before = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
