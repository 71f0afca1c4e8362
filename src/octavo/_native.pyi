"""The compiled kernels: native/src/module.cpp. Imported by octavo.ops.native only, when an engine is loaded.

Functions raise ValueError, a sentence, for arguments that do not fit together, and MemoryError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def default_threads() -> int:
    """OMP_NUM_THREADS, or the processors that this process may use."""

def isa() -> str:
    """The instruction set whose kernels run: OCTAVO_ISA, or the best that this processor has."""

def byte_dots() -> bool:
    """Whether it multiplies bytes, four at a time."""

def bf16_dots() -> bool:
    """Whether attention multiplies bfloat16 pairs: then it rounds queries and weights to them."""

def usable_isas() -> list[str]:
    """The instruction sets that this processor can run, best first."""

class Weight:
    """A matrix repacked for the kernels, in about the bytes of the file."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def inputs(self) -> list[str]:
        """The forms of activations it is multiplied with: q8, bf16, f32."""

    @property
    def gateable(self) -> bool:
        """Whether its lower half can gate its upper half as the product is made."""

def pack(parts: Sequence[tuple[str, NDArray[np.generic], int, int]], threads: int) -> Weight:
    """Stack parts, each (storage type, raw bytes, rows, columns), and repack them on so many threads."""

class Cache:
    """Zeroed memory of KV blocks, given by the system as it is written."""

    def __init__(
        self, num_blocks: int, kv_type: str, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> None: ...
    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The memory itself: [num_blocks, bytes of a block]."""

def block_bytes(kv_type: str, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """Bytes of one block, all layers, keys and values."""

def copy_blocks(source: Cache, target: Cache, pairs: NDArray[np.int32], threads: int) -> None:
    """target[b] = source[a] for each row (a, b) of `pairs`, all reads before all writes; no b comes twice."""

class Program:
    """Instructions over regions of memory (native/src/program.hpp). Values and regions are numbers; -1 stands for none.

    What is built last is run last; nothing is added after the first run.
    """

    def __init__(self, threads: int) -> None: ...
    def region(self, tokens: int, logits: int) -> int:
        """Memory of so many bytes a token, or a logit row, whichever is more."""

    def input(self, columns: int) -> int:
        """The region of the next of a run's inputs."""

    def output(self, rows: str, columns: int) -> int:
        """The region of what a run returns."""

    def value(self, rows: str, columns: int, stride: int, first: int, f32: int, q8: int, bf16: int) -> int: ...
    def rope(self, inv_freq: NDArray[np.float32], factor: float, max_positions: int) -> int: ...
    def barrier(self) -> None: ...
    def linear(
        self,
        x: int,
        weight: Weight,
        bias: NDArray[np.float32] | None,
        residual: int = -1,
        gate: str | None = None,
        *,
        out: int,
    ) -> None: ...
    def embed(self, weight: Weight, ids: str, factor: float, out: int) -> None: ...
    def norm(
        self,
        x: int,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        eps: float,
        residual: int = -1,
        *,
        out: int,
    ) -> None: ...
    def take_rows(self, x: int, rows: str, out: int) -> None: ...
    def add(self, x: int, y: int, out: int) -> None: ...
    def scale(self, x: int, number: float, out: int) -> None: ...
    def softcap(self, x: int, number: float, out: int) -> None: ...
    def activate(self, x: int, kind: str, out: int) -> None: ...
    def gated(self, x: int, kind: str, out: int) -> None: ...
    def convert(self, x: int) -> None: ...
    def attention(
        self,
        q: int,
        k: int,
        v: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        rope: int,
        out: int,
    ) -> None: ...
    def run_step(
        self,
        inputs: Sequence[NDArray[np.float32]],
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        cache: Cache | None,
    ) -> NDArray[np.float32]:
        """Run over a step's tokens; the array is the caller's for as long as it is held."""

    def run_rows(self, inputs: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Run over the rows of the inputs."""

    def time(self) -> None:
        """From now on, note the time that one thread spends in each instruction; a barrier's is the time it waits."""

    def seconds(self) -> list[tuple[str, float]]:
        """Each instruction's kind, and its time since then."""

    @property
    def threads(self) -> int: ...

def draw(
    logits: NDArray[np.float32],
    sources: NDArray[np.int64],
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    uniform: NDArray[np.float64],
    threads: int,
) -> NDArray[np.int64]:
    """A token for each of R draws, as `Ops.draw` says, on up to so many threads."""

def logprobs(
    logits: NDArray[np.float32], sources: NDArray[np.int64], token_ids: NDArray[np.int64], top: int, threads: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Sums [R], ranks [R] and the likeliest [R, top], as `Ops.logprobs` says, on up to so many threads."""
