"""A GGUF file's settings and tensors in Hugging Face's dialect. Knows how converters wrote them; knows no backend.

What converters to GGUF change is changed back: names; for llama the order of the rows of q and k (theirs pairs
neighbouring dimensions for rope, ours the two halves), for gemma3 the 1 added to the norms' weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.loading.dialect import FULL, SLIDING, normalise
from octavo.loading.gguf import GGUFFile, read_gguf
from octavo.loading.storage import BY_NAME, Raw
from octavo.loading.tensor import StoredTensor
from octavo.loading.tensor_map import TensorMap
from octavo.loading.tokenizer import Tokenizer

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {**_ATTENTION, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
_GEMMA3 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_ATTENTION, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_OUTER = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class _Names:
    """Hugging Face's names for an architecture's tensors."""

    architecture: str
    outer: dict[str, str]
    layer: dict[str, str]  # within a layer
    layers: str = "model.layers"


_ARCHITECTURES = {
    "llama": _Names("llama", _OUTER, _LLAMA),
    "qwen2": _Names("qwen2", _OUTER, _LLAMA),
    "qwen3": _Names("qwen3", _OUTER, _LLAMA),
    "gemma3": _Names("gemma3_text", _OUTER, _GEMMA3),
    "phi3": _Names("phi3", _OUTER, _PHI3),
    "gpt2": _Names("gpt2", _GPT2_OUTER, _GPT2, "h"),
}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")


def read_gguf_model(path: Path) -> tuple[str, Path, str, dict[str, Any], TensorMap, Tokenizer | None]:
    """The fields of a Checkpoint from a GGUF file; raises ModelError as `read_gguf` does and for what is missing."""
    from octavo.loading.gguf_tokenizer import read_gguf_tokenizer

    file = read_gguf(path)
    keys = _Keys(file)
    names = _ARCHITECTURES.get(keys.architecture)
    if names is None:
        raise ModelError(
            f"{path}: the architecture {keys.architecture!r} (general.architecture) is not supported; "
            f"{', '.join(_ARCHITECTURES)} are."
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is one part of a split model; join the parts with llama-gguf-split --merge first.")
    renamed = _rename(file, names)
    config = normalise(_settings(file, keys, names), path)
    _check_layers(path, renamed, config["num_hidden_layers"], names.layers)
    tensors = TensorMap({name: _maker(name, renamed[name], keys, config) for name in renamed})
    tokenizer = read_gguf_tokenizer(file)
    if tokenizer is not None and tokenizer.vocab_size > config["vocab_size"]:
        raise ModelError(
            f"{path} has {tokenizer.vocab_size} tokens but embeddings ('token_embd.weight') for {config['vocab_size']}."
        )
    title = file.metadata.get("general.name")
    name = title if isinstance(title, str) and title else path.stem
    return name, path, config["model_type"], config, tensors, tokenizer


class _Keys:
    """The metadata of a file's own architecture, checked for their kind."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._metadata = file.metadata
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{file.path} lacks the metadata key 'general.architecture', a text.")
        self.architecture = architecture

    def get(self, key: str, kind: type[int] | type[float] | type[str]) -> Any:
        """The value of `<architecture>.<key>`, or None; a ModelError if it is of another kind."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        if value is None or type(value) is kind or (kind is float and type(value) is int):
            return value
        raise ModelError(
            f"{self.path}: the metadata key '{self.architecture}.{key}' is {_shown(value)}; it must be one "
            f"{kind.__name__}."
        )

    def array(self, key: str) -> list[Any] | None:
        """The values of `<architecture>.<key>` if it is an array of numbers or bools, else None."""
        value = self._metadata.get(f"{self.architecture}.{key}")
        return value.tolist() if isinstance(value, np.ndarray) else None

    def need(self, key: str, kind: type[int] | type[float]) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path} lacks the metadata key '{self.architecture}.{key}'.")
        return value


def _shown(value: object) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rename(file: GGUFFile, names: _Names) -> dict[str, StoredTensor]:
    """The file's tensors under Hugging Face's names; one that the architecture does not have is refused."""
    renamed = {}
    for theirs, tensor in file.tensors.items():
        if theirs in _ROPE_FACTORS:
            continue
        block, outside = _BLOCK.fullmatch(theirs), _OUTSIDE.fullmatch(theirs)
        if block and block[2] in names.layer:
            ours = f"{names.layers}.{int(block[1])}.{names.layer[block[2]]}.{block[3]}"
        elif outside and outside[1] in names.outer:
            ours = f"{names.outer[outside[1]]}.{outside[2]}"
        else:
            raise ModelError(
                f"{file.path}: the tensor {theirs!r} is unknown in the architecture {names.architecture!r}, so this "
                "kind of model is not supported."
            )
        renamed[ours] = tensor
    return renamed


def _check_layers(path: Path, tensors: dict[str, StoredTensor], layers: int, prefix: str) -> None:
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    found = {int(match[1]) for name in tensors if (match := pattern.match(name))}
    if found != set(range(layers)):
        raise ModelError(
            f"{path}: block_count is {layers} but there are tensors of {len(found)} layers"
            + (f" (up to number {max(found)})." if found else ".")
        )


def _settings(file: GGUFFile, keys: _Keys, names: _Names) -> dict[str, Any]:
    """The metadata as config.json would have them; `dialect.normalise` fills in the rest."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight', which every model needs.")
    if keys.get("expert_count", int):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported.")
    config: dict[str, Any] = {
        "model_type": names.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length", int),
        "intermediate_size": keys.need("feed_forward_length", int),
        "num_hidden_layers": keys.need("block_count", int),
        "num_attention_heads": keys.need("attention.head_count", int),
        "max_position_embeddings": keys.need("context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if names.architecture == "gpt2":
        return {**config, "layer_norm_epsilon": keys.need("attention.layer_norm_epsilon", float)}
    config |= {
        "num_key_value_heads": keys.get("attention.head_count_kv", int) or config["num_attention_heads"],
        "head_dim": keys.get("attention.key_length", int),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon", float),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": keys.get("attention.sliding_window", int) or None,
    }
    config["head_dim"] = head_dim = config["head_dim"] or _head_dim(config)
    if keys.get("attention.value_length", int) not in (None, head_dim):
        raise ModelError(f"{file.path}: values of another length than keys ({head_dim}) are not supported.")
    if names.architecture == "llama" and config["sliding_window"] is not None:
        config["model_type"] = "mistral"  # GGUF has no name of its own for it
    if names.architecture == "gemma3_text":
        config |= _gemma3_settings(keys, config)
    return config | _rope_settings(file, keys, config)


def _head_dim(config: dict[str, Any]) -> int | None:
    heads = config["num_attention_heads"]
    return config["hidden_size"] // heads if heads > 0 and config["hidden_size"] % heads == 0 else None


def _gemma3_settings(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3's converter leaves out: it is the same for all sizes but the scale of the 27B model."""
    scale = keys.get("attention.scale", float)
    is_27b = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] / max(config["num_attention_heads"], 1) if is_27b else config["head_dim"]
    return {
        "query_pre_attn_scalar": 1 / scale / scale if scale else per_head,
        **_window_pattern(keys),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", float) or 10_000.0,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", float),
        "final_logit_softcapping": keys.get("final_logit_softcapping", float),
    }


def _window_pattern(keys: _Keys) -> dict[str, Any]:
    """Every how many layers one sees all, or for each layer whether it has a window; what is missing is left out."""
    each = keys.array("attention.sliding_window_pattern")
    if each is not None:
        return {"layer_types": [SLIDING if windowed else FULL for windowed in each]}
    period = keys.get("attention.sliding_window_pattern", int)
    return {} if period is None else {"sliding_window_pattern": period}


def _rope_settings(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if (theta := keys.get("rope.freq_base", float)) is not None:
        settings["rope_theta"] = theta
    rotated = keys.get("rope.dimension_count", int)
    if rotated is not None and config["head_dim"]:
        if not 0 < rotated <= config["head_dim"]:
            raise ModelError(
                f"{file.path}: rope.dimension_count is {rotated}; it must be from 1 to the head size "
                f"{config['head_dim']}."
            )
        settings["partial_rotary_factor"] = rotated / config["head_dim"]
    settings["rope_scaling"] = _rope_scaling(file, keys)
    return settings


def _rope_scaling(file: GGUFFile, keys: _Keys) -> dict[str, Any] | None:
    factors = {name: tensor.float32() for name in _ROPE_FACTORS if (tensor := file.tensors.get(name)) is not None}
    kind = keys.get("rope.scaling.type", str) or ("linear" if keys.get("rope.scale_linear", float) else "none")
    original = keys.get("rope.scaling.original_context_length", int)
    attention = keys.get("rope.scaling.attn_factor", float) or keys.get("rope.scaling.yarn_attn_factor", float)
    if "rope_factors_long.weight" in factors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long.weight"].tolist(),
            "short_factor": factors.get("rope_factors_short.weight", np.empty(0)).tolist(),
            "original_max_position_embeddings": original,
        }
        return scaling | ({} if attention is None else {"attention_factor": attention})
    if "rope_freqs.weight" in factors:
        return {"rope_type": "factors", "factors": factors["rope_freqs.weight"].tolist()}
    if kind in ("none", "longrope"):  # longrope without factors: a model of the short context
        return None
    factor = keys.get("rope.scaling.factor", float) or keys.get("rope.scale_linear", float)
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := keys.get(f"rope.scaling.{theirs}", float)) is not None:
                scaling[ours] = value
        if attention not in (None, 1.0) and factor and factor > 0:
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return scaling


def _maker(name: str, tensor: StoredTensor, keys: _Keys, config: dict[str, Any]) -> Callable[[], StoredTensor]:
    tensor = replace(tensor, name=name)
    permuted = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    for part, key in permuted.items() if keys.architecture == "llama" else ():
        if part in name:
            heads, rows = config[key], tensor.shape[0]
            if rows % (2 * heads):
                raise ModelError(
                    f"{keys.path}: the tensor {name!r} has {rows} rows, which do not divide into {heads} heads of even "
                    "size."
                )
            return partial(_unpermuted, tensor, heads)
    if keys.architecture == "gemma3" and name.endswith("norm.weight"):
        return partial(_less_one, tensor)
    return lambda: tensor


def _unpermuted(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Rows (quantised or not) from GGUF's order, rope pairs side by side, to Hugging Face's, halves apart."""
    rows, *rest = tensor.raw.shape
    by_pair: Raw = tensor.raw.reshape(heads, rows // heads // 2, 2, *rest)
    return replace(tensor, raw=np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows, *rest))


def _less_one(tensor: StoredTensor) -> StoredTensor:
    kind = BY_NAME["F32"]
    return StoredTensor(tensor.name, tensor.shape, kind.name, tensor.float32() - np.float32(1), kind.decode)
