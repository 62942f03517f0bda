"""The vision half of a checkpoint, wherever its files lie.

Shards without vision tensors are never opened; they may be absent. What is wrong is collected, so that it
can be reported all at once.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonvit.errors import ConfigError, FetchError, WeightsError
from moonvit.fields import Fields, parse_json, shown
from moonvit.lazy import lazy
from moonvit.weights.header import Header, TensorEntry
from moonvit.weights.names import KIMI_K3, NameMap, Reading, read_names
from moonvit.weights.small import SmallFiles

log = logging.getLogger("moonvit")

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The types in which vision weights are taken."""

INDEX_SUFFIX = ".safetensors.index.json"
SINGLE, SINGLE_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
MAX_SHARDS = 256
"""Files that hold vision tensors; each is one more header to read."""

INDEX_LIMIT = 512 * 2**20
"""Bytes of an index; the released one names every tensor of a very large model."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what its shard's header says of it."""

    shard: str
    entry: TensorEntry
    mlx: bool
    """Whether the file was written by MLX, which keeps convolutions of pictures and clips channels-last."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The released layout's shape."""
        shape = self.entry.shape
        if self.mlx and len(shape) in (4, 5) and shape[-1] == 3 and shape[1] != 3:
            return (shape[0], shape[-1], *shape[1:-1])
        return shape


