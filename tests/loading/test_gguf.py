"""The GGUF container against the `gguf` package's own reader and quantisation, and against damage of every kind."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.loading.checkpoint import load_checkpoint
from octavo.loading.gguf import read_gguf
from octavo.loading.storage import STORAGE_TYPES

from .small import add_settings, finish, random, write_llama

PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize("kind", STORAGE_TYPES, ids=lambda kind: kind.name)
def test_storage_types_are_those_of_the_gguf_package(kind):
    assert Kind[kind.name] == kind.ggml
    assert gguf.GGML_QUANT_SIZES[Kind[kind.name]] == (kind.block, kind.block_bytes)


@pytest.mark.parametrize("kind", STORAGE_TYPES, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_gguf_package_does(kind, tmp_path):
    rows, columns = 6, 512
    bits = np.random.default_rng(1).integers(0, 256, (rows, columns // kind.block * kind.block_bytes), np.uint8)
    raw = bits.view(PLAIN[kind.name]) if kind.name in PLAIN else bits
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first", random((5, 3)))  # odd sizes before it: padding must be found
    writer.add_tensor("it", raw, raw_dtype=Kind[kind.name])
    tensor = read_gguf(finish(writer, tmp_path / "one.gguf")).tensors["it"]

    assert (tensor.shape, tensor.dtype, tensor.raw.dtype) == ((rows, columns), kind.name, raw.dtype)
    np.testing.assert_array_equal(tensor.raw.view(np.uint8), bits)
    with np.errstate(all="ignore"):  # random bits may be NaN
        expected = gguf.quants.dequantize(bits if kind.name in ("BF16", *PLAIN) else raw, Kind[kind.name])
        values = tensor.float32()
        assert values.dtype == np.float32
        assert values.shape == (rows, columns)
        np.testing.assert_array_equal(values, np.asarray(expected).reshape(rows, columns))
        np.testing.assert_array_equal(tensor.decode(tensor.raw[2:4]), values[2:4])  # some rows only


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_values_are_near_the_original(name, tmp_path):
    values = random((4, 64))
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("it", gguf.quants.quantize(values, Kind[name]), raw_dtype=Kind[name])
    read = read_gguf(finish(writer, tmp_path / "one.gguf")).tensors["it"].float32()
    assert np.abs(read - values).max() < {"Q8_0": 0.02, "Q5_0": 0.15, "Q5_1": 0.12}.get(name, 0.3)


def test_metadata_and_tensors_are_those_of_the_gguf_package(small):
    ours, theirs = read_gguf(small), gguf.GGUFReader(small)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, field in fields.items():
        value = ours.metadata[key]
        expected = field.contents()
        if isinstance(value, float):
            assert np.float32(value) == np.float32(expected), key
        else:
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[tensor.name].raw, tensor.data)


def test_every_kind_of_value_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    for name, value in {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -9, "uint32": 2**32 - 1}.items():
        getattr(writer, f"add_{name}")(name, value)
    for name, value in {"int32": -(2**31), "uint64": 2**63, "int64": -(2**62), "float64": 0.1}.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_float32("float32", 1e-5)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve 🙂")
    writer.add_array("texts", ["a", "", "é"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("nested", [[1, 2], [3]])
    metadata = read_gguf(finish(writer, tmp_path / "values.gguf")).metadata
    assert metadata["uint8"] == 200
    assert metadata["int8"] == -3
    assert metadata["uint32"] == 2**32 - 1
    assert metadata["uint64"] == 2**63
    assert metadata["int64"] == -(2**62)
    assert metadata["float64"] == 0.1
    assert metadata["float32"] == 1e-5  # not 9.999999747378752e-06
    assert metadata["bool"] is True
    assert metadata["string"] == "naïve 🙂"
    assert metadata["texts"] == ["a", "", "é"]
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert [array.tolist() for array in metadata["nested"]] == [[1, 2], [3]]


def use(path: Path) -> None:
    """Load it and use all of it."""
    with np.errstate(all="ignore"):
        checkpoint = load_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.tensors[name].float32()
        if checkpoint.tokenizer is not None:
            ids = checkpoint.tokenizer.encode("hello world <|im_start|><tool>")
            checkpoint.tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_prefix_is_refused_with_a_sentence(small, tmp_path_factory, data):
    whole = small.read_bytes()
    length = data.draw(st.one_of(st.integers(0, len(whole) - 33), st.integers(0, 6000)))
    path = tmp_path_factory.getbasetemp() / "prefix.gguf"
    path.write_bytes(whole[:length])
    with pytest.raises(ModelError, match=r"prefix\.gguf") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_damaged_byte_of_the_header_is_refused_or_harmless(small, tmp_path_factory, data):
    whole = bytearray(small.read_bytes())
    header = whole.index(b"token_embd.weight") + 2000
    place = data.draw(st.one_of(st.integers(0, 900), st.integers(0, header - 1), st.integers(header - 2100, header)))
    whole[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole)
    try:
        use(path)
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = None
    assert refusal is None or "damaged.gguf" in refusal


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_random_bytes_behind_a_header_are_refused(tmp_path_factory, junk, version, tensors, keys):
    path = tmp_path_factory.getbasetemp() / "junk.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + junk)
    with pytest.raises(ModelError, match=r"junk\.gguf"):
        load_checkpoint(path)


def patched(small: Path, tmp_path: Path, at: int, new: bytes) -> Path:
    whole = bytearray(small.read_bytes())
    whole[at : at + len(new)] = new
    path = tmp_path / "patched.gguf"
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize(
    ("at", "new", "says"),
    [
        (0, b"GGJT", "begins with b'GGJT' instead of b'GGUF'"),
        (4, struct.pack("<I", 1), "of GGUF version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), "big-endian; versions 2 and 3, little-endian"),
        (8, struct.pack("<Q", 2**60), "claims 1152921504606846976 tensors"),
        (16, struct.pack("<Q", 2**63), "claims 9223372036854775808 metadata keys"),
    ],
)
def test_a_wrong_header_is_named(small, tmp_path, at, new, says):
    with pytest.raises(ModelError) as caught:
        read_gguf(patched(small, tmp_path, at, new))
    assert says in str(caught.value)


def test_a_vast_array_is_refused_at_once(small, tmp_path):
    at = small.read_bytes().index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    with pytest.raises(ModelError, match=r"claims 72057594037927936 texts in the metadata key 'tokenizer.ggml.tokens'"):
        read_gguf(patched(small, tmp_path, at, struct.pack("<Q", 2**56)))


def test_an_empty_or_missing_file_is_named(tmp_path):
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match=r"empty.gguf is empty \(0 bytes\)"):
        load_checkpoint(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match="There is no file or folder"):
        load_checkpoint(tmp_path / "missing.gguf")


def test_only_regular_files_are_read(tmp_path):
    """A pipe would be waited for without end."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path("/dev/null")):
        with pytest.raises(ModelError, match=f"{path} is no regular file"):
            load_checkpoint(path)


