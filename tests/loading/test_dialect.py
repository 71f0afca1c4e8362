"""One dialect of settings: Transformers' own reading of a config.json as the oracle, in its old and its new form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.loading.dialect import ARCHITECTURES, normalise

from .small import LLAMA_CONFIG

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4}
NATIVE: dict[str, dict[str, Any]] = {  # the sizes under the architecture's own names
    "gpt2": {
        "vocab_size": 40,
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": 7,
        "n_head": 4,
        "n_positions": 64,
        "eos_token_id": 0,
    },
    "opt": {**{key: value for key, value in SIZES.items() if key != "intermediate_size"}, "ffn_dim": 48},
    "phi3": {**SIZES, "eos_token_id": 2},
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def settings_of(architecture: str) -> dict[str, Any]:
    return NATIVE.get(architecture, SIZES)


def check_sizes(ours: dict[str, Any], theirs: Any) -> None:
    """Ours say what an object of Transformers says, under whatever name."""
    layers = theirs.num_hidden_layers
    assert ours["num_hidden_layers"] == layers
    assert ours["hidden_size"] == theirs.hidden_size
    assert ours["vocab_size"] == theirs.vocab_size
    assert ours["num_attention_heads"] == theirs.num_attention_heads
    assert ours["max_position_embeddings"] == theirs.max_position_embeddings
    assert ours["tie_word_embeddings"] == theirs.tie_word_embeddings
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours["head_dim"] == head_dim
    assert ours["num_key_value_heads"] == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    inner = getattr(theirs, "n_inner", None) or getattr(theirs, "ffn_dim", None) or 0
    assert ours["intermediate_size"] == (inner or getattr(theirs, "intermediate_size", 0) or 4 * theirs.hidden_size)
    activations = [getattr(theirs, name, None) for name in ("hidden_act", "hidden_activation", "activation_function")]
    assert ours["hidden_act"] == next(filter(None, activations))
    for key in ("rms_norm_eps", "query_pre_attn_scalar", "final_logit_softcapping", "layer_norm_epsilon"):
        if hasattr(theirs, key):
            assert ours[key] == getattr(theirs, key)
    assert len(ours["layer_types"]) == layers


def check_rope(ours: dict[str, Any], theirs: Any) -> None:
    parameters = getattr(theirs, "rope_parameters", None)
    if parameters is None:
        return
    if "full_attention" in parameters:
        assert ours["rope_local_base_freq"] == parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    assert ours["rope_theta"] == parameters["rope_theta"]
    assert ours["partial_rotary_factor"] == parameters.get("partial_rotary_factor", 1.0)
    kind = parameters["rope_type"]
    if kind == "default":
        assert ours["rope_scaling"] is None
        return
    beside = ("rope_theta", "partial_rotary_factor", "type")  # "type" is rope_type's old name
    expected = {key: value for key, value in parameters.items() if key not in beside}
    assert {key: ours["rope_scaling"].get(key) for key in expected} == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_and_what_it_leaves_out(architecture):
    """The file Transformers writes, in full, and the shortest one a person might."""
    from transformers import AutoConfig

    has_default = architecture.startswith("qwen") or architecture == "mistral"  # of key/value heads, for large models
    given = settings_of(architecture) | ({"num_key_value_heads": 2} if has_default else {})
    theirs = AutoConfig.for_model(architecture, **given)
    check_sizes(normalise(json.loads(theirs.to_json_string()), "config.json"), theirs)
    check_rope(normalise(json.loads(theirs.to_json_string()), "config.json"), theirs)
    short = normalise({"model_type": architecture, **given}, "config.json")
    check_sizes(short, theirs)
    check_rope(short, theirs)


ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ("llama", {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "beta_fast": 20.0}}),
    ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 5e3}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        },
    ),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize(("architecture", "rope"), ROPES)
def test_rope_in_the_old_and_the_new_form(architecture, rope):
    from transformers import AutoConfig

    raw = {"model_type": architecture, **SIZES, "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 2, **rope}
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    check_rope(normalise(raw, "old"), theirs)
    check_rope(normalise(json.loads(theirs.to_json_string()), "new"), theirs)


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"sliding_window": None}),
    ("gemma3_text", {"sliding_window": 12}),
    ("gemma3_text", {"sliding_window": 12, "sliding_window_pattern": 3}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]}),
]


@pytest.mark.parametrize(("architecture", "window"), WINDOWS)
def test_which_layers_have_a_window(architecture, window):
    from transformers import AutoConfig

    raw = {
        "model_type": architecture,
        **SIZES,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **window,
    }
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    ours = normalise(raw, "config.json")
    again = normalise(json.loads(theirs.to_json_string()), "config.json")
    assert ours["layer_types"] == again["layer_types"]
    assert ours["sliding_window"] == again["sliding_window"]
    if architecture in ("mistral", "phi3"):  # all layers, or none
        sliding = theirs.sliding_window is not None
        assert ours["layer_types"] == [["full_attention", "sliding_attention"][sliding]] * 7
    elif architecture != "llama":
        assert ours["layer_types"] == theirs.layer_types
    if "sliding_attention" in ours["layer_types"]:
        assert ours["sliding_window"] == theirs.sliding_window


def test_the_text_part_of_a_gemma_with_vision():
    raw = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
        | {"intermediate_size": 10240, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    config = normalise(raw, "config.json")
    assert config["model_type"] == "gemma3_text"
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (262208, 256, 4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["layer_types"].count("full_attention") == 5
    assert config["eos_token_id"] == [1, 106]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, r"the architecture 'mamba' \(model_type\) is not supported; llama, mistral"),
        ({"model_type": None}, "the architecture None"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 4096"),
        ({"num_attention_heads": 3}, "hidden_size 16 is no multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 2 is no multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number over 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be a number over 0"),
        ({"rope_scaling": "linear"}, "rope_scaling or rope_parameters is 'linear'; it must be a mapping"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type 'dynamic' is not supported; linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear': factor is None"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor, a list of 4",
        ),
        ({"hidden_act": 7}, "hidden_act is 7"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq', which is not supported"),
        ({"use_bidirectional_attention": True}, "only causal models"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true, false or null"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1; it must be true, false or null"),
        ({"eos_token_id": {}}, r"eos_token_id is \{\}; it must be a token id \(0 or more\), a list of such"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [None]}, r"eos_token_id is \[None\]"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_what_cannot_be_is_named(changes, says):
    with pytest.raises(ModelError, match=says) as caught:
        normalise({**LLAMA_CONFIG, **changes}, "some/config.json")
    assert "some/config.json" in str(caught.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
PLACES = (  # noqa: SIM905
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters sliding_window "
    "layer_types max_window_layers use_sliding_window sliding_window_pattern partial_rotary_factor text_config "
    "rope_local_base_freq query_pre_attn_scalar attn_logit_softcapping quantization_config tie_word_embeddings "
    "original_max_position_embeddings eos_token_id"
).split()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "gemma3_text", "gemma3", "phi3"]),
    st.dictionaries(st.sampled_from(PLACES), JSON, min_size=1, max_size=2),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "full_attention"]), JSON)),
)
def test_any_value_is_taken_or_refused(architecture, changes, rope):
    raw = {**LLAMA_CONFIG, "model_type": architecture, **({"rope_parameters": rope} if rope else {}), **changes}
    try:
        config = normalise(raw, "some/config.json")
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = None
        assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert refusal is None or "some/config.json" in refusal


def test_the_settings_given_are_not_changed():
    raw = {**LLAMA_CONFIG, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    before = json.dumps(raw)
    normalise(raw, "config.json")
    assert json.dumps(raw) == before
