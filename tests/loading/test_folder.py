"""Hugging Face folders: `safetensors` and Transformers write them, we read them; and damage of every kind."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.loading.checkpoint import load_checkpoint
from octavo.loading.safetensors import read_safetensors

from .small import LLAMA_CONFIG, random, write_folder

TENSORS = {
    "model.embed_tokens.weight": random((40, 16), 1),
    "model.norm.weight": random((16,), 2),
    "model.layers.0.self_attn.q_proj.weight": random((16, 16), 3).astype(np.float16),
    "model.layers.0.mlp.up_proj.weight": random((24, 16), 4),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bytes of a small safetensors file."""
    return write_folder(tmp_path_factory.mktemp("folder"), LLAMA_CONFIG, TENSORS) / "model.safetensors"


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_one_file_or_several(shards, tmp_path):
    checkpoint = load_checkpoint(write_folder(tmp_path / "model", LLAMA_CONFIG, TENSORS, shards))
    assert (checkpoint.name, checkpoint.architecture, checkpoint.tokenizer) == ("model", "llama", None)
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, values in TENSORS.items():
        tensor = checkpoint.tensor(name, values.shape)
        assert tensor.dtype == {"float32": "F32", "float16": "F16"}[values.dtype.name]
        np.testing.assert_array_equal(tensor.raw, values)
        np.testing.assert_array_equal(tensor.float32(), values.astype(np.float32))


def test_bfloat16(tmp_path):
    import torch
    from safetensors.torch import save_file

    values = torch.randn(7, 5).to(torch.bfloat16)
    scalar, empty = torch.tensor(1.5), torch.empty(0, 4)
    save_file({"a": values, "b": scalar, "c": empty}, tmp_path / "it.safetensors")
    read = read_safetensors(tmp_path / "it.safetensors")
    assert read["a"].dtype == "BF16"
    assert read["a"].raw.dtype == np.uint16
    np.testing.assert_array_equal(read["a"].float32(), values.float().numpy())
    assert read["b"].shape == ()
    assert read["b"].float32() == 1.5
    assert read["c"].shape == (0, 4)


def test_tensors_at_odd_places_can_be_used(tmp_path):
    """The format asks for no alignment of the data."""
    header = {"half": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}
    header["it"] = {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]}
    text = json.dumps(header).encode()
    values = np.array([1.5, -2.0], "<f4")
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0" + values.tobytes())
    tensor = read_safetensors(tmp_path / "odd.safetensors")["it"]
    assert tensor.raw.flags.aligned
    np.testing.assert_array_equal(tensor.float32(), values)


