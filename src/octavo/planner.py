"""How many requests fit in a memory, contiguous against paged. Pure arithmetic: knows no model file and no engine.

Contiguous allocation reserves the longest context for every request, whatever it will need. Paged allocation takes
blocks as tokens come, and wastes on average half of each request's last block (Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import BLOCK_SIZES
from octavo.errors import ConfigError

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1}
SCALE_BYTES = {"int8": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What decides the size of a token's keys and values. Every layer counts, sliding windows too."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    scale_bytes: int = 0  # beside each key and each value of a head

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "element_bytes"):
            _at_least_one(name, getattr(self, name))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: a key and a value in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    def formula(self, block_size: int) -> str:
        """The bytes of a block, written out: block size x 2 x layers x heads x head size x bytes an element."""
        head: tuple[object, ...] = (self.head_dim, self.element_bytes)
        if self.scale_bytes:
            head = (f"({self.head_dim} × {self.element_bytes} + {self.scale_bytes})",)
        factors = (block_size, 2, self.num_layers, self.num_kv_heads, *head)
        return f"{' × '.join(map(str, factors))} = {block_size * self.token_bytes:,} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What fits. Memory in bytes, everything else in blocks, tokens or requests."""

    memory: int  # for KV blocks alone
    block_size: int  # tokens in a block
    block_bytes: int
    context: int  # longest request, prompt and answer
    typical: int  # tokens of an average request, prompt and answer
    blocks: int
    contiguous: int  # requests, each reserving the longest context
    paged: int  # requests of the typical length, each taking the blocks it needs
    paged_longest: int  # requests when every one of them grows to the longest context

    @property
    def tokens(self) -> int:
        """Tokens the blocks hold."""
        return self.blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.block_bytes // self.block_size

    @property
    def contiguous_use(self) -> float:
        """Part of a contiguous reservation that a typical request fills."""
        return self.typical / self.context

    @property
    def paged_use(self) -> float:
        """Part of its blocks that a typical request fills, on average."""
        return self.typical / (self.typical + (self.block_size - 1) / 2)

    @property
    def gain(self) -> float | None:
        """Paged requests for each contiguous one; None where not one contiguous request fits."""
        return self.paged / self.contiguous if self.contiguous else None


def plan(shape: KVShape, *, memory: int, context: int, typical: int | None = None, block_size: int = 16) -> Plan:
    """Divide `memory` bytes among requests; `typical` is a quarter of the context where it is not known.

    Raises ConfigError for a number below 1, a block size that no engine has, or a typical request longer than the
    context.
    """
    typical = max(1, context // 4) if typical is None else typical
    for name, value in (("memory", memory), ("context", context), ("typical", typical)):
        _at_least_one(name, value)
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size is {block_size!r}; it must be one of {', '.join(map(str, BLOCK_SIZES))}.")
    if typical > context:
        raise ConfigError(f"A typical request of {typical} tokens is longer than the context of {context}.")
    block_bytes = block_size * shape.token_bytes
    blocks = memory // block_bytes
    # A length is as likely to end anywhere in its last block, so a request holds (block_size - 1) / 2 empty slots
    # on average; twice both sides keeps this in whole numbers.
    return Plan(
        memory=memory,
        block_size=block_size,
        block_bytes=block_bytes,
        context=context,
        typical=typical,
        blocks=blocks,
        contiguous=memory // (context * shape.token_bytes),
        paged=2 * blocks * block_size // (2 * typical + block_size - 1),
        paged_longest=blocks // -(-context // block_size),
    )


def _at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
