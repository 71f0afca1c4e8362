"""Text to token ids and back, and chats to prompts. Knows no files: see `gguf_tokenizer` and `hf_tokenizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import RequestError
from octavo.loading.chat import ChatTemplate, Message
from octavo.loading.special import SpecialTokens

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, never part of a text that means something


class Encoder(Protocol):
    """How a text becomes ids. `add`: put BOS and EOS around it as the model asks; `parse`: take the spellings of
    control tokens for these (other added tokens are always found)."""

    def __call__(self, text: str, *, add: bool, parse: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids mean."""

    size: int  # ids below it have a text; a model may have more, unused ones
    text: Callable[[int], str | None]  # a token as the file spells it
    bytes: Callable[[int], bytes]  # what a token adds to a text
    special_ids: frozenset[int]  # control tokens, whatever their use


@dataclass(slots=True)
class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Decoding adds up: the bytes of a list of ids are those of its tokens one after another (`token_bytes`), nothing is
    cleaned up afterwards. One exception: of ids that begin with BOS, `decode` takes off the space that encoding put
    before the text (Llama 2, Mistral, Phi-3).
    """

    vocabulary: Vocabulary
    encoder: Encoder
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None
    named_tokens: dict[str, str]  # what chat templates may use: "bos_token", "eos_token", ...
    prefix_space: bool = False  # encoding puts a space before the text
    _longest: int | None = field(default=None, repr=False)
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)
    _template: ChatTemplate | None = field(default=None, repr=False)
    _control: SpecialTokens | None = field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        """Ids below it have a text."""
        return self.vocabulary.size

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text has fewer tokens than its bytes divided by this."""
        if self._longest is None:
            self._longest = max((len(self.vocabulary.bytes(token)) for token in range(self.vocab_size)), default=1)
        return self._longest

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: they are no text, and plain text never becomes one."""
        return self.vocabulary.special_ids

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`.

        `special`: BOS and EOS are added as the model asks, and the spellings of control tokens ("<|im_end|>") become
        these tokens. Without it neither: whatever the text, no control token comes out. Raises RequestError for what
        is no text, as half of a surrogate pair (Python's stand-in for bytes that are not UTF-8).
        """
        _check_text(text)
        return self.encoder(text, add=special, parse=special)

    def encode_chat_text(self, text: str) -> list[int]:
        """Token ids of what a chat template gave: control tokens are found in it, none is added (the template has
        put BOS where it belongs)."""
        _check_text(text)
        return self.encoder(text, add=False, parse=True)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Token ids of a chat. Spellings of control tokens within the messages and `extra` (tools and their
        descriptions) stay text: only the template's own become control tokens. Raises RequestError as `render_chat`
        does."""
        try:
            (messages, extra), mark = self._marked([messages, extra])
        except RecursionError:
            raise RequestError("The messages are nested too deeply.") from None
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **extra)
        if mark is None:
            return self.encode_chat_text(text)
        _check_text(text)
        found: list[int] = []
        for part in self._control_tokens.split(text):
            found += [part] if isinstance(part, int) else self.encode(part.replace(mark, ""), special=False)
        return found

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt that the model's chat template makes of the messages (each a dict with "role" and "content").

        `extra` are further variables of the template ("tools", "enable_thinking", ...). Raises RequestError if the
        model has no chat template or the template refuses.
        """
        if self._template is None:
            if self.chat_template is None:
                raise RequestError(
                    "The model has no chat template, so it takes no messages; give it a prompt as text, or use an "
                    "instruction-tuned model."
                )
            self._template = ChatTemplate(self.chat_template)
        variables = {**self.named_tokens, **extra}
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids that mean nothing add nothing."""
        ids = list(ids)
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(token) for token in ids if token not in skipped]).decode(errors="replace")
        begins = self.prefix_space and skip_special_tokens and bool(ids) and ids[0] == self.bos_id
        return text[1:] if begins and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, perhaps part of a character; a control token its spelling."""
        found = self._bytes.get(token)
        if found is None:
            found = self.vocabulary.bytes(token) if 0 <= token < self.vocabulary.size else b""
            self._bytes[token] = found
        return found

    def token_text(self, token: int) -> str:
        """A token for people to read; half a character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    @property
    def _control_tokens(self) -> SpecialTokens:
        if self._control is None:
            spelled = {self.vocabulary.text(token): token for token in self.special_ids}
            self._control = SpecialTokens({text: token for text, token in spelled.items() if text and len(text) > 1})
        return self._control

    def _marked(self, messages: Any) -> tuple[Any, str | None]:
        """The messages with a mark inside each spelling of a control token, and the mark; None if there are none.

        With the mark inside it is no such token to the splitter; afterwards the mark is taken out of the text.
        """
        texts = list(_texts(messages))
        if all(isinstance(part, str) for text in texts for part in self._control_tokens.split(text)):
            return messages, None
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise RequestError("The messages hold control tokens and all of Unicode's noncharacters U+FDD0 to U+FDEF.")
        return _mapped(messages, lambda text: self._broken(text, mark)), mark

    def _broken(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of each control token, until none is left."""
        while True:
            parts = list(self._control_tokens.split(text))
            if all(isinstance(part, str) for part in parts):
                return text
            spelled = [part if isinstance(part, str) else self.vocabulary.text(part) or "" for part in parts]
            text = "".join(
                said if isinstance(part, str) else said[0] + mark + said[1:]
                for part, said in zip(parts, spelled, strict=True)
            )


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"A prompt must be a text, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "The text has a character that is no valid Unicode (a lone surrogate, as comes from bytes that are not "
            f"UTF-8): {text[error.start]!r} at character {error.start}."
        ) from None


def _texts(value: Any) -> Iterable[str]:
    """All texts within nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with each text within changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, change) for inner in value]
    return value
