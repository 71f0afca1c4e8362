"""One dialect of model settings: Hugging Face's config.json with its history smoothed out. Knows no file format.

`normalise` takes the keys of any config.json (Transformers 4's and 5's forms; GGUF metadata are translated to them
first) and returns a copy in which these always exist:

    model_type               "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2" or "opt"
    vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
    max_position_embeddings  whole numbers of at least 1 (GPT-2's and OPT's under these names too)
    hidden_act               "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", ...
    tie_word_embeddings      bool
    sliding_window           int or None: tokens that a "sliding_attention" layer sees, itself included
    layer_types              "full_attention" or "sliding_attention" for each layer
    rms_norm_eps             float (not for gpt2 and opt; gpt2 has layer_norm_epsilon)
    rope_theta               float (not for gpt2 and opt, as the next three)
    partial_rotary_factor    float: the share of head_dim that is rotated
    rope_scaling             None, or a dict whose "rope_type" is
        "linear"    factor
        "llama3"    factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
        "yarn"      factor, original_max_position_embeddings; may have attention_factor, beta_fast, beta_slow, ...
        "longrope"  short_factor, long_factor (lists), original_max_position_embeddings; may have factor,
                    attention_factor
        "factors"   factors: each inverse frequency is divided by its factor (from a GGUF's rope_freqs.weight)
    rope_local_base_freq     float (gemma3_text): rope_theta of the sliding layers, which have no rope_scaling

Further keys stay as they are (attention_bias, query_pre_attn_scalar, attn_logit_softcapping, scale_attn_weights,
do_layer_norm_before, ...), with Transformers' default where the architecture has one. "rope_parameters" is taken apart
into the keys above.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"

_ROPED: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # Transformers' for each architecture, for keys that old files leave out
    "llama": {**_ROPED, "mlp_bias": False, "max_position_embeddings": 2048},
    "mistral": {**_ROPED, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_ROPED, "max_position_embeddings": 32768},
    "qwen3": {**_ROPED, "max_position_embeddings": 32768, "head_dim": 128},
    "phi3": {**_ROPED, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "gemma3_text": {
        **_ROPED,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "opt": {
        "hidden_act": "relu",
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
}
ARCHITECTURES = tuple(_DEFAULTS)

_ALIASES: dict[str, dict[str, str]] = {  # our name -> the architecture's own
    "gemma3_text": {"hidden_act": "hidden_activation", "sliding_window_pattern": "_sliding_window_pattern"},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    },
    "opt": {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
}
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "use_bidirectional_attention")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_MOST = 2**31 - 1
_MOST_LAYERS = 4096  # more is a damaged file, and lists of this length are made

_ROPE_NEEDS: dict[str, tuple[str, ...]] = {  # numbers each kind of rope scaling must have
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "factors": (),
}
_ROPE_LISTS: dict[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor"), "factors": ("factors",)}


def normalise(raw: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The settings `raw` in the dialect above; `where` names the file in messages.

    Raises ModelError for an architecture that is not supported, a missing key or a value that cannot be.
    """
    config = dict(raw)
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), Mapping):
        config = {**config, **config.pop("text_config"), "model_type": "gemma3_text"}
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or architecture not in _DEFAULTS:
        raise ModelError(
            f"{where}: the architecture {architecture!r} (model_type) is not supported; {', '.join(ARCHITECTURES)} are."
        )
    _refuse_quantised(config, where)
    _check_flags(config, where)
    _fill(config, architecture, where)
    check_end_ids(config, where)
    if config.get("use_bidirectional_attention"):
        raise ModelError(f"{where}: use_bidirectional_attention is set; only causal models can generate.")
    if architecture not in ("gpt2", "opt"):
        _check_number(config, "rms_norm_eps", where)
        _normalise_rope(config, where)
    _normalise_window(config, architecture, where)
    return config


def _refuse_quantised(config: dict[str, Any], where: object) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise ModelError(
            f"{where}: the weights are quantised by {method!r}, which is not supported; use the model in float32, "
            "float16 or bfloat16, or as GGUF."
        )


def _fill(config: dict[str, Any], architecture: str, where: object) -> None:
    """Our names, Transformers' defaults, and sizes that follow from others; then the check of all sizes."""
    for ours, theirs in _ALIASES.get(architecture, {}).items():
        if config.get(theirs) is not None:
            config[ours] = config[theirs]
    for key, default in _DEFAULTS[architecture].items():
        if config.get(key) is None and not (key == "sliding_window" and key in config):
            config[key] = default
    if architecture == "gpt2" and config.get("intermediate_size") is None:
        config["intermediate_size"] = 4 * _whole(config, "hidden_size", where)
    for key in _SIZES:
        _whole(config, key, where)
    _whole(config, "num_hidden_layers", where, _MOST_LAYERS)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None:
        if width % heads:
            raise ModelError(f"{where}: hidden_size {width} is no multiple of num_attention_heads {heads}.")
        config["head_dim"] = width // heads
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        _whole(config, key, where)
    if heads % config["num_key_value_heads"]:
        raise ModelError(
            f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{config['num_key_value_heads']}."
        )
    if not isinstance(config["hidden_act"], str):
        raise ModelError(f"{where}: hidden_act is {config['hidden_act']!r}; it must be a text such as 'silu'.")


