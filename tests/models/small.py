"""Small random models of every architecture, made by Transformers, in shapes that real ones do not have.

Heads do not divide the hidden size, windows and original contexts are shorter than the prompts, weights are large
enough that every part of a layer moves the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 61
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3}
GROUPED: dict[str, Any] = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 100.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 3.5, 7.0],
    "original_max_position_embeddings": 20,
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}
PHI: dict[str, Any] = {**COMMON, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
GEMMA: dict[str, Any] = {**GROUPED, "query_pre_attn_scalar": 17, "sliding_window": 7, "num_hidden_layers": 4}
OPT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 36, "ffn_dim": 52, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"max_position_embeddings": 64, "pad_token_id": 1},
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 36, "n_head": 4, "n_layer": 3, "n_positions": 64}

# name: Transformers' config class, its settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**GROUPED}),
    "llama-plain": ("LlamaConfig", {**COMMON, "num_attention_heads": 3, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {**GROUPED, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-linear": ("LlamaConfig", {**GROUPED, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("LlamaConfig", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", {**GROUPED, "head_dim": 24, "rope_parameters": YARN}),
    "llama-yarn-few": ("LlamaConfig", {**GROUPED, "head_dim": 24, "rope_parameters": {**YARN, "rope_theta": 2.2}}),
    "llama-yarn-options": (
        "LlamaConfig",
        {
            **{**GROUPED, "head_dim": 24},
            "rope_parameters": {
                **YARN,
                **{"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7},
            },
        },
    ),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 9}),
    "mistral-no-window": ("MistralConfig", {**GROUPED, "sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {**COMMON, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen2-window": (
        "Qwen2Config",
        {
            **{**COMMON, "num_attention_heads": 9, "num_key_value_heads": 1},
            **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
        },
    ),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 14}),
    "qwen3-biases": ("Qwen3Config", {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3-capped": (
        "Gemma3TextConfig",
        {
            **{**GEMMA, "num_hidden_layers": 6, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
            **{"attn_logit_softcapping": 1.5, "attention_bias": True},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {**PHI, "pad_token_id": 0, "sliding_window": 11}),
    "phi3-longrope": (
        "Phi3Config",
        {**PHI, "pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 20},
    ),
    "gpt2": ("GPT2Config", {**GPT2}),
    "gpt2-options": (
        "GPT2Config",
        {**GPT2, "n_inner": 50, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    ),
    "opt": ("OPTConfig", {**OPT}),
    "opt-350m": ("OPTConfig", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-no-bias": (
        "OPTConfig",
        {**OPT, "enable_bias": False, "_remove_final_layer_norm": True, "activation_function": "gelu"},
    ),
}


def make(name: str) -> Any:
    """The Transformers model, float32, eager attention, with random weights, biases and norms."""
    kind, settings = MODELS[name]
    settings = {"bos_token_id": 0, "eos_token_id": 0, **settings}
    config = getattr(transformers, kind)(**settings, attn_implementation="eager")
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def logits(model: Any, tokens: list[int], **options: Any) -> Any:
    """Its logits at every place of the sequence, [length, V], as NumPy."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), **options).logits[0].float().numpy()
