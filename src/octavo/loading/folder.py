"""A Hugging Face folder: config.json, safetensors (one file or shards), tokenizer. Knows no backend.

Pickled weights (pytorch_model.bin) are never read: unpickling runs whatever code they hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.loading.dialect import check_end_ids, normalise
from octavo.loading.files import read_json
from octavo.loading.hf_tokenizer import read_hf_tokenizer
from octavo.loading.safetensors import read_safetensors
from octavo.loading.tensor import StoredTensor
from octavo.loading.tensor_map import TensorMap
from octavo.loading.tokenizer import Tokenizer

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Beside the weights: vision towers, and buffers that old Transformers saved.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector)\..*|.*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
)
_TRANSPOSED = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")  # GPT-2's Conv1D
_INNER = re.compile(r"(layers\.|embed_tokens\.|norm\.)")  # saved without the language model's head


def read_folder(folder: Path) -> tuple[str, dict[str, Any], TensorMap, Tokenizer | None]:
    """Architecture, config, tensors and tokenizer of a Checkpoint; raises ModelError for what is missing or wrong."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder or a .gguf file.")
    config = normalise(read_json(path), path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        check_end_ids(read_json(generation), generation)
    architecture = config["model_type"]
    makers: dict[str, Callable[[], StoredTensor]] = {}
    for theirs, tensor in _weights(folder).items():
        if _IGNORED.fullmatch(theirs):
            continue
        name = _our_name(theirs, architecture)
        if name in makers:
            raise ModelError(f"{folder} has two tensors that both mean {name!r}.")
        tensor = replace(tensor, name=name)
        transposed = architecture == "gpt2" and _TRANSPOSED.fullmatch(name)
        makers[name] = partial(_transpose, tensor) if transposed else partial(_same, tensor)
    return architecture, config, TensorMap(makers), read_hf_tokenizer(folder, config)


def _weights(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    if (folder / _ONE).is_file():
        return read_safetensors(folder / _ONE)
    if any(found for pattern in _PICKLED for found in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has its weights only as pickles (.bin), which may run any code and are not read; convert them "
            "with Transformers: save_pretrained writes safetensors."
        )
    raise ModelError(f"{folder} has neither {_ONE} nor {_INDEX}.")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files.")
    weights: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise ModelError(f"{index} names the file {file!r}, which is not in the folder; get the whole model.")
        shard = read_safetensors(folder / file)
        for name in (name for name, place in places.items() if place == file):
            if name not in shard:
                raise ModelError(f"{folder / file} lacks the tensor {name!r}, which {_INDEX} promises there.")
            weights[name] = shard[name]
    return weights


def _our_name(name: str, architecture: str) -> str:
    """The one name that a tensor goes by, whichever class of Transformers saved it."""
    if architecture == "gpt2":
        return name.removeprefix("transformer.")
    if architecture == "opt":
        return f"model.{name}" if name.startswith("decoder.") else name
    name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name).replace("model.lm_head.", "lm_head.")
    return f"model.{name}" if _INNER.match(name) else name


def _same(tensor: StoredTensor) -> StoredTensor:
    return tensor


def _transpose(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, shape=tensor.shape[::-1], raw=np.ascontiguousarray(tensor.raw.T))
