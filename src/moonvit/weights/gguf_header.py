"""The header of a GGUF file, trusted in nothing.

Layout, little-endian: "GGUF", version, counts of tensors and keys, the keys with their values, name, shape,
type and offset of each tensor, then the data, aligned. Source: the format's public description (ggml's
`docs/gguf.md`) and the `gguf` package. Nothing is allocated by a count or size that the file states before
that many bytes are known to be there.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from moonvit.errors import WeightsError
from moonvit.fields import shown
from moonvit.weights.header import TensorEntry

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 65536
"""Keys, tensors, or values of one array; a mmproj has a few hundred."""

HEADER_LIMIT = 4 * 2**20
"""Bytes before the data; some 100,000 in a mmproj."""

MAX_STRING = 2**20
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values by number, as `struct` writes them."""
STRING, ARRAY = 8, 9

TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Types of tensors by number: name, values in a block, bytes of a block."""


@dataclass(frozen=True)
class GgufHeader:
    """Keys with their values, and all tensors in the order of their bytes; shapes are outermost first."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


class Cursor:
    """Reads on from `offset`; `WeightsError` naming the file where it would leave it."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self.data = memoryview(data)
        self.where = where
        self.offset = 0

    def fail(self, fault: str, hint: str = "") -> WeightsError:
        return WeightsError(self.where, [fault], hint)

    def need(self, size: int, what: str) -> None:
        left = len(self.data) - self.offset
        if size > left:
            raise self.fail(f"{what}: {size} bytes stated, {left} are left")
        if self.offset + size > HEADER_LIMIT:
            raise self.fail(f"header of more than {HEADER_LIMIT} bytes")

    def numbers(self, kind: str, count: int, what: str) -> list[Any]:
        size = count * struct.calcsize(f"<{kind}")
        self.need(size, what)
        values = struct.unpack_from(f"<{count}{kind}", self.data, self.offset)
        self.offset += size
        return [as_written(value) for value in values] if kind == "f" else list(values)

    def number(self, kind: str, what: str) -> Any:
        return self.numbers(kind, 1, what)[0]

    def count(self, what: str, limit: int) -> int:
        value = int(self.number("Q", what))
        if value > limit:
            raise self.fail(f"{value} {what}, the limit is {limit}")
        return value

    def text(self, what: str) -> str:
        size = self.count(f"bytes of {what}", MAX_STRING)
        self.need(size, what)
        raw = bytes(self.data[self.offset : self.offset + size])
        self.offset += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: not UTF-8: {shown(raw)}") from error

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind != ARRAY:
            return self._plain(kind, what)
        inner = self.number("I", what)
        size = self.count(f"values of {what}", MAX_ENTRIES)
        if inner in SCALARS:
            return self.numbers(SCALARS[inner], size, what)
        return [self._plain(inner, what) for _ in range(size)]

    def _plain(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind not in SCALARS:
            raise self.fail(f"{what}: unknown type of value {kind}")
        return self.number(SCALARS[kind], what)


def as_written(value: float) -> float:
    """The shortest decimal that a float32 stands for: 1e-6 and not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def parse_gguf(data: bytes | memoryview, where: str) -> GgufHeader:
    """The header of a whole file's bytes (mapped, not read); `WeightsError` for anything that cannot be.

    A file that is no mmproj but a text model is refused as soon as its `general.architecture` comes.
    """
    cursor = Cursor(data, where)
    _check_start(cursor)
    tensor_count = cursor.count("tensors", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("keys", MAX_ENTRIES)):
        key = cursor.text("a key's name")
        if key in metadata:
            raise cursor.fail(f"key {shown(key)} is there twice")
        metadata[key] = cursor.value(f"key {shown(key)}")
        if key == "general.architecture":
            check_architecture(metadata, where)
    check_architecture(metadata, where)
    stated = [_tensor(cursor) for _ in range(tensor_count)]
    return GgufHeader(metadata, _placed(cursor, stated, _alignment(cursor, metadata)))


def check_architecture(metadata: Mapping[str, Any], where: str) -> None:
    """`WeightsError` unless the file says that it holds a vision encoder, and all of it."""
    architecture = metadata.get("general.architecture")
    if architecture != "clip":
        found = "missing" if architecture is None else shown(architecture)
        fault = f'general.architecture is {found}, expected "clip": this holds no vision encoder'
        raise WeightsError(where, [fault], "the vision half of a model is its mmproj-*.gguf")
    if metadata.get("split.count", 1) not in (0, 1):
        raise WeightsError(where, ["is one part of several (split.count)"], "join them with llama-gguf-split")


def _check_start(cursor: Cursor) -> None:
    if bytes(cursor.data[:4]) != MAGIC:
        raise cursor.fail(f"not a GGUF file: begins with {bytes(cursor.data[:4])!r}")
    cursor.offset = 4
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise cursor.fail("big-endian GGUF", "gguf-convert-endian FILE little turns it")
        raise cursor.fail(f"GGUF version {version}, expected {' or '.join(map(str, VERSIONS))}")


def _tensor(cursor: Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape and stated offset."""
    name = cursor.text("a tensor's name")
    dims = cursor.number("I", name)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{name}: {dims} dimensions, expected 1 to {MAX_DIMS}")
    sides = [int(cursor.number("Q", name)) for _ in range(dims)]
    kind, offset = cursor.number("I", name), cursor.number("Q", name)
    if kind not in TENSOR_TYPES:
        raise cursor.fail(f"{name}: unknown type of tensor {kind}")
    if not all(0 < side < 2**63 for side in sides) or prod(sides) >= 2**63:
        raise cursor.fail(f"{name}: shape {sides[::-1]}")
    return name, kind, tuple(sides[::-1]), int(offset)


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment is {shown(value)}, expected a power of two")
    return value


def _placed(
    cursor: Cursor, stated: list[tuple[str, int, tuple[int, ...], int]], alignment: int
) -> dict[str, TensorEntry]:
    """The tensors with their bytes, if they lie one behind the other, padded, up to the end of the file."""
    end = cursor.offset + -cursor.offset % alignment
    origin = end
    entries: dict[str, TensorEntry] = {}
    for name, kind, shape, offset in sorted(stated, key=lambda tensor: tensor[3]):
        if name in entries:
            raise cursor.fail(f"tensor {shown(name)} is there twice")
        dtype, block, size = TENSOR_TYPES[kind]
        if shape[-1] % block:
            raise cursor.fail(f"{name}: rows of {shape[-1]} are no multiple of {dtype}'s {block}")
        start = origin + offset
        if start != end:
            fault = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise cursor.fail(f"{name}: {fault}: offset {offset}, expected {end - origin}")
        stop = start + prod(shape) // block * size
        if stop > len(cursor.data):
            raise cursor.fail(f"{name}: {stop - len(cursor.data)} bytes missing at the end of the file")
        entries[name] = TensorEntry(name, dtype, shape, start, stop)
        end = stop + -stop % alignment
    if len(cursor.data) > end:
        raise cursor.fail(f"{len(cursor.data) - end} bytes to spare behind the last tensor")
    return entries