def _check_flags(config: Mapping[str, Any], where: object) -> None:
    for key in _FLAGS:
        if not isinstance(config.get(key), (bool, type(None))):  # the text "false" would count as true
            raise ModelError(f"{where}: {key} is {config[key]!r}; it must be true, false or null.")


def check_end_ids(settings: Mapping[str, Any], where: object) -> None:
    """Raise ModelError unless "eos_token_id" is null or left out, a token id, or a list of these.

    Ids beyond the vocabulary, which configs of cut-down models keep, do no harm: they can never be drawn.
    """
    named = settings.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{where}: eos_token_id is {named!r}; it must be a token id (0 or more), a list of such ids, or null."
        )


def _whole(config: Mapping[str, Any], key: str, where: object, most: int = _MOST) -> int:
    value = config.get(key)
    if value is None:
        raise ModelError(f"{where} lacks the key {key!r}.")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{where}: {key} is {value!r}; it must be a whole number from 1 to {most}.")
    return value


def _check_number(config: Mapping[str, Any], key: str, where: object) -> None:
    if not _positive(config.get(key)):
        raise ModelError(f"{where}: {key} is {config.get(key)!r}; it must be a number over 0.")


def _positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max  # type: ignore[operator]


def _normalise_rope(config: dict[str, Any], where: object) -> None:
    parameters = config.pop("rope_parameters", None)  # Transformers 5; with rope_scaling beside it, that one counts
    parameters = config.get("rope_scaling") or parameters or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"{where}: rope_scaling or rope_parameters is {parameters!r}; it must be a mapping.")
    if isinstance(parameters.get(FULL), Mapping):
        local = parameters.get(SLIDING) or {}
        if not isinstance(local, Mapping) or _rope_type(local) != "default":
            raise ModelError(f"{where}: rope scaling of sliding layers ({local!r}) is not supported.")
        config["rope_local_base_freq"] = local.get("rope_theta", config.get("rope_local_base_freq"))
        parameters = parameters[FULL]
    scaling = dict(parameters)
    config["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0)
    for key in ("rope_theta", "partial_rotary_factor"):
        inner = scaling.pop(key, None)
        if inner is not None:
            config[key] = inner
    keys = ["rope_theta", "partial_rotary_factor"]
    if config["model_type"] == "gemma3_text":
        keys += ["rope_local_base_freq", "query_pre_attn_scalar"]
        keys += [key for key in ("attn_logit_softcapping", "final_logit_softcapping") if config[key] is not None]
    for key in keys:
        _check_number(config, key, where)
    config["rope_scaling"] = _rope_scaling(scaling, config, where)


def _rope_type(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {"su": "longrope", "mrope": "default"}.get(kind, kind) if isinstance(kind, str) else str(kind)


def _rope_scaling(scaling: dict[str, Any], config: dict[str, Any], where: object) -> dict[str, Any] | None:
    kind = _rope_type(scaling)
    if kind == "default":
        return None
    if kind not in _ROPE_NEEDS:
        raise ModelError(
            f"{where}: rope scaling of type {kind!r} is not supported; {', '.join(_ROPE_NEEDS)} and none are."
        )
    scaling.pop("type", None)
    scaling["rope_type"] = kind
    if "original_max_position_embeddings" in _ROPE_NEEDS[kind]:
        scaling["original_max_position_embeddings"] = (
            config.get("original_max_position_embeddings")
            or scaling.get("original_max_position_embeddings")
            or config["max_position_embeddings"]
        )
    for key in _ROPE_NEEDS[kind]:
        _check_number(scaling, key, f"{where}, rope scaling {kind!r}")
    for key in _ROPE_LISTS.get(kind, ()):
        _check_factors(scaling.get(key), int(config["head_dim"] * config["partial_rotary_factor"]) // 2, key, where)
    return scaling


def _check_factors(factors: Any, count: int, key: str, where: object) -> None:
    fits = isinstance(factors, list) and len(factors) == count
    if not fits or not all(map(_positive, factors)):
        raise ModelError(f"{where}: rope scaling needs {key}, a list of {count} numbers over 0.")


def _normalise_window(config: dict[str, Any], architecture: str, where: object) -> None:
    layers: int = config["num_hidden_layers"]
    has_window = architecture in ("mistral", "phi3", "gemma3_text") or (
        architecture in ("qwen2", "qwen3") and config.get("use_sliding_window")
    )
    window = config.get("sliding_window") if has_window else None
    config["sliding_window"] = window
    if window is None:
        config["layer_types"] = [FULL] * layers
        return
    _whole(config, "sliding_window", where)
    if architecture in ("mistral", "phi3"):
        config["layer_types"] = [SLIDING] * layers
        return
    if config.get("layer_types") is None:
        config["layer_types"] = _layer_types(config, architecture, where)
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ModelError(f"{where}: layer_types must be a list of {layers} times {FULL!r} or {SLIDING!r}.")


def _layer_types(config: dict[str, Any], architecture: str, where: object) -> list[str]:
    layers = range(config["num_hidden_layers"])
    if architecture == "gemma3_text":
        pattern = _whole(config, "sliding_window_pattern", where)
        return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in layers]
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ModelError(f"{where}: max_window_layers is {first!r}; it must be a whole number.")
    return [SLIDING if layer >= first else FULL for layer in layers]
