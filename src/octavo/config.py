"""How an engine is set up: every setting with its default and its meaning. Knows no model and no memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ConfigError

BLOCK_SIZES = (1, 4, 8, 16, 32, 64)
MAX_NUM_SEQS = 65_536
MAX_THREADS = 1024
PreemptionMode = Literal["auto", "recompute", "swap"]
Backend = Literal["auto", "native", "reference"]
KvDtype = Literal["auto", "bf16", "f16", "f32", "int8"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "preemption": get_args(PreemptionMode),
    "backend": get_args(Backend),
    "kv_dtype": get_args(KvDtype),
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "TIB": 2**40, "TB": 10**12, "T": 2**40}


def parse_bytes(text: int | str) -> int:
    """Bytes in '24GiB', '512 MiB', '1.5GB' or a plain number; raises ConfigError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"A memory size cannot be negative: {text}.")
        return text
    match = None if not isinstance(text, str) else re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or len(match[1]) > 18:
        raise ConfigError(f"{text!r} is not a memory size; write it like 512MiB, 24GiB or 1.5GB.")
    return int(float(match[1]) * unit)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes of memory are bytes or texts such as "2GiB".

    `deterministic` True refuses a backend that cannot promise it; None and False take what the backend gives: the
    native one always promises it, since it costs nothing there, the reference never.

    Raises ConfigError, naming the setting, for a value that cannot be.
    """

    block_size: int = 16  # tokens in a KV block: 1, 4, 8, 16, 32 or 64
    num_blocks: int | None = None  # KV blocks; None: as many as kv_memory holds
    kv_memory: int | str = "1GiB"  # memory for KV blocks, when num_blocks is None
    prefault: bool = False  # have the system give all KV memory at the start, not page by page as it is written
    swap_memory: int | str = "256MiB"  # host memory for blocks of preempted requests; 0: always recompute
    max_model_len: int | None = None  # longest sequence, prompt and answer; None: what the model was trained for
    max_num_seqs: int | None = None  # sequences that run at once; None: 256, or the token budget if that is smaller
    max_batched_tokens: int = 2048  # token budget of one step; longer prompts are computed in chunks
    prefix_caching: bool = True  # find again the blocks of a prompt's beginning
    preemption: PreemptionMode = "auto"  # how a request gives up its blocks: by estimated cost, or always one way
    seed: int | None = None  # where requests without a seed of their own draw theirs from; None: from the system
    backend: Backend = "auto"  # what computes: our kernels, or NumPy; auto: the kernels, if they are installed
    threads: int | None = None  # of the kernels; None: OMP_NUM_THREADS, or the processors this process may use
    kv_dtype: KvDtype = "auto"  # what keys and values are kept as; auto: int8 beside quantised weights where it is fast
    deterministic: bool | None = None  # the same bits whatever the batch, chunking, caching, preemption and threads

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES or not _is_whole(self.block_size):
            raise ConfigError(f"block_size is {self.block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                options = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {options}.")
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "max_batched_tokens"):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and 1 <= value < 2**31):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 to {2**31 - 1}.")
        if self.threads is not None and not (_is_whole(self.threads) and 1 <= self.threads <= MAX_THREADS):
            raise ConfigError(f"threads is {self.threads!r}; it must be a whole number from 1 to {MAX_THREADS}.")
        if self.deterministic is not None and not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic is {self.deterministic!r}; it must be True, False or None.")
        if self.seed is not None and not _is_whole(self.seed):
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number, or None.")
        if self.sequence_limit > MAX_NUM_SEQS:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; at most {MAX_NUM_SEQS} sequences can run at once.")
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_batched_tokens:
            raise ConfigError(
                f"max_num_seqs is {self.max_num_seqs} but a step has room for {self.max_batched_tokens} tokens "
                "(max_batched_tokens); every running sequence needs one, so raise the budget or lower max_num_seqs."
            )
        parse_bytes(self.kv_memory)
        parse_bytes(self.swap_memory)

    @property
    def sequence_limit(self) -> int:
        """Sequences that may run at once."""
        return self.max_num_seqs or min(256, self.max_batched_tokens)
