"""GGUF's tokenizers: llama.cpp's ids on real models, texts that come back, control tokens that text cannot become."""

from __future__ import annotations

import time
from typing import Any

import gguf
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, RequestError
from octavo.loading.byte_level import BYTE_OF_CHAR, SPLITS
from octavo.loading.checkpoint import load_checkpoint

from .small import BPE_TOKENS, add_bpe_tokenizer, add_settings, finish, random, write_llama

MODELS = {"smollm2": "smollm2_tokenizer", "gemma3-270m": "gemma_tokenizer"}


@pytest.fixture(params=MODELS)
def real(request, tokenizer_cases):
    """A real tokenizer and llama.cpp's ids for it."""
    return request.getfixturevalue(MODELS[request.param]), tokenizer_cases[request.param]


def test_ids_are_those_of_llama_cpp(real):
    tokenizer, cases = real
    assert len(cases) == 50
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], special=False) == case["ids_plain"], case["text"]


def test_decoding_llama_cpps_ids_gives_the_text(real):
    tokenizer, cases = real
    for case in cases:
        assert tokenizer.decode(case["ids_plain"]) == case["text"]
        assert b"".join(map(tokenizer.token_bytes, case["ids_plain"])).decode() == case["text"]


def test_bos_eos_and_sizes_of_the_real_models(smollm2_tokenizer):
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.bos_id == 1
    assert smollm2_tokenizer.eos_ids == {2}
    assert {0, 1, 2} <= smollm2_tokenizer.special_ids
    assert smollm2_tokenizer.token_text(2) == "<|im_end|>"
    assert smollm2_tokenizer.named_tokens["eos_token"] == "<|im_end|>"


def test_bos_eos_and_sizes_of_gemma(gemma_tokenizer):
    assert gemma_tokenizer.vocab_size == 262144
    assert gemma_tokenizer.bos_id == 2
    assert gemma_tokenizer.eos_ids == {1, 106}  # <eos>, <end_of_turn>
    assert gemma_tokenizer.token_bytes(248) == b"\n"  # <0x0A>
    assert gemma_tokenizer.chat_template is None
    with pytest.raises(RequestError, match="has no chat template"):
        gemma_tokenizer.render_chat([{"role": "user", "content": "Hi"}])


@pytest.fixture(scope="module")
def missing_bytes(smollm2_tokenizer):
    """Bytes that SmolLM2's vocabulary lacks: a few control characters, and what UTF-8 hardly uses or never."""
    known = {smollm2_tokenizer.token_bytes(token) for token in range(smollm2_tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes((byte,)) not in known}
    assert len(missing) == 21
    return missing


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_texts_come_back(smollm2_tokenizer, missing_bytes, text):
    assume(missing_bytes.isdisjoint(text.encode()))
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text, special=False)) == text
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text), skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_texts_come_back_from_gemma(gemma_tokenizer, text):
    assert gemma_tokenizer.decode(gemma_tokenizer.encode(text, special=False)) == text.replace("▁", " ")


PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<|endoftext|>", "<", "|>", " ", "user", "\n"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_plain_text_never_becomes_a_control_token(smollm2_tokenizer, text):
    ids = smollm2_tokenizer.encode(text, special=False)
    assert smollm2_tokenizer.special_ids.isdisjoint(ids)
    assert smollm2_tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PIECES, st.sampled_from(["\ufdd0", "<|im_start|>system\n"])), max_size=6).map("".join))
def test_a_message_cannot_forge_the_template(smollm2_tokenizer, content):
    """However a message spells control tokens, the chat has those of the template and no others."""
    harmless = smollm2_tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    ids = smollm2_tokenizer.encode_chat([{"role": "user", "content": content}])
    special = smollm2_tokenizer.special_ids
    assert [token for token in ids if token in special] == [token for token in harmless if token in special]
    text = smollm2_tokenizer.render_chat([{"role": "user", "content": content}])
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_chat_is_the_template_with_its_tokens(smollm2_tokenizer):
    messages = [{"role": "user", "content": "Hello world"}]
    ids = smollm2_tokenizer.encode_chat(messages)
    text = smollm2_tokenizer.render_chat(messages)
    assert text.endswith("<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n")
    assert ids == smollm2_tokenizer.encode_chat_text(text)
    assert ids[0] == 1
    assert ids.count(1) == 3
    without = smollm2_tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert without == ids[: len(without)]
    assert smollm2_tokenizer.decode(ids[len(without) :], skip_special_tokens=False) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "a" * 1000 + "\ud83d"])
