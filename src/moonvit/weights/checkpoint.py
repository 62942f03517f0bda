"""A checkpoint directory: which shards hold vision tensors, and those tensors by memory map.

Shards without vision tensors are never opened; they may be absent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moonvit.errors import ConfigError, WeightsError
from moonvit.fields import Fields, read_json, shown
from moonvit.weights.header import Header, TensorEntry, header_size, parse_header
from moonvit.weights.names import canonical_names

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The types in which vision weights are taken."""

INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what its shard's header says of it."""

    shard: Path
    entry: TensorEntry
    mlx: bool


@dataclass
class LocalCheckpoint:
    """The vision half of a checkpoint directory.

    `tensors` maps released names to stored tensors. What is wrong with the files is collected in
    `faults` as lines that name the shard; `lost` holds the names whose shard is faulty.
    """

    directory: Path
    faults: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    shards: dict[str, Header] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weight_map = self._weight_map()
        vision = canonical_names(weight_map)
        by_shard: dict[str, dict[str, str]] = {}
        for stored, name in vision.items():
            by_shard.setdefault(weight_map[stored], {})[stored] = name
        for shard, names in sorted(by_shard.items()):
            self._open_shard(shard, names)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return Fields(read_json(self.directory / "config.json"), str(self.directory / "config.json")).values

    @cached_property
    def preprocessor(self) -> Mapping[str, Any]:
        path = self.directory / "preprocessor_config.json"
        return Fields(read_json(path), str(path)).values

    def read(self, name: str) -> Tensor:
        """The tensor by released name, mapped from its file without a copy where alignment allows.

        Pages come in as they are touched; writing to the tensor leaves the file alone.
        """
        stored = self.tensors[name]
        dtype = TORCH_DTYPES[stored.entry.dtype]
        data = self._map(stored.shard)[stored.entry.start : stored.entry.stop]
        if stored.entry.start % dtype.itemsize:
            data = data.copy()
        return torch.from_numpy(data).view(dtype).view(stored.entry.shape)

    def bytes_of(self, name: str) -> memoryview:
        """The tensor's bytes as they lie in the file."""
        stored = self.tensors[name]
        return memoryview(self._map(stored.shard)[stored.entry.start : stored.entry.stop])

    @property
    def nbytes(self) -> int:
        """Bytes of all vision tensors."""
        return sum(stored.entry.nbytes for stored in self.tensors.values())

    def _map(self, shard: Path) -> Any:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(shard, np.uint8, mode="c")
        return self._maps[shard]

    @cached_property
    def _maps(self) -> dict[Path, Any]:
        return {}

    def _weight_map(self) -> dict[str, str]:
        """{name as stored: file name}, from the index or, without one, from every file's own header."""
        if not self.directory.is_dir():
            raise WeightsError(str(self.directory), ["no such directory"])
        indexes = sorted(self.directory.glob("*" + INDEX_SUFFIX))
        if len(indexes) > 1:
            names = ", ".join(path.name for path in indexes)
            raise WeightsError(str(self.directory), [f"more than one index: {names}"])
        if indexes:
            return _read_index(indexes[0])
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(str(self.directory), ["no *.safetensors.index.json and no *.safetensors file"])
        return self._names_in(files)

    def _names_in(self, files: list[Path]) -> dict[str, str]:
        weight_map: dict[str, str] = {}
        for path in files:
            for name in read_header(path).tensors:
                if name in weight_map:
                    self.faults.append(f"{name}: named twice, in {weight_map[name]} and {path.name}")
                weight_map[name] = path.name
        return weight_map

    def _open_shard(self, shard: str, names: dict[str, str]) -> None:
        """Take up the named tensors of one shard, or say what is wrong with it."""
        try:
            path = inside(self.directory, shard)
            header = read_header(path)
        except WeightsError as error:
            self.faults.extend(f"{shard}: {fault}" for fault in error.faults)
            self.lost.update(names.values())
            return
        self.shards[shard] = header
        for stored in sorted(canonical_names(header.tensors).keys() - names.keys()):
            self.faults.append(f"{stored}: in {shard}, but the index does not place it there")
        for stored, name in names.items():
            if stored not in header.tensors:
                self.faults.append(f"{stored}: not in {shard}, where the index places it")
                self.lost.add(name)
            elif name in self.tensors:
                self.faults.append(f"{name}: named twice, the second time as {stored} in {shard}")
            else:
                mlx = header.metadata.get("format") == "mlx"
                self.tensors[name] = StoredTensor(path, header.tensors[stored], mlx)


def inside(directory: Path, name: str) -> Path:
    """The path of a shard, which must lie in `directory` itself and not lead out through a link.

    A link into the cache of huggingface-hub (`snapshots/…` to `blobs/…`) stays inside its repository
    folder and is followed.
    """
    if not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise WeightsError(str(directory), ["refused: the name leads out of the checkpoint directory"])
    path = directory / name
    if not path.exists():
        raise WeightsError(str(directory), ["no such file"])
    real, home = path.resolve(), directory.resolve()
    repository = home.parent.parent if home.parent.name == "snapshots" else home
    if not real.is_relative_to(repository):
        raise WeightsError(str(directory), ["refused: the link leads out of the checkpoint directory"])
    if not real.is_file():
        raise WeightsError(str(directory), ["not a regular file"])
    return path


def read_header(path: Path) -> Header:
    """The header of a local safetensors file; `WeightsError` naming the file."""
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            size = header_size(file.read(8), file_size, path.name)
            return parse_header(file.read(size), file_size, path.name)
    except OSError as error:
        raise WeightsError(path.name, [f"cannot be read: {error.strerror or error}"]) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = Fields(read_json(path), str(path)).raw("weight_map")
    except ConfigError as error:
        raise WeightsError(str(path), [error.message.removeprefix(f"{path}: ")]) from error
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise WeightsError(
            str(path), [f"weight_map is {shown(weight_map)}, expected a map of names to files"]
        )
    return weight_map


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write `model.safetensors.index.json`."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / ("model" + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2) + "\n")