def test_a_path_that_cannot_be_is_named():
    with pytest.raises(ModelError, match=r"a\.\.\. \(5000 characters\) cannot be looked up: File name too long"):
        load_checkpoint(Path("a" * 5000))


def test_an_unsupported_type_is_named(small, tmp_path):
    at = small.read_bytes().index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    with pytest.raises(ModelError, match=r"'blk.0.attn_q.weight' is stored as IQ2_XS \(type 17\).*Q6_K are"):
        read_gguf(patched(small, tmp_path, at, struct.pack("<I", 17)))
    with pytest.raises(ModelError, match="the unknown type 999"):
        read_gguf(patched(small, tmp_path, at, struct.pack("<I", 999)))


def test_overlapping_and_misplaced_data_are_refused(small, tmp_path):
    name = b"blk.0.attn_norm.weight"
    at = small.read_bytes().index(name) + len(name) + 4 + 8 + 4
    for offset, says in ((0, "overlaps"), (2**63, "goes beyond the end"), (2**40 + 1, "begins at no multiple of 32")):
        with pytest.raises(ModelError, match=says):
            read_gguf(patched(small, tmp_path, at, struct.pack("<Q", offset)))


def test_a_shape_too_large_for_any_integer_is_refused(small, tmp_path):
    name = b"blk.0.attn_q.weight"
    at = small.read_bytes().index(name) + len(name) + 4
    with pytest.raises(ModelError, match="goes beyond the end of the file"):
        read_gguf(patched(small, tmp_path, at, struct.pack("<QQ", 2**33, 2**33)))


def test_loading_reads_no_weights_and_imports_little(small):
    """Neither torch nor the slow `gguf` package is needed to open a file."""
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from octavo.loading.checkpoint import load_checkpoint;"
        f"load_checkpoint(Path({str(small)!r})).tokenizer.encode('hello');"
        "print({'torch', 'gguf', 'transformers', 'jinja2', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_file_without_settings_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    add_settings(writer)
    path = finish(writer, tmp_path / "bare.gguf")
    with pytest.raises(ModelError, match=r"no tensor 'token_embd\.weight'"):
        load_checkpoint(path)
