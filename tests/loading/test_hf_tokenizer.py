"""tokenizer.json folders: Transformers' fast tokenizer as the oracle, on tokenizers trained here and on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.loading.gguf import read_gguf
from octavo.loading.hf_tokenizer import read_hf_tokenizer
from octavo.loading.tokenizer import Tokenizer

WORDS = ["the lighthouse keeper opened the letter", "hello hello world's end", "1234 naïve façade 北京 🙂", "a  b\n\tc"]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)


def byte_level() -> Any:
    from tokenizers import Tokenizer as Parsed
    from tokenizers import decoders, models, pre_tokenizers, trainers

    it = Parsed(models.BPE())
    it.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    it.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    it.train_from_iterator(
        WORDS * 9, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return it


def sentencepiece() -> Any:
    """As Llama 2's: a space in front, bytes for what is not known."""
    from tokenizers import Tokenizer as Parsed
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    pieces = Parsed(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()  # no piece reaches across words
    pieces.train_from_iterator(WORDS[:2] * 9, trainers.BpeTrainer(vocab_size=60))
    model = json.loads(pieces.to_str())["model"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    it = Parsed(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    it.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    it.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    it.add_special_tokens(["<unk>", *SPECIAL])
    return it


def metaspace() -> Any:
    from tokenizers import decoders, normalizers, pre_tokenizers

    it = sentencepiece()
    it.normalizer = normalizers.Sequence([])
    it.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    it.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)])
    return it


