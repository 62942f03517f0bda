"""Stages as another program wrote them: safetensors, .npz, or a directory of raw float32 files."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moonvit.errors import MoonvitError
from moonvit.fields import read_json
from moonvit.ops.grid import Grid, as_grids
from moonvit.weights.checkpoint import read_header
from moonvit.weights.index import TORCH_DTYPES

F64 = NDArray[np.float64]

GRID_NAMES = ("grid_thws", "grid_thw", "image_grid_thw", "image_grid_hws")
SHAPES_FILE = "shapes.json"
RAW_SUFFIX = ".f32"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NUMPY_DTYPES = {"float64": "float64", "float32": "float32", "float16": "float16"}


class DumpError(MoonvitError):
    """A dump cannot be read, or holds something else than it says."""


class Dump:
    """Named arrays of one run, read when asked for.

    Args:
        path: a .safetensors or .npz file, or a directory with `shapes.json`.
        renames: (their name, our name) pairs; `{}` in both stands for a block's number.

    Attributes:
        names: our stage names, without the grid.
        metadata: free-form strings of a safetensors file; empty for the others.
    """

    def __init__(self, path: Path, renames: Sequence[tuple[str, str]] = ()) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        self._source = self._open()
        self._stored = self._rename(renames)

    @property
    def names(self) -> list[str]:
        return [name for name in self._stored if name not in GRID_NAMES]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def read(self, name: str) -> F64:
        """The stage in float64, in the shape in which it was written."""
        return np.asarray(self._load(name), np.float64)

    def dtype(self, name: str) -> str:
        """The coarsest type that holds the stage's values: float64, float32, bfloat16 or float16.

        A float32 array whose values are all bfloat16 or float16 values is taken to be of that type,
        except for one with hardly any distinct values, such as zeros.
        """
        array = self._load(name)
        stored = str(array.dtype)
        if stored == "float64" and _representable(array, torch.float32):
            stored = "float32"
        if stored != "float32":
            return stored
        for dtype in (torch.bfloat16, torch.float16):
            if _representable(array, dtype):
                return str(dtype).removeprefix("torch.")
        return stored

    def grids(self) -> list[Grid] | None:
        """(t, h, w) of the pictures, from a tensor such as `grid_thws` or the metadata, if it is there."""
        for name in GRID_NAMES:
            if name in self._stored:
                values = self._load(name)
                return as_grids(np.atleast_2d(values).astype(np.int64).tolist())
            if name in self.metadata:
                return as_grids(np.atleast_2d(json.loads(self.metadata[name])).tolist())
        return None

    def _load(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = self._source.load(self._stored[name])
        if array.dtype.kind not in "fiu":
            raise DumpError(f"{self.path}: {name}: type {array.dtype} is not a number")
        return array

    def _open(self) -> Any:
        if self.path.is_dir():
            return _RawDirectory(self.path)
        if not self.path.exists():
            raise DumpError(f"{self.path}: no such file or directory")
        if self.path.suffix == ".npz":
            return _Npz(self.path)
        source = _Safetensors(self.path)
        self.metadata = source.metadata
        return source

    def _rename(self, renames: Sequence[tuple[str, str]]) -> dict[str, str]:
        """{our name: stored name}."""
        stored: dict[str, str] = {}
        for theirs in self._source.names:
            ours = renamed(theirs, renames)
            if ours in stored:
                raise DumpError(f"{self.path}: {stored[ours]!r} and {theirs!r} both stand for {ours!r}")
            stored[ours] = theirs
        return stored


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Our name for theirs by the first pair that fits; a number caught by `{}` gets two digits."""
    for theirs, ours in renames:
        pattern = re.escape(theirs).replace(re.escape("{}"), r"(\d+)")
        match = re.fullmatch(pattern, name)
        if match:
            for number in match.groups():
                ours = ours.replace("{}", f"{int(number):02}", 1)
            return ours
    return name


def parse_renames(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """`THEIRS=OURS` pairs, or a JSON file of {theirs: ours}, into pairs."""
    pairs: list[tuple[str, str]] = []
    for argument in arguments:
        if "=" in argument:
            theirs, _, ours = argument.partition("=")
            pairs.append((theirs.strip(), ours.strip()))
        else:
            document = read_json(Path(argument))
            if not isinstance(document, dict) or not all(isinstance(v, str) for v in document.values()):
                raise DumpError(f"{argument}: expected a JSON object of names to names")
            pairs += list(document.items())
    for theirs, ours in pairs:
        if theirs.count("{}") != ours.count("{}"):
            raise DumpError(f"map: {theirs!r} and {ours!r} must have equally many {{}}")
    return pairs


def _representable(array: NDArray[Any], dtype: torch.dtype) -> bool:
    values = torch.from_numpy(np.array(array))
    same = bool((values.to(dtype).to(values.dtype) == values).all())
    return same and len(np.unique(array.ravel()[:4096])) > 16


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.names = list(header.tensors)
        self.metadata = header.metadata
        self._entries = header.tensors

    def load(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        dtypes = {**TORCH_DTYPES, "I64": torch.int64, "I32": torch.int32}
        if entry.dtype not in dtypes:
            raise DumpError(f"{self.path}: {name}: type {entry.dtype}, expected one of {', '.join(dtypes)}")
        data = np.fromfile(self.path, np.uint8, entry.nbytes, offset=entry.start)
        tensor = torch.from_numpy(data).view(dtypes[entry.dtype]).view(entry.shape)
        return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


class _Npz:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = np.load(path, allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DumpError(f"{path}: not an .npz file of plain arrays") from error
        self.names = list(self._file.files)

    def load(self, name: str) -> NDArray[Any]:
        try:
            return np.asarray(self._file[name])
        except (ValueError, OSError) as error:
            raise DumpError(f"{self.path}: {name}: not a plain array") from error


class _RawDirectory:
    """`shapes.json` says {name: [sides]}; each array is `name.f32`, little-endian float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shapes = read_json(path / SHAPES_FILE)
        if not isinstance(shapes, dict):
            raise DumpError(f"{path / SHAPES_FILE}: expected an object of names to shapes")
        for name, shape in shapes.items():
            if not _SAFE_NAME.fullmatch(name):
                raise DumpError(f"{path / SHAPES_FILE}: {name!r} cannot be a file name")
            good = isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape)
            if not good and name not in GRID_NAMES:
                raise DumpError(f"{path / SHAPES_FILE}: {name}: expected a list of sides, found {shape!r}")
        self._shapes: dict[str, list[int]] = shapes
        self.names = list(shapes)

    def load(self, name: str) -> NDArray[Any]:
        shape = self._shapes[name]
        if name in GRID_NAMES:
            return np.asarray(shape)  # "grid_thws": [1, 4, 6] is the grid itself and has no file
        path = self.path / (name + RAW_SUFFIX)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
        if len(data) != 4 * math.prod(shape):
            raise DumpError(f"{path}: {len(data)} bytes, but float32 {shape} takes {4 * math.prod(shape)}")
        return np.frombuffer(data, "<f4").reshape(shape)
