"""A mmproj file of llama.cpp as a checkpoint of the released layout.

F32, F16, BF16 and F64 tensors are mapped; quantised ones are dequantised to float32 by the `gguf` package,
one at a time, when they are read. See `moonvit.weights.gguf_names` for the sources.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonvit.errors import ConfigError, MoonvitError, WeightsError
from moonvit.fields import Fields, shown
from moonvit.lazy import lazy
from moonvit.weights.gguf_config import (
    HEADS,
    Mmproj,
    V,
    config_json,
    deepstack_layers,
    preprocessor_json,
    swapped,
)
from moonvit.weights.gguf_header import TENSOR_TYPES, GgufHeader, parse_gguf
from moonvit.weights.gguf_layout import (
    by_place,
    joined,
    joined_shape,
    max_dtype,
    parts_of,
    split_name,
    turned,
)
from moonvit.weights.gguf_names import LAYOUTS, Layout
from moonvit.weights.header import Header, TensorEntry
from moonvit.weights.index import TORCH_DTYPES, Checkpoint, StoredTensor, as_tensor
from moonvit.weights.names import NameMap, replaced

log = logging.getLogger("moonvit")

SUFFIX = ".gguf"
NOT_DEQUANTISED = ("Q8_1", "Q8_K", "Q1_0")
"""Quantised types that the `gguf` package does not turn into numbers."""

QUANTISED = {name for name, block, _ in TENSOR_TYPES.values() if block > 1} - set(NOT_DEQUANTISED)


class GgufCheckpoint(Checkpoint):
    """The vision half in one `mmproj-*.gguf`; `WeightsError` for a file that is none.

    `config` and `preprocessor` are made from the file's keys in the family's released spelling, so that
    everything behind them is as for any checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self.gguf: GgufHeader = parse_gguf(self._map.data, self.where)
        self.layout = _layout(self.gguf.metadata, self.where)
        if self.layout.experimental:
            log.warning(
                "%s: %s is an experimental layout, of no released llama.cpp", path, self.layout.projector
            )
        self.scan()

    def file_names(self) -> list[str]:
        """The file, and those that are made of its keys."""
        return [self.path.name, "config.json", "preprocessor_config.json"]

    def small_file(self, name: str, limit: int) -> bytes:
        found = {"config.json": self._config, "preprocessor_config.json": self._preprocessor}.get(name)
        if found is None:
            raise ConfigError(f"{self.where}: has no {name}")
        return (json.dumps(found(), indent=2) + "\n").encode()

    def header(self, shard: str) -> Header:
        return Header(self.gguf.tensors, {}, 0)

    def data(self, shard: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._map[start:stop]

    def scan(self) -> None:
        self.faults: list[str] = []
        self.lost: set[str] = set()
        self.tensors: dict[str, StoredTensor] = {}
        self._parts: dict[str, tuple[TensorEntry, ...]] = {}
        grouped: dict[str, dict[str, TensorEntry]] = {}
        for stored, released in self._released_names().items():
            name, part = split_name(released)
            grouped.setdefault(name, {})[part] = self.gguf.tensors[stored]
        for name, parts in grouped.items():
            self._take(name, parts)
        self.shards = {self.path.name: self.header(self.path.name)}

    @lazy
    def names(self) -> NameMap:
        """Prefixes as in the file, for errors; names are mapped by `layout`."""
        return NameMap({"v.": "v.", "mm.": "mm."})

    @lazy
    def weight_map(self) -> dict[str, str]:
        return dict.fromkeys(self.gguf.tensors, self.path.name)

    @property
    def stored_types(self) -> list[str]:
        return sorted({entry.dtype for parts in self._parts.values() for entry in parts})

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of `read`, mostly those of the file; of a type that holds no weights just these."""
        if self.tensors[name].entry.dtype not in TORCH_DTYPES:
            return np.concatenate([self._map[part.start : part.stop] for part in self._parts[name]])
        raw: NDArray[np.uint8] = self.read(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        return raw

    def read(self, name: str) -> Tensor:
        """A tensor by released name, in the released layout; quantised ones as float32.

        `WeightsError` for a type that holds no weights.
        """
        kind = self.tensors[name].entry.dtype
        if kind not in TORCH_DTYPES:
            raise WeightsError(
                self.where, [f"{name}: type {kind}, expected one of {', '.join(TORCH_DTYPES)}"]
            )
        tensors = [self._stored(entry) for entry in self._parts[name]]
        return joined(name, tensors, self.layout, self.heads)

    @lazy
    def heads(self) -> int:
        return self._mmproj.count(HEADS, 1024)

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped file, which a copy or another process maps for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_map"}

    @lazy
    def _map(self) -> NDArray[np.uint8]:
        try:
            if not self.path.is_file() or not self.path.stat().st_size:
                raise WeightsError(self.where, ["is empty" if self.path.is_file() else "no such file"])
            return np.memmap(self.path, np.uint8, mode="c")
        except OSError as error:
            raise WeightsError(self.where, [f"cannot be read: {error.strerror or error}"]) from error

    @lazy
    def _mmproj(self) -> Mmproj:
        shapes = {name: entry.shape for name, entry in self.gguf.tensors.items()}
        return Mmproj(self.layout, Fields(self.gguf.metadata, self.where), shapes)

    def _config(self) -> Mapping[str, Any]:
        return config_json(self._mmproj)

    def _preprocessor(self) -> Mapping[str, Any]:
        return preprocessor_json(self._mmproj)

    def _released_names(self) -> dict[str, str]:
        """{name in the file: released name} of the vision tensors, with faults for those unknown."""
        table = self.layout.names
        shapes = self._mmproj.shapes
        if swapped(self.layout, shapes, self.gguf.metadata.get(f"{V}embedding_length")):
            table = {_exchanged(stored): released for stored, released in table.items()}
        layers = deepstack_layers(self.gguf.metadata, shapes)
        found: dict[str, str] = {}
        for stored in self.gguf.tensors:
            if not stored.startswith(("v.", "mm.")) or stored.startswith("mm.a."):
                continue
            released = replaced(stored, table)
            released = None if released is None else by_place(released, layers)
            if released is not None:
                found[stored] = released
            elif stored not in self.layout.unused:
                self.faults.append(f"{shown(stored)}: {self.layout.projector} has no such tensor")
        return found

    def _take(self, name: str, parts: Mapping[str, TensorEntry]) -> None:
        """Take up one released tensor, or say what is wrong with its parts."""
        wanted = ("",) if "" in parts else parts_of(name)
        missing = [part for part in wanted if part not in parts]
        entries = [parts[part] for part in wanted if part in parts]
        shape = joined_shape(name, [entry.shape for entry in entries], self.layout)
        stored = " + ".join(entry.name for entry in entries)
        if missing or shape is None:
            shapes = ", ".join(str(list(entry.shape)) for entry in entries)
            fault = f"no part {', '.join(missing)}" if missing else f"parts of shapes {shapes}"
        elif turned(name, self.layout) and not self._divides(shape[0]):
            fault = f"{shape[0]} rows, expected a multiple of 12 for each head ({HEADS})"
        else:
            size = sum(entry.nbytes for entry in entries)
            whole = TensorEntry(stored, _kind(entries), shape, 0, size)
            self.tensors[name] = StoredTensor(self.path.name, whole, mlx=False)
            self._parts[name] = tuple(entries)
            return
        self.faults.append(f"{name}: {stored}: {fault}")
        self.lost.add(name)

    def _divides(self, rows: int) -> bool:
        heads = self.gguf.metadata.get(HEADS)
        return not isinstance(heads, int) or heads < 1 or rows % (12 * heads) == 0

    def _stored(self, entry: TensorEntry) -> Tensor:
        data = self._map[entry.start : entry.stop]
        if entry.dtype in TORCH_DTYPES:
            return as_tensor(data, entry.dtype, entry.shape)
        return dequantised(data, entry, self.where)


def dequantised(data: NDArray[np.uint8], entry: TensorEntry, where: str) -> Tensor:
    """A quantised tensor as float32; `MoonvitError` without the `gguf` package."""
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise MoonvitError(
            f"{where}: {entry.name} is {entry.dtype}, which needs the package gguf",
            "pip install 'moonvit[gguf]'",
        ) from error
    rows = data.reshape(*entry.shape[:-1], -1)
    with np.errstate(all="ignore"):  # scales of a damaged file; `verify` counts what is not finite
        values = dequantize(rows, GGMLQuantizationType[entry.dtype])
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(entry.shape)


def is_gguf(path: Path) -> bool:
    """Whether it is to be read as GGUF: a file that is called so or begins so."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _layout(metadata: Mapping[str, Any], where: str) -> Layout:
    """The row for `clip.projector_type`; `ConfigError` for one that no family here has."""
    fields = Fields({"clip.has_vision_encoder": True, **metadata}, where)
    fields.choice("clip.has_vision_encoder", True)
    key = "clip.vision.projector_type" if "clip.vision.projector_type" in metadata else "clip.projector_type"
    projector = fields.choice(key, *(layout.projector for layout in LAYOUTS))
    return next(layout for layout in LAYOUTS if layout.projector == projector)


def _kind(entries: list[TensorEntry]) -> str:
    """The type that `read` gives, or the stored one where it cannot be read."""
    kinds = ["F32" if entry.dtype in QUANTISED else entry.dtype for entry in entries]
    unknown = [kind for kind in kinds if kind not in TORCH_DTYPES]
    if unknown:
        return unknown[0]
    kind = max_dtype(TORCH_DTYPES[kind] for kind in kinds)
    return next(name for name, dtype in TORCH_DTYPES.items() if dtype == kind)


def _exchanged(stored: str) -> str:
    other = {"v.blk.{}.ffn_up.": "v.blk.{}.ffn_down.", "v.blk.{}.ffn_down.": "v.blk.{}.ffn_up."}
    return other.get(stored, stored)
