"""The tokenizer in a Hugging Face folder: tokenizer.json through `tokenizers`, and the small files beside it.

Knows no weights. What Transformers' "fast" tokenizers do, without Transformers; decoding is by bytes (see Tokenizer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.loading.byte_level import to_bytes, token_ids
from octavo.loading.files import read_json, read_text
from octavo.loading.sentencepiece import SPACE, byte_of
from octavo.loading.tokenizer import Tokenizer, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_hf_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The folder's tokenizer, or None if it has no tokenizer.json; `config` is the model's (for its end-of-sequence).

    Raises ModelError for a file that cannot be read or a kind of tokenizer that is not supported.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    source = read_json(path)
    full = _parse(path)
    literal = {token: entry.content for token, entry in full.get_added_tokens_decoder().items()}
    special = frozenset(token for token, entry in full.get_added_tokens_decoder().items() if entry.special)
    settings = _optional(folder / "tokenizer_config.json")
    named = _named_tokens(settings, _optional(folder / "special_tokens_map.json"))
    decoder = list(_parts(source.get("decoder")))
    bos = full.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos = {full.token_to_id(named["eos_token"])} if "eos_token" in named else set()
    for file in (config, _optional(folder / "generation_config.json")):
        eos |= _ids(file.get("eos_token_id"))
    return Tokenizer(
        vocabulary=Vocabulary(
            size=max([full.get_vocab_size(with_added_tokens=True), *(token + 1 for token in literal)]),
            text=full.id_to_token,
            bytes=_bytes_of(full, literal, decoder, path),
            special_ids=special,
        ),
        encoder=_Encoder(full, _without_control(full), special - {_unknown(source, full)}),
        bos_id=bos,
        eos_ids=frozenset(token for token in eos if token is not None),
        chat_template=_chat_template(folder, settings),
        named_tokens=named,
        prefix_space=_strips_space(decoder),
    )


@dataclass(slots=True)
class _Encoder:
    full: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer  # the same without control tokens
    control: frozenset[int]  # what text must not become: all special tokens but the unknown one

    def __call__(self, text: str, *, add: bool, parse: bool) -> list[int]:
        found = token_ids(self.full if parse else self.plain, text, add=add)
        if parse or self.control.isdisjoint(found):
            return found
        # A vocabulary in which merges lead from characters to a control token: back to the characters.
        return [part for token in found for part in (self._spelled(token) if token in self.control else (token,))]

    def _spelled(self, token: int) -> list[int]:
        parts: list[int | None] = []
        for char in self.full.id_to_token(token) or "":
            whole = self.full.token_to_id(char)
            parts += [whole] if whole is not None else [self.full.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
        return [part for part in parts if part is not None]


def _unknown(source: Mapping[str, Any], full: tokenizers.Tokenizer) -> int | None:
    """What stands for characters that the vocabulary lacks."""
    model = source.get("model")
    text = model.get("unk_token") if isinstance(model, Mapping) else None
    return full.token_to_id(text) if isinstance(text, str) else None


def _parse(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Parsed

    try:
        parsed = Parsed.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exceptions
        raise ModelError(f"{path} is no tokenizer that can be read: {error}.") from error
    parsed.no_truncation()
    parsed.no_padding()
    return parsed


def _without_control(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A twin that shares the model of `full` but takes spellings of control tokens for text."""
    from tokenizers import Tokenizer as Parsed

    plain = Parsed(full.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (value := getattr(full, part)) is not None:
            setattr(plain, part, value)
    for _, token in sorted(full.get_added_tokens_decoder().items()):
        (plain.add_special_tokens if token.special else plain.add_tokens)([token])
    plain.encode_special_tokens = True
    return plain


def _bytes_of(
    full: tokenizers.Tokenizer, literal: Mapping[int, str], decoder: list[Mapping[str, Any]], path: Path
) -> Callable[[int], bytes]:
    kinds = {part.get("type") for part in decoder}
    spaced = "Metaspace" in kinds or any(part.get("type") == "Replace" for part in decoder)
    if not spaced and "ByteLevel" not in kinds:
        raise ModelError(
            f"{path}: a decoder of {sorted(map(str, kinds)) or 'no kind'} is not supported; ByteLevel, Metaspace, and "
            "Replace with ByteFallback are."
        )
    falls_back = "ByteFallback" in kinds

    def bytes_of(token: int) -> bytes:
        text = literal.get(token) or full.id_to_token(token)
        if text is None or token in literal:
            return (text or "").encode()
        if not spaced:
            return to_bytes(text)
        byte = byte_of(text) if falls_back else None
        return text.replace(SPACE, " ").encode() if byte is None else bytes((byte,))

    return bytes_of


def _strips_space(decoder: list[Mapping[str, Any]]) -> bool:
    for part in decoder:
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and bool(part.get("add_prefix_space", True))
    return False


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """A component of tokenizer.json and, for a sequence, those within."""
    if isinstance(component, Mapping):
        yield component
        for inner in component.get("decoders") or ():
            yield from _parts(inner)


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for source in sources:
        for name in _NAMED:
            value = source.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if name not in named and isinstance(text, str):
                named[name] = text
    return named


def _ids(value: Any) -> set[int]:
    return {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
