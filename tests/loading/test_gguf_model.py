"""GGUF in Hugging Face's dialect: names, settings and the order of rows, against Transformers and round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from octavo.errors import ModelError
from octavo.loading.checkpoint import load_checkpoint

from .small import (
    BPE_TOKENS,
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    add_bpe_tokenizer,
    add_settings,
    finish,
    llama_tensors,
    permuted,
    random,
    write_llama,
)


def write(path: Path, architecture: str, layer: dict[str, tuple[int, ...]], outer: Any = (), **changes: Any) -> Path:
    """A model of an architecture, of random tensors with these names and shapes in each layer."""
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, **changes)
    writer.add_token_list([f"t{token}" for token in range(20)])  # where Transformers takes the vocabulary's size from
    shapes = {"token_embd.weight": (20, HIDDEN), "output_norm.weight": (HIDDEN,), **dict(outer)}
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    for seed, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(name, np.abs(random(shape, seed)) + 0.5 if name.startswith("rope") else random(shape, seed))
    return finish(writer, path)


def test_the_settings_of_a_llama(tmp_path):
    checkpoint = load_checkpoint(write_llama(tmp_path / "small.gguf", **{"rope.freq_base": 5000.0}))
    assert checkpoint.architecture == "llama"
    assert checkpoint.name == "small"
    expected = {
        "vocab_size": len(BPE_TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "sliding_window": None,
        "layer_types": ["full_attention"] * LAYERS,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected


def test_rows_of_q_and_k_are_put_back(tmp_path):
    checkpoint, source = load_checkpoint(write_llama(tmp_path / "small.gguf")), llama_tensors()
    for layer in range(LAYERS):
        for theirs, ours in {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj"}.items():
            tensor = checkpoint.tensor(f"model.layers.{layer}.self_attn.{ours}.weight")
            np.testing.assert_array_equal(tensor.float32(), source[f"blk.{layer}.{theirs}.weight"])
            assert tensor.raw.flags.c_contiguous
            assert tensor.name == f"model.layers.{layer}.self_attn.{ours}.weight"


def test_rows_are_put_back_without_dequantising(tmp_path):
    quantised = {name: gguf.quants.quantize(v, Kind.Q4_1) for name, v in llama_tensors().items() if "attn_q" in name}
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    add_settings(writer)
    for name, values in llama_tensors().items():
        if name in quantised:
            writer.add_tensor(name, permuted(quantised[name], HEADS), raw_dtype=Kind.Q4_1)
        else:
            writer.add_tensor(name, values)
    checkpoint = load_checkpoint(finish(writer, tmp_path / "q.gguf"))
    for layer in range(LAYERS):
        tensor = checkpoint.tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert tensor.dtype == "Q4_1"
        np.testing.assert_array_equal(tensor.raw, quantised[f"blk.{layer}.attn_q.weight"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2"])
def test_tensors_are_those_that_transformers_loads(architecture, tmp_path):
    """The same file through Transformers: the same names and values (GPT-2's Conv1D turned round)."""
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "it.gguf", architecture, **ARCHITECTURES[architecture])
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=path.name, pad_token_id=0).state_dict()
    ours = load_checkpoint(path)
    names = {name.removeprefix("transformer."): name for name in theirs}
    if ours.config["tie_word_embeddings"]:
        names.pop("lm_head.weight")
    assert set(ours.tensors) == set(names)
    for name in ours.tensors:
        values, expected = ours.tensor(name).float32(), theirs[names[name]].float().numpy()
        conv1d = architecture == "gpt2" and name.startswith("h.") and values.ndim == 2
        np.testing.assert_array_equal(values, expected.T if conv1d else expected, err_msg=name)


