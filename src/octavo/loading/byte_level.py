"""Byte-level BPE (GPT-2's): bytes written as characters, and the splits of text that models were trained with.

The names are those of GGUF's "tokenizer.ggml.pre"; the expressions those of the models' own tokenizer.json. Knows no
files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORD_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORD_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BOTH_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+CONTRACTION|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*CONTRACTION|"
    r"\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _BOTH_CASES.replace("CONTRACTION", "").replace("DIGITS", "")
_GPT4O = _BOTH_CASES.replace("CONTRACTION", _CONTRACTION + "?").replace("DIGITS", "{1,3}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {  # names -> expressions, each applied to what the one before left
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "granite-docling"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral", "dbrx", "smaug-bpe"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"): (_QWEN2,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4"): (_GPT4O,),
    ("default",): _DEFAULT,
}
SPLITS = {name: expressions for names, expressions in _SPLITS.items() for name in names}

WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral", "tekken"})
"""Where a word that is in the vocabulary is taken as it is, whatever the merges say."""
BOS_BY_DEFAULT = WHOLE_WORDS


def _bytes_to_chars() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_OF_CHAR = {char: byte for byte, char in _bytes_to_chars().items()}


def to_bytes(piece: str) -> bytes:
    """The bytes that a byte-level piece stands for; characters that stand for none are taken as they are."""
    found = bytearray()
    for char in piece:
        byte = BYTE_OF_CHAR.get(char)
        found += char.encode() if byte is None else bytes((byte,))
    return bytes(found)


def byte_level_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], expressions: tuple[str, ...], *, whole_words: bool
) -> tokenizers.Tokenizer:
    """A tokenizer of plain text: split by each of the expressions in turn, bytes, merges. Raises what `tokenizers` does
    for merges whose parts are not in the vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    steps: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def token_ids(tokenizer: tokenizers.Tokenizer, text: str, *, add: bool = False) -> list[int]:
    """The ids of a text; other threads run meanwhile. `add`: with the special tokens around it."""
    # Of `tokenizers` only the batches release the GIL: a text of half a megabyte would stop all else for half a second.
    found: list[int] = tokenizer.encode_batch([text], add_special_tokens=add)[0].ids
    return found
