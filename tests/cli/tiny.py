"""A model small enough to follow by eye: it answers "abc" with "defg..." up to "z". Its engine is the real one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.loading.tokenizer import Tokenizer, Vocabulary
from octavo.ops import reference
from octavo.ops.interface import Array, StepInput

EOS = ord("{")  # what comes after z
VOCABULARY = 128  # ASCII
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}"


class Alphabet:
    """The next token is the code point after the last one; `delay` seconds a step make it slow enough to kill."""

    num_layers, num_kv_heads, head_dim = 4, 4, 64  # so that a pool of the default size has few blocks
    vocab_size = VOCABULARY
    max_positions = 512

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay

    def forward(self, step: StepInput, cache: Array, /) -> Array:
        time.sleep(self.delay)
        return step.token_ids[step.logit_rows][:, None].astype(np.float32)

    def logits(self, hidden: Array, /) -> Array:
        scores = np.zeros((len(hidden), VOCABULARY), np.float32)
        scores[np.arange(len(hidden)), (hidden[:, 0].astype(int) + 1) % VOCABULARY] = 100.0
        return scores


def tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token a character."""

    def encode(text: str, *, add: bool, parse: bool) -> list[int]:
        return [ord(character) for character in text]

    return Tokenizer(
        vocabulary=Vocabulary(VOCABULARY, chr, lambda token: chr(token).encode(), frozenset({EOS})),
        encoder=encode,
        bos_id=None,
        eos_ids=frozenset({EOS}),
        chat_template=template,
        named_tokens={},
    )


def engine(config: EngineConfig, *, delay: float = 0.0, template: str | None = TEMPLATE) -> Engine:
    """The real engine on this model."""
    model: Any = Alphabet(delay)
    return Engine(model, reference, config, tokenizer=tokenizer(template), eos_ids={EOS})