def transformers_model(architecture: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    if architecture == "gpt2":
        sizes = {"vocab_size": 40, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "eos_token_id": 0}
    if architecture == "opt":
        sizes = {**{key: sizes[key] for key in list(sizes)[:7]}, "ffn_dim": 48, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2", "opt"])
def test_what_transformers_saves(architecture, tmp_path):
    """The whole model and its inner part alone give the same names; GPT-2's Conv1D are turned to [out, in]."""
    model = transformers_model(architecture)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "inner")
    state = {name.removeprefix("transformer."): values.numpy() for name, values in model.state_dict().items()}
    whole, inner = load_checkpoint(tmp_path / "whole"), load_checkpoint(tmp_path / "inner")
    assert whole.architecture == architecture
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(whole.tensors) == set(state) - tied
    assert set(inner.tensors) == set(state) - {"lm_head.weight"}
    for name in whole.tensors:
        conv1d = architecture == "gpt2" and name.startswith("h.") and state[name].ndim == 2
        expected = state[name].T if conv1d else state[name]
        assert whole.tensor(name, expected.shape).raw.flags.c_contiguous
        np.testing.assert_array_equal(whole.tensors[name].float32(), expected)


def test_a_gemma_with_vision_is_read_for_its_text(tmp_path):
    text = {**LLAMA_CONFIG, "model_type": "gemma3_text", "head_dim": 8, "vocab_size": 40}
    config = {"model_type": "gemma3", "text_config": text}
    old = {
        "language_model.model.norm.weight": random((16,), 1),
        "language_model.lm_head.weight": random((40, 16), 2),
        "vision_tower.encoder.weight": random((3,), 3),
        "multi_modal_projector.weight": random((3,), 4),
    }
    new = {
        "model.language_model.norm.weight": random((16,), 1),
        "lm_head.weight": random((40, 16), 2),
        "model.vision_tower.encoder.weight": random((3,), 3),
    }
    for place, tensors in enumerate((old, new)):
        checkpoint = load_checkpoint(write_folder(tmp_path / str(place), config, tensors))
        assert set(checkpoint.tensors) == {"model.norm.weight", "lm_head.weight"}
        np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").float32(), random((40, 16), 2))


# --- damage --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_prefix_is_refused_with_a_sentence(small, tmp_path_factory, data):
    whole = small.read_bytes()
    path = tmp_path_factory.getbasetemp() / "prefix.safetensors"
    path.write_bytes(whole[: data.draw(st.one_of(st.integers(0, len(whole) - 1), st.integers(0, 500)))])
    with pytest.raises(ModelError, match=r"prefix\.safetensors") as caught:
        read_safetensors(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damaged_byte_of_the_header_is_refused_or_harmless(small, tmp_path_factory, data):
    whole = bytearray(small.read_bytes())
    header = 8 + struct.unpack_from("<Q", whole)[0]
    whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(whole)
    try:
        for tensor in read_safetensors(path).values():
            with np.errstate(all="ignore"):
                tensor.float32()
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = None
    assert refusal is None or "damaged.safetensors" in refusal


def refused(tmp_path: Path, header: Any, data: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(ModelError) as caught:
        read_safetensors(path)
    return str(caught.value)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"\xff\xfe", b"", "no UTF-8"),
        (b"[]", b"", "must hold a JSON object"),
        (b"{" * 5000, b"", "no valid JSON"),
        (b"[" * 100_000, b"", "no valid JSON"),
        ({"a": 3}, b"", "entry of tensor 'a'"),
        (
            {"a": entry(dtype="F8_E4M3")},
            b"\0" * 4,
            "'a' is stored as 'F8_E4M3', which is not supported; F32, F16, BF16",
        ),
        ({"a": entry(dtype=["F32"])}, b"\0" * 4, "is stored as ['F32']"),
        ({"a": entry(shape=[-1])}, b"\0" * 4, "no proper shape"),
        ({"a": entry(shape=[2**80])}, b"\0" * 4, "no proper shape"),
        ({"a": entry(shape=[1] * 40)}, b"\0" * 4, "no proper shape"),
        ({"a": entry(shape=[2])}, b"\0" * 4, "takes 8 bytes but has 4"),
        ({"a": entry(data_offsets=[4, 8])}, b"\0" * 8, "begins at byte 4 of the data instead of 0"),
        ({"a": entry(data_offsets=[4, 0])}, b"\0" * 4, "takes 4 bytes but has -4"),
        ({"a": entry(data_offsets=[0])}, b"\0" * 4, "data_offsets"),
        ({"a": entry(), "b": entry(data_offsets=[2, 6])}, b"\0" * 6, "'b' begins at byte 2 of the data instead of 4"),
        ({"a": entry(), "b": entry()}, b"\0" * 4, "begins at byte 0 of the data instead of 4"),
        ({"a": entry()}, b"\0" * 3, "it is truncated"),
        ({"a": entry()}, b"\0" * 5, "it is damaged"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(header, data, says, tmp_path):
    assert says in refused(tmp_path, header, data)


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "long.safetensors"
    for length in (1000, 2**63):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(ModelError, match=f"claims a header of {length} bytes but has 10 in all"):
            read_safetensors(path)


def test_what_is_wrong_with_a_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ModelError, match=r"only as pickles.*convert them with Transformers"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config\.json is no valid JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(ModelError, match=r"config\.json is no UTF-8 text"):
        load_checkpoint(tmp_path)


def test_ends_of_sequence_in_either_file_are_token_ids(tmp_path):
    folder = write_folder(tmp_path, {**LLAMA_CONFIG, "eos_token_id": [1, 4000]}, TENSORS)
    assert load_checkpoint(folder).config["eos_token_id"] == [1, 4000]
    for ids in ([2, -1], "x", {}, [None]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is .*0 or more"):
            load_checkpoint(folder)


def test_what_is_wrong_with_an_index_is_named(tmp_path):
    folder = write_folder(tmp_path, LLAMA_CONFIG, TENSORS, shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, says in (
        (None, "has no weight_map"),
        ({"a": 3}, "has no weight_map"),
        ({"a": "../secret.safetensors"}, r"names the file '\.\./secret\.safetensors', which is not in the folder"),
        ({"a": "model-00009-of-00002.safetensors"}, "which is not in the folder; get the whole model"),
        ({"a": "model-00001-of-00002.safetensors"}, "lacks the tensor 'a', which"),
    ):
        index.write_text(json.dumps({**good, "weight_map": weight_map}))
        with pytest.raises(ModelError, match=says):
            load_checkpoint(folder)


def test_a_missing_tensor_is_named(tmp_path):
    checkpoint = load_checkpoint(write_folder(tmp_path, LLAMA_CONFIG, TENSORS))
    with pytest.raises(
        ModelError, match=r"has no tensor 'lm_head\.weight', which a model of architecture 'llama' needs"
    ):
        checkpoint.tensor("lm_head.weight")


def test_two_names_for_one_tensor_are_refused(tmp_path):
    twice = {**TENSORS, "norm.weight": random((16,))}
    with pytest.raises(ModelError, match=r"two tensors that both mean 'model\.norm\.weight'"):
        load_checkpoint(write_folder(tmp_path, LLAMA_CONFIG, twice))
