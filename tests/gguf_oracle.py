"""Transformers' model of a GGUF file, quickly: it reads the file's vocabulary twice, byte by byte, and makes the table
of tensor names once for each layer and weight. Both are remembered here, which takes most of a minute down to seconds.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np


def _bytes_of(path: Any, *_: Any, **__: Any) -> np.ndarray:
    """The whole file in memory: slices of a memory map are slow to make, and the reader makes millions."""
    return np.fromfile(path, np.uint8)


def load_oracle(path: Path) -> Any:
    """The model in float32 on the CPU, with eager attention, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    with (
        mock.patch.object(np, "memmap", _bytes_of),
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()