QKV = {
    "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
}
OUT = {"attn_norm.weight": (HIDDEN,), "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM), "ffn_norm.weight": (HIDDEN,)}
MLP = {"ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN), "ffn_down.weight": (HIDDEN, INNER)}
QK_NORMS = {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
LENGTHS = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"layer": {**QKV, **OUT, **MLP}, "outer": {"output.weight": (20, HIDDEN)}},
    "qwen2": {
        "layer": {
            **QKV,
            **OUT,
            **MLP,
            **{name.replace("weight", "bias"): shape[:1] for name, shape in QKV.items()},
        }
    },
    "qwen3": {  # Transformers does not read its key_length
        "layer": {
            **OUT,
            **MLP,
            "attn_q.weight": (HEADS * 128, HIDDEN),
            "attn_k.weight": (KV_HEADS * 128, HIDDEN),
            "attn_v.weight": (KV_HEADS * 128, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * 128),
            "attn_q_norm.weight": (128,),
            "attn_k_norm.weight": (128,),
        },
        "attention.key_length": 128,
        "attention.value_length": 128,
    },
    "gemma3": {
        "layer": {
            **QKV,
            **OUT,
            **MLP,
            **QK_NORMS,
            "post_attention_norm.weight": (HIDDEN,),
            "post_ffw_norm.weight": (HIDDEN,),
        },
        **LENGTHS,
        "attention.sliding_window": 32,
        "rope.freq_base": 1e6,
    },
    "phi3": {
        "layer": {
            **OUT,
            "attn_qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "ffn_up.weight": (2 * INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        },
        "outer": {"output.weight": (20, HIDDEN)},
    },
    "gpt2": {
        "layer": {
            name + kind: shape if kind == ".weight" else shape[:1]
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_qkv": (3 * HIDDEN, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_up": (4 * HIDDEN, HIDDEN),  # Transformers does not read these two sizes
                "ffn_down": (HIDDEN, 4 * HIDDEN),
            }.items()
            for kind in (".weight", ".bias")
        },
        "outer": {"position_embd.weight": (1024, HIDDEN), "output_norm.bias": (HIDDEN,)},
        "context_length": 1024,
        "feed_forward_length": 4 * HIDDEN,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "attention.head_count_kv": None,
    },
}


def test_the_settings_of_a_gemma(tmp_path):
    path = write(tmp_path / "it.gguf", "gemma3", **ARCHITECTURES["gemma3"])
    config = load_checkpoint(path).config
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 32
    assert config["layer_types"] == ["sliding_attention"] * LAYERS
    assert config["rope_theta"] == 1e6
    assert config["rope_local_base_freq"] == 1e4
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["hidden_act"] == "gelu_pytorch_tanh"
    assert config["attn_logit_softcapping"] is None


def test_the_windows_of_a_gemma_by_period_and_one_by_one(tmp_path):
    for place, pattern in enumerate((2, [True, False])):
        changes = {**ARCHITECTURES["gemma3"], "attention.sliding_window_pattern": pattern}
        config = load_checkpoint(write(tmp_path / f"{place}.gguf", "gemma3", **changes)).config
        assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    add_settings(writer)
    add_bpe_tokenizer(writer)
    for name, values in llama_tensors(vocab=len(BPE_TOKENS) - 1).items():
        writer.add_tensor(name, values)
    with pytest.raises(ModelError, match=r"has 270 tokens but embeddings \('token_embd.weight'\) for 269"):
        load_checkpoint(finish(writer, tmp_path / "it.gguf"))


def test_the_settings_of_a_gpt2(tmp_path):
    config = load_checkpoint(write(tmp_path / "it.gguf", "gpt2", **ARCHITECTURES["gpt2"])).config
    assert (config["layer_norm_epsilon"], config["hidden_act"]) == (1e-5, "gelu_new")
    assert (config["head_dim"], config["num_key_value_heads"]) == (HIDDEN // HEADS, HEADS)


def test_a_llama_with_a_window_is_a_mistral(tmp_path):
    checkpoint = load_checkpoint(write_llama(tmp_path / "it.gguf", **{"attention.sliding_window": 48}))
    assert checkpoint.architecture == "mistral"
    assert checkpoint.config["sliding_window"] == 48
    assert checkpoint.config["layer_types"] == ["sliding_attention"] * LAYERS


def llama(path: Path, outer: Any = (), **changes: Any) -> dict[str, Any]:
    return load_checkpoint(write(path, "llama", {**QKV, **OUT, **MLP}, outer, **changes)).config


def test_rope_factors_become_settings(tmp_path):
    config = llama(tmp_path / "it.gguf", {"rope_freqs.weight": (HEAD_DIM // 2,)})
    assert config["rope_scaling"]["rope_type"] == "factors"
    expected = np.abs(random((HEAD_DIM // 2,), 2)) + 0.5
    np.testing.assert_array_equal(np.float32(config["rope_scaling"]["factors"]), expected)


def test_long_rope_becomes_settings(tmp_path):
    factors = {"rope_factors_long.weight": (HEAD_DIM // 2,), "rope_factors_short.weight": (HEAD_DIM // 2,)}
    path = write(
        tmp_path / "it.gguf",
        "phi3",
        ARCHITECTURES["phi3"]["layer"],
        {**ARCHITECTURES["phi3"]["outer"], **factors},
        **{"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19},
    )
    scaling = load_checkpoint(path).config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["original_max_position_embeddings"] == 32
    assert scaling["attention_factor"] == 1.19
    assert len(scaling["long_factor"]) == len(scaling["short_factor"]) == HEAD_DIM // 2


def test_linear_and_yarn_scaling(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    scaling = llama(tmp_path / "linear.gguf", **linear)["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 8.0)
    assert llama(tmp_path / "old.gguf", **{"rope.scale_linear": 2.0})["rope_scaling"]["factor"] == 2.0
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    scaling = llama(tmp_path / "yarn.gguf", **yarn)["rope_scaling"]
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert {key: scaling[key] for key in expected} == expected
    assert llama(tmp_path / "none.gguf", **{"rope.scaling.type": "none"})["rope_scaling"] is None


def test_partial_rotation(tmp_path):
    assert llama(tmp_path / "it.gguf", **{"rope.dimension_count": 12})["partial_rotary_factor"] == 0.75
    with pytest.raises(ModelError, match=r"rope\.dimension_count is 18; it must be from 1 to the head size 16"):
        llama(tmp_path / "more.gguf", **{"rope.dimension_count": 18})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_count": None}, r"lacks the metadata key 'llama\.block_count'"),
        ({"block_count": 3}, r"block_count is 3 but there are tensors of 2 layers \(up to number 1\)"),
        ({"block_count": 2**30}, "num_hidden_layers is 1073741824"),
        ({"block_count": "two"}, r"'llama\.block_count' is 'two'; it must be one int"),
        ({"attention.head_count": 0}, "num_attention_heads is 0"),
        ({"attention.head_count_kv": [2, 2]}, r"'llama\.attention\.head_count_kv' is \[2, 2\]; it must be one int"),
        ({"attention.head_count_kv": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, r"rms_norm_eps is 0\.0; it must be a number over 0"),
        ({"expert_count": 8}, "is a mixture of experts"),
        ({"rope.scaling.type": "magic"}, "rope scaling of type 'magic' is not supported; linear, llama3"),
        ({"attention.value_length": 8}, "values of another length than keys"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, says, tmp_path):
    with pytest.raises(ModelError, match=says) as caught:
        llama(tmp_path / "it.gguf", **changes)
    assert "it.gguf" in str(caught.value)


def test_unsupported_architectures_and_unknown_tensors_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"'mamba' \(general\.architecture\) is not supported; llama, qwen2"):
        load_checkpoint(write(tmp_path / "mamba.gguf", "mamba", {**QKV}))
    with pytest.raises(ModelError, match=r"'blk\.0\.ssm\.weight' is unknown in the architecture 'llama'"):
        load_checkpoint(write(tmp_path / "odd.gguf", "llama", {**QKV, "ssm.weight": (4, 4)}))


def test_a_split_file_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    add_settings(writer)
    writer.add_uint16("split.count", 3)
    with pytest.raises(ModelError, match="one part of a split model"):
        load_checkpoint(finish(writer, tmp_path / "part.gguf"))


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path):
    checkpoint = load_checkpoint(write_llama(tmp_path / "it.gguf"))
    with pytest.raises(ModelError, match=r"it\.gguf has no tensor 'model\.layers\.9\.mlp\.up_proj\.weight'"):
        checkpoint.tensor("model.layers.9.mlp.up_proj.weight")
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.tensor(name, (INNER, HIDDEN)).shape == (INNER, HIDDEN)
    with pytest.raises(
        ModelError, match=rf"'{name}' has shape \[96, 64\], but the model's settings ask for \[96, 65\]"
    ):
        checkpoint.tensor(name, (INNER, HIDDEN + 1))


def test_real_smollm2(smollm2):
    assert smollm2.architecture == "llama"
    assert smollm2.config["rope_theta"] == 100_000.0
    assert smollm2.config["num_hidden_layers"] == 30
    assert smollm2.tensor("model.embed_tokens.weight", (49152, 576)).dtype == "Q8_0"
    assert smollm2.tensor("model.layers.29.self_attn.k_proj.weight", (192, 576)).dtype == "Q4_1"


def test_real_gemma(gemma):
    assert gemma.architecture == "gemma3_text"
    assert gemma.config["layer_types"][:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    kinds = {gemma.tensors[name].dtype for name in gemma.tensors}
    assert kinds == {"F32", "Q8_0", "Q5_0", "Q4_K", "Q6_K"}
    assert np.isfinite(gemma.tensor("model.layers.0.mlp.down_proj.weight", (640, 2048)).float32()).all()
