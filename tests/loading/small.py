"""Small model files made on the spot: GGUF by the `gguf` package's writer, safetensors folders by `safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo.loading.byte_level import BYTE_OF_CHAR

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 4, 2, 16, 128

BYTE_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d", "Ġ Ġ"]
BPE_TOKENS = ["<|unk|>", "<|im_start|>", "<|im_end|>", *(BYTE_CHARS[byte] for byte in range(256))]
BPE_TOKENS += [merge.replace(" ", "") for merge in MERGES] + ["<tool>"]
BPE_KINDS = [2, 3, 3] + [1] * (256 + len(MERGES)) + [4]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# llama.cpp's names -> shapes (rows, columns), of one llama layer
LLAMA_LAYER = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def llama_tensors(vocab: int = len(BPE_TOKENS)) -> dict[str, NDArray[np.float32]]:
    """Random tensors of a llama under GGUF's names, q and k in the order of Hugging Face's rows."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in LLAMA_LAYER.items()}
    return {name: random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows as the converter to GGUF lays them for llama: dimension i beside dimension i + half."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_settings(writer: gguf.GGUFWriter, **changes: Any) -> None:
    """The settings every architecture needs; `changes` are further "uint32" or "float32" keys, or None to leave out."""
    settings: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }
    for key, value in settings.items():
        add_key(writer, f"{writer.arch}.{key}", value)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def add_bpe_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(BPE_TOKENS)
    writer.add_token_types(BPE_KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(path: Path, tokenizer: bool = True, **changes: Any) -> Path:
    """A whole little llama in float32, q and k permuted as converters do."""
    writer = gguf.GGUFWriter(path, "llama")
    add_settings(writer, **changes)
    if tokenizer:
        add_bpe_tokenizer(writer)
    for name, values in llama_tensors().items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, permuted(values, heads) if heads else values)
    return finish(writer, path)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]], shards: int = 1) -> Path:
    """A Hugging Face folder; with several shards, an index beside them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{place % shards + 1:05}-of-{shards:05}.safetensors" for place, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