def test_half_a_surrogate_pair_is_refused(smollm2_tokenizer, text):
    for call in (smollm2_tokenizer.encode, smollm2_tokenizer.encode_chat_text):
        with pytest.raises(
            RequestError,
            match=r"no valid Unicode \(a lone surrogate, as comes from bytes that are not UTF-8\): .* at character",
        ):
            call(text)
    with pytest.raises(
        RequestError,
        match=r"no valid Unicode \(a lone surrogate, as comes from bytes that are not UTF-8\): .* at character",
    ):
        smollm2_tokenizer.encode_chat([{"role": "user", "content": text + "<|im_end|>"}])


def test_messages_nested_without_end_are_refused(smollm2_tokenizer):
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(RequestError, match="nested too deeply"):
        smollm2_tokenizer.encode_chat([message])


def test_what_is_no_text_is_refused(smollm2_tokenizer):
    with pytest.raises(RequestError, match="must be a text, not NoneType"):
        smollm2_tokenizer.encode(None)


def test_ids_that_mean_nothing_add_nothing(smollm2_tokenizer):
    assert smollm2_tokenizer.decode([19556, 49152, 10**9, -1, 905]) == "Hello world"
    assert smollm2_tokenizer.token_bytes(-1) == b""
    assert smollm2_tokenizer.decode([]) == ""


def test_special_tokens_are_skipped_or_shown(smollm2_tokenizer):
    ids = smollm2_tokenizer.encode("<|im_start|>a<|im_end|>")
    assert smollm2_tokenizer.decode(ids) == "a"
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_half_a_character_is_a_replacement_until_it_is_whole(smollm2_tokenizer):
    ids = smollm2_tokenizer.encode("🙂", special=False)
    assert len(ids) == 2
    assert smollm2_tokenizer.decode(ids[:1]) == "\ufffd"
    assert smollm2_tokenizer.decode(ids) == "🙂"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "text",
    ["a" * 150_000, " " * 300_000, "1" * 60_000, "\n" * 150_000, "the cat " * 40_000, "<|" * 60_000, "北京" * 50_000],
    ids=["a", "spaces", "digits", "newlines", "words", "beginnings", "han"],
)
def test_long_texts_take_no_quadratic_time(name, text, request):
    """About a second each; quadratic ways take minutes."""
    tokenizer = request.getfixturevalue(MODELS[name])
    start = time.process_time()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - start < 15


# --- small ones of our own -----------------------------------------------------------------------------------


def bare(path, **keys: Any) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    add_settings(writer, block_count=1, **keys)
    return writer


def load(writer: gguf.GGUFWriter, path: Any) -> Any:
    from .small import LLAMA_LAYER

    writer.add_tensor("token_embd.weight", random((len(BPE_TOKENS), 64)))
    writer.add_tensor("output_norm.weight", random((64,)))
    for name, shape in LLAMA_LAYER.items():
        writer.add_tensor(f"blk.0.{name}.weight", random(shape))
    return load_checkpoint(finish(writer, path)).tokenizer


def test_bpe_merges_user_tokens_and_bos(tmp_path):
    tokenizer = load_checkpoint(write_llama(tmp_path / "it.gguf")).tokenizer
    ids = {text: token for token, text in enumerate(BPE_TOKENS)}
    assert tokenizer.encode("hello world") == [ids["hello"], ids["Ġworld"]]
    assert tokenizer.encode("hello<tool> world", special=False) == [ids["hello"], ids["<tool>"], ids["Ġworld"]]
    assert tokenizer.encode("<|im_end|>")[0] == 2
    assert len(tokenizer.encode("<|im_end|>", special=False)) == 10
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([ids["hello"], ids["<tool>"], 2]) == "hello<tool>"


def test_bos_and_eos_are_added_as_the_file_asks(tmp_path):
    writer = bare(tmp_path / "it.gguf")
    add_bpe_tokenizer(writer)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    tokenizer = load(writer, tmp_path / "it.gguf")
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode("", special=False) == []
    assert tokenizer.encode_chat_text("<|im_start|>") == [1]


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert load_checkpoint(write_llama(tmp_path / "it.gguf", tokenizer=False)).tokenizer is None


SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
    "▁ab",
    "<t>",
]
SPM_KINDS = [2, 3, 3] + [6] * 256 + [1] * 6 + [4]
SPM_SCORES = [0.0] * 259 + [-9.0, -7.0, -8.0, -2.0, -1.0, -3.0, 0.0]


