"""Safetensors headers: everything that the public library writes is read, nothing else passes."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from moonvit.errors import WeightsError
from moonvit.weights.header import header_size, parse_header
from moonvit.weights.writer import SafetensorsWriter


def parse(data: bytes):
    size = header_size(data[:8], len(data), "file")
    return parse_header(data[8 : 8 + size], len(data), "file")


def spelled(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8])


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda n: n != "__metadata__"), st.tuples(SHAPES, DTYPES), max_size=6
    )
)
def test_agrees_with_the_library(spec):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    header = parse(save(tensors))
    assert {n: e.shape for n, e in header.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert all(header.tensors[n].nbytes == t.nbytes for n, t in tensors.items())


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_cleanly(data):
    with pytest.raises(WeightsError):
        parse(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_whatever_passes_the_library_reads_too(position, value):
    """One byte changed anywhere in a header: refused, or read alike."""
    good = bytearray(save({"a": torch.ones(4), "b": torch.ones(2, 2, dtype=torch.bfloat16)}))
    size = 8 + int.from_bytes(good[:8], "little")
    good[position % size] = value
    try:
        header = parse(bytes(good))
    except WeightsError:
        return
    theirs = load(bytes(good))
    assert {n: e.shape for n, e in header.tensors.items()} == {n: tuple(t.shape) for n, t in theirs.items()}


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}}, "b: overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [5, 9]}}, "b: leaves a gap"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, "a: F32 of shape"),
        ({"a": {**ENTRY, "data_offsets": [-4, 0]}}, "a: malformed"),
        ({"a": {**ENTRY, "data_offsets": [0, 4, 8]}}, "a: malformed"),
        ({"a": {**ENTRY, "shape": [1.0]}}, "a: malformed"),
        ({"a": {**ENTRY, "shape": [True]}}, "a: malformed"),
        ({"a": {**ENTRY, "shape": [2**62, 4]}}, "does not take"),
        ({"a": {**ENTRY, "dtype": 3}}, "a: malformed"),
        ({"a": 3}, "a: malformed"),
        ({"__metadata__": {"a": 1}}, "not a map of strings"),
        ([], "expected an object"),
    ],
)
def test_lies_are_named(entries, message):
    with pytest.raises(WeightsError, match=message):
        parse(spelled(entries, bytes(8)))


def test_doubled_name():
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    with pytest.raises(WeightsError, match="named twice: a"):
        parse(len(text).to_bytes(8, "little") + text + bytes(4))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=30).filter(lambda n: n != "__metadata__"),
        st.tuples(SHAPES, DTYPES),
        max_size=6,
    ),
    st.integers(0, 300),
)
def test_writer_is_read_by_the_library(tmp_path_factory, spec, reserve):
    path = tmp_path_factory.mktemp("writer") / "out.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in spec.items()
    }
    with SafetensorsWriter(path, reserve) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.metadata["made"] = "late"
    found = load(path.read_bytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert parse(path.read_bytes()).metadata == {"made": "late"}


def test_writer_leaves_nothing_behind_on_an_error(tmp_path):
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError), SafetensorsWriter(path) as writer:
        writer.add("a", torch.ones(3))
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]
    assert path.read_bytes() == b"before"


def test_writer_refuses_a_name_twice(tmp_path):
    with (
        pytest.raises(ValueError, match="'a' was written already"),
        SafetensorsWriter(tmp_path / "o") as writer,
    ):
        writer.add("a", torch.ones(3))
        writer.add("a", torch.ones(3))
