"""The header of a safetensors file, trusted in nothing.

Layout: 8 bytes of little-endian length, that many bytes of JSON, then the data. Source: the format's
public description; every rule there is checked here, and each fault names the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from moonvit.errors import WeightsError
from moonvit.fields import parse_json, shown

HEADER_LIMIT = 100_000_000
"""Bytes of header JSON, the format's own cap."""

MAX_RANK = 8
"""Dimensions of a tensor."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its type, shape, and bytes [start, stop) counted from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """All tensors of a file, in the order of their bytes, and its free-form metadata."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    size: int


NOT_ONE = "damaged, or not a safetensors file"


def header_size(first_eight: bytes, file_size: int, where: str) -> int:
    """Bytes of JSON behind the first eight; `WeightsError` for a length that cannot be."""
    if len(first_eight) < 8 or file_size < 8:
        raise WeightsError(where, [f"{file_size} bytes is too short for a safetensors file"])
    size = int.from_bytes(first_eight[:8], "little")
    if size > HEADER_LIMIT:
        raise WeightsError(where, [f"header of {size} bytes, the limit is {HEADER_LIMIT}: {NOT_ONE}"])
    if 8 + size > file_size:
        fault = f"header of {size} bytes does not fit into a file of {file_size} bytes: {NOT_ONE}"
        raise WeightsError(where, [fault])
    return size


def parse_header(data: bytes, file_size: int, where: str) -> Header:
    """The header from its JSON bytes; `WeightsError` unless it accounts for the file's every byte."""
    try:
        fields = parse_json(data, where)
    except ValueError as error:
        raise WeightsError(where, [f"header: {str(error).removeprefix(f'{where}: ')}"]) from error
    if not isinstance(fields, dict):
        raise WeightsError(where, [f"header: expected an object, found {shown(fields)}"])
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WeightsError(where, ["header: __metadata__ is not a map of strings"])
    origin = 8 + len(data)
    entries = sorted(
        (_entry(n, f, origin, where) for n, f in fields.items()), key=lambda e: (e.start, e.stop)
    )
    _check_layout(entries, origin, file_size, where)
    return Header({e.name: e for e in entries}, metadata, len(data))


def _entry(name: str, fields: Any, origin: int, where: str) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, start, stop]
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(where, [f"{name}: malformed header entry {shown(fields)}"]) from error
    if (
        len(numbers) > 2 + MAX_RANK
        or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers)
        or not isinstance(dtype, str)
    ):
        raise WeightsError(where, [f"{name}: malformed header entry {shown(fields)}"])
    if dtype not in DTYPE_BITS:
        raise WeightsError(where, [f"{name}: unknown type {shown(dtype)}"])
    if 8 * (stop - start) != prod(shape) * DTYPE_BITS[dtype]:
        raise WeightsError(
            where,
            [f"{name}: {dtype} of shape {list(shape)} does not take {stop - start} bytes"],
        )
    return TensorEntry(name, dtype, tuple(shape), origin + start, origin + stop)


def _check_layout(entries: list[TensorEntry], origin: int, file_size: int, where: str) -> None:
    end = origin
    for entry in entries:
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise WeightsError(where, [f"{entry.name}: {fault}"])
        end = entry.stop
    if end != file_size:
        difference = (
            f"{end - file_size} bytes missing" if end > file_size else f"{file_size - end} bytes to spare"
        )
        raise WeightsError(where, [f"{difference}: its header accounts for {end} bytes, it has {file_size}"])