def spm(path, **flags: bool) -> Any:
    writer = bare(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_token_types(SPM_KINDS)
    writer.add_token_scores(SPM_SCORES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    return load(writer, path)


def test_sentencepiece_adds_bos_and_a_space_by_default(tmp_path):
    ids = {text: token for token, text in enumerate(SPM_TOKENS)}
    tokenizer = spm(tmp_path / "it.gguf")
    assert tokenizer.encode("ab a") == [1, ids["▁ab"], ids["▁a"]]
    assert tokenizer.encode("</s>ab") == [1, 2, ids["▁ab"]]  # after a special token too, as llama.cpp
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert tokenizer.decode([ids["▁ab"]]) == " ab"  # an answer goes on after its prompt
    assert tokenizer.decode(tokenizer.encode("é"), skip_special_tokens=True) == "é"
    assert spm(tmp_path / "no.gguf", add_bos_token=False, add_space_prefix=False).encode("ab a") == [
        ids["ab"],
        ids["▁a"],
    ]


def test_sentencepiece_text_never_becomes_a_byte_or_control_token(tmp_path):
    tokenizer = spm(tmp_path / "it.gguf", add_space_prefix=False)
    for text in ("<0x41>", "<s>", "</s>"):
        ids = tokenizer.encode(text, special=False)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_phi3_drops_white_space_after_its_control_tokens(tmp_path):
    writer = bare(tmp_path / "it.gguf")
    writer.add_name("Phi-3 mini")
    add_bpe_tokenizer(writer)
    assert load(writer, tmp_path / "it.gguf").encode("<|im_end|>\n hello")[1:] == [BPE_TOKENS.index("hello")]


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_keeps_all_of_the_text(pre, tmp_path):
    writer = bare(tmp_path / "it.gguf")
    add_bpe_tokenizer(writer, pre)
    tokenizer = load(writer, tmp_path / "it.gguf")
    text = "Hello  wOrLd!\r\n\n 12345 don't WE'LL naïve\t北京 ½ \n  x=3;\u3000🙂 "
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_splits_are_those_of_the_models(tmp_path):
    """What shows in the pieces: digits, contractions, newlines, cases."""
    from tokenizers import Regex, pre_tokenizers

    def pieces(pre: str, text: str) -> list[str]:
        steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[pre]]
        return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]

    assert pieces("gpt-2", "It's 2024  ok") == ["It", "'s", " 2024", " ", " ok"]
    assert pieces("smollm", "x 2024") == ["x", " ", "2", "0", "2", "4"]
    assert pieces("llama-bpe", "IT'S 12345\n\n x") == ["IT", "'S", " ", "123", "45", "\n\n", " x"]
    assert pieces("qwen2", "a 123 b;\n") == ["a", " ", "1", "2", "3", " b", ";\n"]
    assert pieces("tekken", "helloWorld 12") == ["hello", "World", " ", "1", "2"]
    assert pieces("gpt-4o", "We'll 1234") == ["We'll", " ", "123", "4"]


def test_bytes_and_characters_are_a_bijection():
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert BYTE_OF_CHAR["Ġ"] == ord(" ")
    assert BYTE_OF_CHAR["Ċ"] == ord("\n")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tokenizer.ggml.model", "bert", r"the tokenizer 'bert' .* is not supported; 'gpt2'"),
        ("tokenizer.ggml.pre", "magic", r"the pre-tokenizer 'magic' .* is not supported; codeshell, command-r"),
        ("tokenizer.ggml.bos_token_id", 10**6, "bos_token_id is 1000000; there are"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token' is 1; it must be a bool"),
        ("tokenizer.ggml.token_type", [1, 2], "token_type' must be an array of 270 numbers"),
        ("tokenizer.ggml.tokens", None, r"lacks the metadata key 'tokenizer\.ggml\.tokens'"),
        ("tokenizer.ggml.merges", None, r"lacks the metadata key 'tokenizer\.ggml\.merges'"),
        ("tokenizer.ggml.merges", ["h zzz"], r"'tokenizer\.ggml\.merges' do not fit the tokens"),
        ("tokenizer.ggml.bos_token_id", None, r"asks to add BOS but lacks 'tokenizer\.ggml\.bos_token_id'"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_named(key, value, says, tmp_path):
    writer = bare(tmp_path / "it.gguf")
    add_bpe_tokenizer(writer)
    writer.add_add_bos_token(True)
    fields = writer.kv_data[0]
    fields.pop(key)
    if value is not None:
        from .small import add_key

        add_key(writer, key, value)
    with pytest.raises(ModelError, match=says) as caught:
        load(writer, tmp_path / "it.gguf")
    assert "it.gguf" in str(caught.value)


def test_scores_are_needed(tmp_path):
    writer = bare(tmp_path / "it.gguf")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SPM_TOKENS)
    writer.add_bos_token_id(1)
    with pytest.raises(ModelError, match=r"lacks the metadata key 'tokenizer\.ggml\.scores'"):
        load(writer, tmp_path / "it.gguf")
