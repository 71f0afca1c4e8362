"""The tokenizer in a GGUF file's metadata. Gives llama.cpp's ids; knows no tensors.

Two kinds: "gpt2" is byte-level BPE with merges, "llama" SentencePiece's BPE with scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.loading.byte_level import BOS_BY_DEFAULT, SPLITS, WHOLE_WORDS, byte_level_bpe, to_bytes, token_ids
from octavo.loading.gguf import GGUFFile
from octavo.loading.sentencepiece import SPACE, ScoreEncoder, byte_of
from octavo.loading.special import SpecialTokens
from octavo.loading.tokenizer import Tokenizer, Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # kinds of tokens in "tokenizer.ggml.token_type"
_NEVER_TEXT = (_CONTROL, _UNKNOWN)

# Control tokens by their spelling, whatever kind a converter gave them (as in llama.cpp): text must not become one.
_CONTROL_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|end_of_text|> </s> "  # noqa: SIM905
    "<EOT> _<EOT> <end_of_utterance> <eos> <|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> <|fim_suffix|> <fim-suffix> "
    "<fim_suffix> <SUF> <|fim_middle|> <fim-middle> <fim_middle> <MID> <|fim_pad|> <fim-pad> <fim_pad> <PAD> "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")

Fragment = Callable[[str, bool], list[int]]  # (text without special tokens, whether it begins a prompt) -> ids


def read_gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The file's tokenizer, or None if it has none; raises ModelError for one that is damaged or not supported."""
    kind = file.metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} (tokenizer.ggml.model) is not supported; 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) are."
        )
    return _Source(file).tokenizer(kind)


@dataclass(slots=True)
class _Encoder:
    """Special tokens first, then the texts between them."""

    fragment: Fragment
    parsed: SpecialTokens  # control tokens and those that are always found
    plain: SpecialTokens  # only the latter
    prefix: list[int]
    suffix: list[int]

    def __call__(self, text: str, *, add: bool, parse: bool) -> list[int]:
        found = list(self.prefix) if add else []
        starts = True
        for part in (self.parsed if parse else self.plain).split(text):
            found += [part] if isinstance(part, int) else self.fragment(part, starts)
            starts = isinstance(part, int)
        return found + self.suffix if add else found


