"""Reading GGUF files: values of every packing, and files that are damaged or lie."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_gguf import VOCAB, write_gguf
from tests.tiny_models import make_config, make_model

from kv8.errors import ModelError
from kv8.models.gguf_architectures import read_config
from kv8.models.gguf_file import open_gguf
from kv8.models.gguf_vocabulary import read_vocabulary

Packing = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = make_model(make_config("llama", vocab_size=VOCAB, num_hidden_layers=1))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, "llama")


def refused(path, *words):
    with pytest.raises(ModelError) as caught, open_gguf(path):
        pass
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message


def header(num_tensors=0, num_entries=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def string(text):
    return struct.pack("<Q", len(text)) + text


ARCHITECTURE = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")


def tensor(name=b"t", shape=(32,), kind=0, offset=0):
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def test_agrees_with_the_formats_own_reader(path):
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        for field in reader.fields.values():
            if not field.name.startswith("GGUF."):
                assert file.metadata[field.name] == field.contents()
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            assert np.array_equal(file.values(tensor.name), tensor.data)


PACKINGS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"]


@pytest.mark.parametrize("packing", [Packing[name] for name in PACKINGS])
def test_values_are_those_of_the_gguf_package(tmp_path, monkeypatch, packing):
    # Pieces of 3 rows of 256: 7 rows end in a piece of their own.
    monkeypatch.setattr("kv8.models.gguf_file._PIECE_VALUES", 3 * 256 + 5)
    values = np.random.default_rng(0).normal(size=(7, 256)).astype(np.float32)
    packed = gguf.quantize(values, packing)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=packing)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "t.gguf") as file:
        assert np.array_equal(file.values("t"), gguf.dequantize(packed, packing))
        assert [piece.size for piece in file.pieces("t")] == [768, 768, 256]


def test_no_file(tmp_path):
    refused(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF\3\0\0\0", b"PK\3\4" + bytes(100)])
def test_no_gguf_file(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_unknown_version(tmp_path, version):
    (tmp_path / "x.gguf").write_bytes(header(version=version))
    refused(tmp_path / "x.gguf", f"version {version}", "2 and 3")


@pytest.mark.parametrize(
    "content",
    [
        header(num_tensors=2**63),
        header(num_entries=2**63),
        header(num_entries=1) + struct.pack("<Q", 2**63),
        header(num_entries=1) + string(b"k") + struct.pack("<I", 77) + bytes(64),
        header(num_entries=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**63) + bytes(64),
        header(num_entries=1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        header(num_entries=1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64),
        header(0, 0),
        header(1, 1) + ARCHITECTURE + tensor(shape=(2,) * 5) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(shape=()) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(shape=(0,)) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(shape=(2**62,)) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(offset=2**62) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(kind=2, shape=(33,)) + bytes(999),
        header(1, 1) + ARCHITECTURE + tensor(kind=4) + bytes(999),
        header(2, 1) + ARCHITECTURE + tensor() + tensor() + bytes(999),
    ],
)
def test_a_header_that_lies(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file_says_so(path, tmp_path, share):
    content = path.read_bytes()
    (tmp_path / "x.gguf").write_bytes(content[: int(share * len(content))])
    refused(tmp_path / "x.gguf", "cut short", "Fetch it again")


def test_a_packing_nobody_unpacks(tmp_path):
    content = header(1, 1) + ARCHITECTURE + tensor(kind=Packing.I32)
    (tmp_path / "x.gguf").write_bytes(content + bytes(999))
    with open_gguf(tmp_path / "x.gguf") as file, pytest.raises(ModelError, match="t is packed as"):
        file.values("t")


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_is_an_error_or_harmless(path, tmp_path_factory, data):
    """Cut the file anywhere and change a few bytes of its header: no hang, no other exception."""
    content = bytearray(path.read_bytes())
    header_bytes = len(content) - 4 * 70_000
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, max(header_bytes, 2000)))
        content[position] = data.draw(st.sampled_from([0, 1, 4, 8, 9, 0x7F, 0x80, 0xFF]))
    end = data.draw(st.none() | st.integers(0, len(content)))
    damaged = tmp_path_factory.getbasetemp() / "damaged.gguf"
    damaged.write_bytes(content[:end])
    try:
        with open_gguf(damaged) as file:
            read_config(file)
            read_vocabulary(file)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017
