"""The KV cache as virtual memory. Imports nothing else of Octavo, and no tensors."""

from octavo.kv.block_pool import BlockPool, BlockState
from octavo.kv.block_table import BlockTable
from octavo.kv.manager import Admission, KVManager, Outcome, Pin
from octavo.kv.memory_ops import Kind, MemoryOps
from octavo.kv.prefix_cache import PrefixCache
from octavo.kv.report import BlockReport, Usage

__all__ = [
    "Admission",
    "BlockPool",
    "BlockReport",
    "BlockState",
    "BlockTable",
    "KVManager",
    "Kind",
    "MemoryOps",
    "Outcome",
    "Pin",
    "PrefixCache",
    "Usage",
]
