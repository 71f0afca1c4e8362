"""Write a random-weight model in the shape of Qwen2.5-0.5B, bf16, for measuring speed where no real weights can be had.

    python benchmarks/make_qwen.py FOLDER

The folder is a Hugging Face one, config.json and model.safetensors (about 1 GB) without a tokenizer, and the same on
every machine. Weights are normal with a deviation of 0.02, as models start their training; norms are ones. What such a
model says is noise: it costs what a trained one costs, and tells nothing of quality.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 24,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_cache": True,
}
DEVIATION = 0.02
PIECE = 1 << 22  # elements drawn at once

Shapes = dict[str, tuple[int, ...]]


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensor_shapes())
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    print(f"{folder}: a random model in the shape of Qwen2.5-0.5B.")


def tensor_shapes() -> Shapes:
    """Every tensor's name and shape, in the order they lie in the file."""
    hidden, inner, keys = 896, 4864, 2 * 64
    shapes: Shapes = {"model.embed_tokens.weight": (151936, hidden)}
    for layer in range(24):
        at = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", keys), ("v", keys)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{at}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def write_safetensors(path: Path, shapes: Shapes) -> None:
    """The file format: the header's length (8 bytes, little-endian), the header (JSON), the tensors end to end.

    Written by hand because NumPy, and so the safetensors package without torch, has no bf16.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            write_tensor(file, int(np.prod(shape)), None if "norm" in name else random)
    unfinished.replace(path)


def write_tensor(file: BinaryIO, size: int, random: np.random.Generator | None) -> None:
    """`size` elements drawn from the generator; without one, ones."""
    for begin in range(0, size, PIECE):
        count = min(PIECE, size - begin)
        values = np.ones(count, np.float32) if random is None else random.standard_normal(count, np.float32) * DEVIATION
        file.write(to_bf16(values.astype(np.float32)).tobytes())


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 rounded to the nearest bf16, ties to even, as its bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if __name__ == "__main__":
    main()
