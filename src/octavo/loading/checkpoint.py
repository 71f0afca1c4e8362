"""A model as it was found: settings, weights and tokenizer in one dialect, whatever file they came from.

Knows the two kinds of source, a GGUF file and a Hugging Face folder; knows nothing of backends or engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.loading.files import is_there
from octavo.loading.storage import BY_NAME
from octavo.loading.tensor import StoredTensor
from octavo.loading.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's settings, weights and tokenizer.

    `config` has the keys described in `octavo.loading.dialect`. `tensors` have Hugging Face's names with one prefix
    an architecture: "model." for llama, mistral, qwen2, qwen3, gemma3_text and phi3, "model.decoder." for opt and
    none for gpt2 ("h.0.attn.c_attn.weight"); "lm_head.weight" is there only if the file has it. Every matrix lies
    as a linear layer's [out, in], GPT-2's too, whose Hugging Face files have [in, out]. Gemma's norms lack the 1
    that the model adds. The rows of q and k are in Hugging Face's (half-split) rope order.
    """

    name: str  # for people
    path: Path
    architecture: str  # Hugging Face's model_type
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None  # None: the folder has none

    @property
    def quantised(self) -> bool:
        """Whether most of the weights are kept in a quantised type."""
        sizes = {True: 0, False: 0}
        for tensor in self.tensors.values():
            sizes[BY_NAME[tensor.dtype].quantised] += math.prod(tensor.shape)
        return sizes[True] > sizes[False]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The named weight; raises ModelError if it is missing or, where `shape` is given, has another shape."""
        if name not in self.tensors:
            raise ModelError(
                f"{self.path} has no tensor {name!r}, which a model of architecture {self.architecture!r} needs."
            )
        tensor = self.tensors[name]
        if shape is not None and tensor.shape != tuple(shape):
            raise ModelError(
                f"{self.path}: the tensor {name!r} has shape {list(tensor.shape)}, but the model's settings ask for "
                f"{list(shape)}."
            )
        return tensor


def load_checkpoint(path: Path) -> Checkpoint:
    """The model in a .gguf file or in a Hugging Face folder; weights are mapped, not read.

    Raises ModelError, naming the file and the tensor or key, for whatever cannot be read or is not supported.
    """
    path = Path(path)
    there = is_there(path)
    if path.is_dir():
        from octavo.loading.folder import read_folder

        return Checkpoint(path.resolve().name, path, *read_folder(path))
    if not there:
        raise ModelError(f"There is no file or folder {path}; give a .gguf file or a Hugging Face folder.")
    from octavo.loading.gguf_model import read_gguf_model

    return Checkpoint(*read_gguf_model(path))
