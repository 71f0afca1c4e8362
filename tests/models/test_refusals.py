"""What a model cannot compute it refuses in one sentence, naming the tensor, or the key and its value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from octavo import models
from octavo.errors import ModelError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.tensor import StoredTensor
from octavo.models import rope
from octavo.ops import reference

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 20, "short_factor": [1.0] * 5}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1, "high_freq_factor": 4}


def with_settings(checkpoint: Checkpoint, **settings: Any) -> Checkpoint:
    return dataclasses.replace(checkpoint, config={**checkpoint.config, **settings})


def with_tensors(checkpoint: Checkpoint, **tensors: tuple[int, ...] | None) -> Checkpoint:
    """Tensors of a shape added or replaced, or taken out (None); `__` in a name stands for a dot."""
    changed = dict(checkpoint.tensors)
    for key, shape in tensors.items():
        name = key.replace("__", ".")
        if shape is None:
            del changed[name]
        else:
            values = np.ones(shape, np.float32)
            changed[name] = StoredTensor(name, shape, "F32", values, lambda raw: raw.astype(np.float32))
    return dataclasses.replace(checkpoint, tensors=changed)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'; it must be one of silu, .*relu"),
        ("llama", {"attention_bias": "yes"}, "attention_bias = 'yes'; it must be true or false"),
        ("llama", {"num_local_experts": 8}, "num_local_experts = 8; it must be left out"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps = 0; it must be a number over 0"),
        ("mistral", {"attention_bias": True}, "attention_bias = True; it must be left out"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen3", {"num_experts": 128}, "num_experts = 128"),
        ("phi3", {"attention_bias": True}, "attention_bias = True"),
        ("gemma3", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar = None; it must be a number over 0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False; it must be true"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'; .*linear, llama3"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling does not give factor; .* a number over 0"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling has factor = -1"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "alpha": 3}}, "alpha = 3; it must be left out"),
        ("llama", {"rope_scaling": LONGROPE}, "does not give long_factor; it must be a list of 5 numbers over 0"),
        ("llama", {"rope_scaling": {"rope_type": "factors", "factors": [1.0] * 4}}, "a list of 5 numbers over 0"),
        (
            "llama",
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings = 1; it must be at least 2",
        ),
        ("llama", {"rope_scaling": {**YARN, "beta_fast": 1e308}}, r"beta_fast = 1e\+308; it must be a number from"),
        ("llama", {"rope_scaling": {**YARN, "beta_slow": 1e-320}}, r"beta_slow = 1e-320; it must be a number from"),
        ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0; it must be over 1"),
        ("llama", {"rope_scaling": {**YARN, "factor": 1e-300}}, "rope_scaling = .*'factor': 1e-300.*float32"),
        ("llama", {"rope_scaling": {**YARN, "attention_factor": 1e300}}, "rope_scaling = .*1e.300.*float32"),
        ("llama", {"rope_theta": 1e-300}, "rope_theta = 1e-300; it must be .*float32"),
        ("gemma3", {"rope_local_base_freq": 1e-300}, "rope_local_base_freq = 1e-300; it must be .*float32"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "high_freq_factor = 4; it must be another"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5; .*head_dim \(10\)"),
    ],
)
def test_settings(name: str, settings: dict[str, Any], message: str, pair: Any) -> None:
    with pytest.raises(ModelError, match=message):
        models.build(with_settings(pair(name)[1], **settings), reference)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("llama", {"model__norm__weight": None}, "no tensor 'model.norm.weight'"),
        ("llama", {"lm_head__weight": None}, "no tensor 'lm_head.weight'"),
        (
            "llama",
            {"model__layers__1__mlp__up_proj__weight": (52, 35)},
            r"up_proj.weight' has shape \[52, 35\].*\[52, 36\]",
        ),
        (
            "llama",
            {"model__layers__0__self_attn__q_proj__bias": (60,)},
            "does not use .*layers.0.self_attn.q_proj.bias",
        ),
        ("llama", {"model__layers__3__mlp__up_proj__weight": (52, 36)}, "does not use .*layers.3.mlp.up_proj.weight"),
        ("qwen2", {"model__layers__0__self_attn__v_proj__bias": None}, "no tensor .*v_proj.bias"),
        ("gpt2", {"wpe__weight": (63, 36)}, r"wpe.weight' has shape \[63, 36\].*\[64, 36\]"),
        ("gpt2", {"lm_head__weight": (61, 36)}, "tie_word_embeddings = True.*lm_head.weight differs"),
    ],
)
def test_tensors(name: str, tensors: dict[str, Any], message: str, pair: Any) -> None:
    with pytest.raises(ModelError, match=message):
        models.build(with_tensors(pair(name)[1], **tensors), reference)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "vocab_size", "num_attention_heads"])
def test_sizes_that_no_tensor_has_are_refused_before_they_are_computed(
    name: str, key: str, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frequencies of so large a head would take seconds and gigabytes."""
    if name in ("gpt2", "opt") and key in ("head_dim", "num_attention_heads"):
        pytest.skip("their queries are as wide as the hidden size")

    def too_early(span: rope.Span) -> None:
        pytest.fail("the frequencies were computed before a shape was looked at")

    if key != "vocab_size":
        monkeypatch.setattr(rope.Span, "frequencies", property(too_early))
    settings = {"hidden_size": 2**30, "head_dim": 2**28} if key == "hidden_size" else {key: 2**30}
    with pytest.raises(ModelError, match=r"has shape .*settings ask for"):
        models.build(with_settings(pair(name)[1], **settings), reference)


def test_tensors_that_follow_from_the_config_are_no_trouble(pair: Any) -> None:
    llama = with_tensors(pair("llama")[1], model__layers__0__self_attn__rotary_emb__inv_freq=(5,))
    gpt2 = with_tensors(pair("gpt2")[1], h__0__attn__bias=(1, 1, 64, 64), h__0__attn__masked_bias=())
    gemma = with_tensors(pair("gemma3")[1], vision_tower__post_layernorm__weight=(7,))
    for checkpoint in (llama, gpt2, gemma):
        models.build(checkpoint, reference)


def test_a_tied_head_may_be_in_the_file_too(pair: Any) -> None:
    checkpoint = pair("gpt2")[1]
    tensors = {**checkpoint.tensors, "lm_head.weight": checkpoint.tensors["wte.weight"]}
    models.build(dataclasses.replace(checkpoint, tensors=tensors), reference)


def test_other_architectures_and_more_positions_than_were_learned(pair: Any) -> None:
    checkpoint = pair("gpt2")[1]
    with pytest.raises(ModelError, match=r"is a mamba model; supported are llama, .*opt"):
        models.build(dataclasses.replace(checkpoint, architecture="mamba"), reference)
    with pytest.raises(ModelError, match="has learned 64 positions and cannot take 65"):
        models.build(checkpoint, reference, 65)