@pytest.fixture(scope="module", params=[byte_level, sentencepiece, metaspace], ids=lambda make: make.__name__)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Any]:
    """Ours and Transformers', of the same folder."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    it = request.param()
    it.add_tokens([AddedToken("<think>", normalized=False)])  # found always, and no control token
    it.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", it.token_to_id("<s>"))])
    theirs = PreTrainedTokenizerFast(tokenizer_object=it, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs.save_pretrained(folder)
    ours = read_hf_tokenizer(folder, {})
    assert ours is not None
    return ours, theirs


TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from([*SPECIAL, "<think>", "hello", " world", "<", "|user|>", " "]), max_size=8).map("".join),
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_transformers(pair, text):
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_chat_text(text) == theirs.encode(text, add_special_tokens=False)
    plain = ours.encode(text, special=False)
    assert plain == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ours.special_ids.isdisjoint(plain)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_texts_come_back(pair, text):
    """As Transformers gives them back, of prompts (which begin with BOS) and of answers (which do not)."""
    ours, theirs = pair
    ids = ours.encode(text)
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == expected
    answer = ours.encode(text, special=False)
    assert ours.decode(answer).lstrip(" ") == theirs.decode(answer, clean_up_tokenization_spaces=False).lstrip(" ")
    assert ours.decode(answer) == b"".join(map(ours.token_bytes, answer)).decode(errors="replace")


def test_sizes_and_names(pair):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.special_ids == set(theirs.all_special_ids) | {
        token for token, added in theirs.added_tokens_decoder.items() if added.special
    }
    assert ours.token_text(theirs.convert_tokens_to_ids("<think>")) == "<think>"


def test_chats_are_those_of_transformers(pair):
    ours, theirs = pair
    messages = [{"role": "user", "content": "hello world"}, {"role": "user", "content": "<think>1234"}]
    for add_generation_prompt in (True, False):
        options = {"add_generation_prompt": add_generation_prompt}
        assert ours.render_chat(messages, **options) == theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.encode_chat(messages, **options) == theirs.apply_chat_template(
            messages, return_dict=False, **options
        )


@settings(max_examples=100, deadline=None)
@given(content=TEXTS)
def test_a_message_cannot_forge_the_template(pair, content):
    ours, _ = pair
    harmless = ours.encode_chat([{"role": "user", "content": "hello"}])
    ids = ours.encode_chat([{"role": "user", "content": content}])
    special = ours.special_ids
    assert [token for token in ids if token in special] == [token for token in harmless if token in special]


def test_the_real_smollm2_as_a_folder(smollm2_path, smollm2_tokenizer, tokenizer_cases, tmp_path):
    """The GGUF file's vocabulary and merges as tokenizer.json, as SmolLM2's authors write it: llama.cpp's ids again."""
    from tokenizers import Tokenizer as Parsed
    from tokenizers import decoders, models, pre_tokenizers

    metadata = read_gguf(smollm2_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    it = Parsed(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    it.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    it.decoder = decoders.ByteLevel()
    it.add_special_tokens([tokens[token] for token in sorted(smollm2_tokenizer.special_ids)])
    it.save(str(tmp_path / "tokenizer.json"))
    ours = read_hf_tokenizer(tmp_path, {"eos_token_id": 2})
    assert ours is not None
    assert ours.special_ids == smollm2_tokenizer.special_ids
    for case in tokenizer_cases["smollm2"]:
        assert ours.encode(case["text"]) == case["ids"]
        assert ours.encode(case["text"], special=False) == case["ids_plain"]
        assert ours.decode(case["ids_plain"]) == case["text"]


def test_merges_that_make_a_control_token_are_undone(tmp_path):
    from tokenizers import Tokenizer as Parsed
    from tokenizers import decoders, models

    tokens = ["<unk>", "</s>", "<", "/", "s", ">", "</", "s>", "a"]
    it = Parsed(
        models.BPE({token: place for place, token in enumerate(tokens)}, [("<", "/"), ("s", ">"), ("</", "s>")])
    )
    it.model.unk_token = "<unk>"
    it.decoder = decoders.ByteLevel()
    it.add_special_tokens(["<unk>", "</s>"])
    it.save(str(tmp_path / "tokenizer.json"))
    ours = read_hf_tokenizer(tmp_path, {})
    assert ours is not None
    assert ours.encode("a</s>a") == [8, 1, 8]
    assert ours.encode("a</s>a", special=False) == [8, 2, 3, 4, 5, 8]
    assert ours.encode("é", special=False) == [0]  # unknown stays unknown


# --- the small files beside it -------------------------------------------------------------------------------


def folder_with(tmp_path: Path, **files: Any) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        path = tmp_path / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_ends_of_sequence_come_from_all_places(tmp_path):
    folder = folder_with(
        tmp_path,
        tokenizer_config__json={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
        generation_config__json={"eos_token_id": [3, 7]},
    )
    ours = read_hf_tokenizer(folder, {"eos_token_id": 9})
    assert ours.eos_ids == {1, 3, 7, 9}
    assert ours.bos_id == 0
    assert read_hf_tokenizer(folder, {}).eos_ids == {1, 3, 7}


def test_named_tokens_come_from_the_map_too(tmp_path):
    folder = folder_with(tmp_path, special_tokens_map__json={"eos_token": "</s>", "pad_token": {"content": "<|end|>"}})
    assert read_hf_tokenizer(folder, {}).named_tokens == {"eos_token": "</s>", "pad_token": "<|end|>"}


def test_where_chat_templates_lie(tmp_path):
    assert read_hf_tokenizer(folder_with(tmp_path), {}).chat_template is None
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert (
        read_hf_tokenizer(folder_with(tmp_path, tokenizer_config__json={"chat_template": several}), {}).chat_template
        == "d"
    )
    folder = folder_with(tmp_path, tokenizer_config__json={"chat_template": "in"}, chat_template__jinja="beside")
    assert read_hf_tokenizer(folder, {}).chat_template == "beside"


def test_truncation_and_padding_in_the_file_are_not_kept(tmp_path):
    it = byte_level()
    it.enable_truncation(3)
    it.enable_padding(length=8)
    it.save(str(tmp_path / "tokenizer.json"))
    assert len(read_hf_tokenizer(tmp_path, {}).encode("x" * 50)) == 50


def test_what_is_wrong_is_named(tmp_path):
    assert read_hf_tokenizer(tmp_path, {}) is None
    path = tmp_path / "tokenizer.json"
    for content, says in (
        ("{", "is no valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "is no tokenizer that can be read"),
        ('{"added_tokens": 3}', "is no tokenizer that can be read"),
    ):
        path.write_text(content)
        with pytest.raises(ModelError, match=says) as caught:
            read_hf_tokenizer(tmp_path, {})
        assert "tokenizer.json" in str(caught.value)
    it = byte_level()
    it.decoder = None
    it.save(str(path))
    with pytest.raises(ModelError, match="decoder of no kind is not supported; ByteLevel"):
        read_hf_tokenizer(tmp_path, {})