class Checkpoint(SmallFiles):
    """What is common to checkpoints in a directory and on a hub.

    Attributes:
        tensors: {released name: where it lies}.
        faults: one line for each thing that is wrong with the files.
        lost: released names that are missing because of a fault already told.
        shards: {file name: header} of the files that hold vision tensors.
    """

    # What a kind of checkpoint provides beside its small files:

    def header(self, shard: str) -> Header:
        """The header of a safetensors file; `WeightsError` if there is no right one."""
        raise NotImplementedError

    def data(self, shard: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes [start, stop) of a file."""
        raise NotImplementedError

    # What follows from it:

    def scan(self) -> None:
        """Find the vision tensors; fills the attributes."""
        self.faults: list[str] = []
        self.lost: set[str] = set()
        self.tensors: dict[str, StoredTensor] = {}
        self.shards: dict[str, Header] = {}
        check_adapter(self)
        by_shard: dict[str, dict[str, str]] = {}
        self.faults += self.reading.faults()
        self.lost.update(self.reading.doubled)
        for stored, name in self.reading.names.items():
            by_shard.setdefault(self.weight_map[stored], {})[stored] = name
        if len(by_shard) > MAX_SHARDS:
            raise WeightsError(
                self.where, [f"vision tensors in {len(by_shard)} files, the limit is {MAX_SHARDS}"]
            )
        for shard, names in sorted(by_shard.items()):
            self._open_shard(shard, names)

    @lazy
    def names(self) -> NameMap:
        """How the family names its tensors; as K3 where `config.json` is absent or names no family."""
        from moonvit.families import family_of

        try:
            return family_of(self.config).names
        except ConfigError:
            return KIMI_K3

    @lazy
    def weight_map(self) -> dict[str, str]:
        """{name as stored: file name} of all tensors, from the index or, without one, from the headers."""
        names = self.file_names()
        weight_map = self._read_index(self._index_name) if self._index_name else None
        if weight_map is not None and not self._outdated(weight_map, names):
            return weight_map
        files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
        files = [SINGLE] if weight_map is not None else [name for name in files if name != ADAPTER]
        if not files:
            fault = "no *.safetensors.index.json and no *.safetensors file"
            mmproj = [name for name in names if name.endswith(".gguf")]
            raise WeightsError(self.where, [fault], f"name the file: {mmproj[0]}" if mmproj else "")
        return self._names_in(files)

    @property
    def nbytes(self) -> int:
        """Bytes of all vision tensors."""
        return sum(stored.entry.nbytes for stored in self.tensors.values())

    @property
    def stored_types(self) -> list[str]:
        """The types in which the vision tensors lie."""
        return sorted({stored.entry.dtype for stored in self.tensors.values()})

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """A vision tensor's bytes as they lie in the file, by released name."""
        stored = self.tensors[name]
        return self.data(stored.shard, stored.entry.start, stored.entry.stop)

    def read(self, name: str) -> Tensor:
        """A vision tensor by released name, in the released layout and the stored type."""
        stored = self.tensors[name]
        tensor = as_tensor(self.bytes_of(name), stored.entry.dtype, stored.entry.shape)
        return tensor.movedim(-1, 1).contiguous() if stored.shape != stored.entry.shape else tensor

    @lazy
    def _index_name(self) -> str | None:
        indexes = [name for name in self.file_names() if name.endswith(INDEX_SUFFIX) and "/" not in name]
        if SINGLE_INDEX in indexes:
            return SINGLE_INDEX
        if len(indexes) > 1:
            raise WeightsError(self.where, [f"more than one index: {', '.join(sorted(indexes))}"])
        return indexes[0] if indexes else None

    @lazy
    def reading(self) -> Reading:
        """Which of all tensors are the vision half's, and how their names were read."""
        return read_names(self.weight_map, self.names)

    def _outdated(self, weight_map: Mapping[str, str], names: Iterable[str]) -> bool:
        """Whether a single file stands beside an index of other files: transformers reads the file.

        Saving a model twice into one directory makes it, first in shards and then whole.
        """
        if self._index_name != SINGLE_INDEX or SINGLE not in names or SINGLE in weight_map.values():
            return False
        log.warning(
            "%s: %s is read, as transformers does, and %s, which names other files, is not; delete the one "
            "that is outdated",
            self.where, SINGLE, SINGLE_INDEX,
        )  # fmt: skip
        return True

    def _names_in(self, files: Iterable[str]) -> dict[str, str]:
        weight_map: dict[str, str] = {}
        for file in files:
            for name in self.header(file).tensors:
                if name in weight_map:
                    self.faults.append(f"{name}: named twice, in {weight_map[name]} and {file}")
                weight_map[name] = file
        return weight_map

    def _read_index(self, name: str) -> dict[str, str]:
        where = f"{self.where}/{name}"
        try:
            weight_map = Fields(parse_json(self.small_file(name, INDEX_LIMIT), where), where).raw(
                "weight_map"
            )
        except ConfigError as error:
            raise WeightsError(where, [error.message.removeprefix(f"{where}: ")], error.hint) from error
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise WeightsError(
                where, [f"weight_map is {shown(weight_map)}, expected a map of names to files"]
            )
        return weight_map

    def _open_shard(self, shard: str, names: dict[str, str]) -> None:
        """Take up the named tensors of one shard, or say what is wrong with it."""
        try:
            check_name(shard)
            header = self.header(shard)
        except FetchError:
            raise
        except WeightsError as error:
            self.faults.extend(f"{shard[:200]}: {fault}" for fault in error.faults)
            self.lost.update(names.values())
            return
        self.shards[shard] = header
        mlx = header.metadata.get("format") == "mlx"
        for stored in sorted(read_names(header.tensors, self.names).stored - self.reading.stored):
            self.faults.append(f"{stored}: in {shard}, but the index does not place it there")
        for stored, name in names.items():
            if stored not in header.tensors:
                self.faults.append(f"{stored}: not in {shard}, where the index places it")
                self.lost.add(name)
            else:
                self.tensors[name] = StoredTensor(shard, header.tensors[stored], mlx)


def check_adapter(checkpoint: Checkpoint, text: bool = False) -> None:
    """`WeightsError` where an adapter that changes the vision half lies beside it, or one alone.

    Transformers applies what `adapter_config.json` describes to the base, so that reading the base alone
    would give other numbers. An adapter of the text half matters only with `text`.
    """
    names = set(checkpoint.file_names())
    there = sorted(names & {"adapter_config.json", ADAPTER, "adapter_model.bin"})
    if not there or (not text and _changes_text_only(checkpoint, names)):
        return
    raise WeightsError(
        checkpoint.where,
        [f"{' and '.join(there)}: an adapter, which changes the weights when transformers loads them"],
        "merge it first (peft: merge_and_unload) or take its files out of the folder",
    )


def _changes_text_only(checkpoint: Checkpoint, names: set[str]) -> bool:
    base = any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names - {ADAPTER})
    return base and ADAPTER in names and not adapted_vision(checkpoint)


def adapted_vision(checkpoint: Checkpoint) -> set[str]:
    """Names of the adapter's tensors that belong to the vision half."""
    return read_names(checkpoint.header(ADAPTER).tensors, checkpoint.names).stored


def check_name(name: str) -> None:
    """Refuse a file name that leads out of the checkpoint, as a path or under some system's rules."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or any(c in name for c in "\\:\0"):
        raise WeightsError(name, ["refused: the name leads out of the checkpoint"])


def as_tensor(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes as a tensor, without a copy where they are aligned."""
    kind = TORCH_DTYPES[dtype]
    if data.ctypes.data % kind.itemsize or not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(kind).view(shape)


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The text of `model.safetensors.index.json`."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