class _Source:
    """The tokenizer's metadata, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self._texts("tokens")
        kinds = self._numbers("token_type", self.tokens)
        self.kinds = np.full(len(self.tokens), _NORMAL) if kinds is None else kinds.astype(np.int64)
        self._by_text = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for text in _CONTROL_TEXTS & self._by_text.keys():
            self.kinds[self._by_text[text]] = _CONTROL

    def tokenizer(self, kind: str) -> Tokenizer:
        bos, eos = self._token("bos"), self._token("eos")
        named = {"bos": bos, "eos": eos, "unk": self._token("unknown"), "pad": self._token("padding")}
        pre = self._metadata.get("tokenizer.ggml.pre", "default")
        bos_by_default = kind == "llama" or pre in BOS_BY_DEFAULT
        prefix_space = kind == "llama" and self._flag("add_space_prefix", True)
        template = self._metadata.get("tokenizer.chat_template")
        return Tokenizer(
            vocabulary=Vocabulary(
                len(self.tokens), self.tokens.__getitem__, self._bytes_of(kind), frozenset(self._of(*_NEVER_TEXT))
            ),
            encoder=_Encoder(
                fragment=self._scores(prefix_space) if kind == "llama" else self._merges(pre),
                parsed=self._special(*_NEVER_TEXT, _USER_DEFINED),
                plain=self._special(_USER_DEFINED),
                prefix=self._added("bos", bos, bos_by_default),
                suffix=self._added("eos", eos, False),
            ),
            bos_id=bos,
            eos_ids=self._eos_ids(eos),
            chat_template=template if isinstance(template, str) else None,
            named_tokens={f"{name}_token": self.tokens[token] for name, token in named.items() if token is not None},
            prefix_space=prefix_space,
        )

    # --- metadata ----------------------------------------------------------------------------------------------
    def _texts(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):  # else arrays
            raise ModelError(f"{self._path} lacks the metadata key 'tokenizer.ggml.{key}', an array of texts.")
        return value

    def _numbers(self, key: str, of: list[str]) -> NDArray[Any] | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != len(of) or not np.isfinite(value).all():
            raise ModelError(
                f"{self._path}: the metadata key 'tokenizer.ggml.{key}' must be an array of {len(of)} numbers, one a "
                "token."
            )
        return value

    def _token(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token = self._metadata.get(key)
        if token is None:
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise ModelError(f"{self._path}: {key} is {token!r}; there are {len(self.tokens)} tokens.")
        return token

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._path}: the metadata key 'tokenizer.ggml.{key}' is {value!r}; it must be a bool.")
        return value

    def _added(self, name: str, token: int | None, default: bool) -> list[int]:
        if not self._flag(f"add_{name}_token", default):
            return []
        if token is None:
            raise ModelError(f"{self._path} asks to add {name.upper()} but lacks 'tokenizer.ggml.{name}_token_id'.")
        return [token]

    def _eos_ids(self, eos: int | None) -> frozenset[int]:
        """End of text, of turn and of message. A file that does not name its end of turn is searched for it."""
        found = [eos, self._token("eot"), self._token("eom")]
        if found[1] is None:
            found += [self._by_text.get(text) for text in _ENDS_OF_TURN]
        return frozenset(token for token in found if token is not None)

    def _of(self, *kinds: int) -> list[int]:
        """The tokens of these kinds."""
        found: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return found

    def _special(self, *kinds: int) -> SpecialTokens:
        ids = {self.tokens[token]: token for token in self._of(*kinds)}
        title = str(self._metadata.get("general.name", "")).lower()
        swallow: set[int] = set()
        if "phi-3" in title or "phi3" in title:
            kept = {self._by_text.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
            swallow = set(ids.values()) - {token for token in kept if token is not None}
        return SpecialTokens(ids, swallow)

    # --- the two kinds -----------------------------------------------------------------------------------------
    def _bytes_of(self, kind: str) -> Callable[[int], bytes]:
        tokens, kinds = self.tokens, self.kinds

        def bytes_of(token: int) -> bytes:
            text = tokens[token]
            byte = byte_of(text) if kinds[token] == _BYTE else None
            if byte is not None:
                return bytes((byte,))
            if kinds[token] in (*_NEVER_TEXT, _USER_DEFINED):
                return text.encode()
            return to_bytes(text) if kind == "gpt2" else text.replace(SPACE, " ").encode()

        return bytes_of

    def _merges(self, pre: object) -> Fragment:
        expressions = SPLITS.get(pre) if isinstance(pre, str) else None
        if expressions is None:
            raise ModelError(
                f"{self._path}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; "
                f"{', '.join(sorted(SPLITS))} are."
            )
        control = {self.tokens[token] for token in self._of(*_NEVER_TEXT)}
        vocabulary = {text: token for text, token in self._by_text.items() if text not in control}
        pairs = [(left, right) for left, _, right in map(str.partition, self._texts("merges"), repeat(" "))]
        merges = [pair for pair in pairs if control.isdisjoint((*pair, pair[0] + pair[1]))]
        try:
            bpe = byte_level_bpe(vocabulary, merges, expressions, whole_words=pre in WHOLE_WORDS)
        except Exception as error:  # `tokenizers` raises plain Exceptions
            raise ModelError(f"{self._path}: 'tokenizer.ggml.merges' do not fit the tokens: {error}.") from error

        def fragment(text: str, starts: bool) -> list[int]:
            return token_ids(bpe, text)

        return fragment

    def _scores(self, prefix_space: bool) -> Fragment:
        scores = self._numbers("scores", self.tokens)
        if scores is None:
            raise ModelError(f"{self._path} lacks the metadata key 'tokenizer.ggml.scores', an array of numbers.")
        ids = dict(self._by_text)
        for token in self._of(*_NEVER_TEXT, _BYTE):
            ids.pop(self.tokens[token], None)
        byte_ids: list[int | None] = [None] * 256
        for token in self._of(_BYTE):
            if (byte := byte_of(self.tokens[token])) is not None:
                byte_ids[byte] = token
        return ScoreEncoder(ids, scores.tolist(), byte_ids, self._token("unknown"), prefix_space=prefix_space)
