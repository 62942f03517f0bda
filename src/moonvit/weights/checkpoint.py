"""A checkpoint in a directory; its tensors are memory-mapped."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonvit.errors import ConfigError, WeightsError
from moonvit.fields import read_bytes
from moonvit.lazy import lazy
from moonvit.weights.header import Header, header_size, parse_header
from moonvit.weights.index import Checkpoint, check_name
from moonvit.weights.small import SmallFiles


class DirectoryFiles(SmallFiles):
    """The small files of a directory, which need hold no weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.where = str(directory)

    def file_names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def small_file(self, name: str, limit: int) -> bytes:
        return directory_file(self.directory, name, limit)


class LocalCheckpoint(DirectoryFiles, Checkpoint):
    """The vision half of a checkpoint directory.

    Pages of a tensor come in as they are touched; writing to it leaves the file alone. `WeightsError` if
    there is no directory or nothing in it.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise WeightsError(str(directory), ["no such directory"])
        super().__init__(directory)
        self.scan()

    def header(self, shard: str) -> Header:
        return read_header(inside(self.directory, shard))

    def data(self, shard: str, start: int, stop: int) -> NDArray[np.uint8]:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(inside(self.directory, shard), np.uint8, mode="c")
        return self._maps[shard][start:stop]

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped files, which a copy or another process maps for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}

    @lazy
    def _maps(self) -> dict[str, NDArray[np.uint8]]:
        return {}


def directory_file(directory: Path, name: str, limit: int) -> bytes:
    """A small file of a directory; `ConfigError` if it is absent or larger than `limit` bytes."""
    try:
        path = inside(directory, name)
    except WeightsError as error:
        raise ConfigError(f"{directory / name}: {error.faults[0]}") from error
    return read_bytes(path, limit)


def inside(directory: Path, name: str) -> Path:
    """The path of a file that must lie in `directory` and not lead out through a link.

    A link within huggingface-hub's cache (`snapshots/…` to `blobs/…`) stays inside its repository's folder
    and is followed.
    """
    check_name(name)
    path = directory / name
    try:
        present = path.exists()
    except OSError as error:  # such as a name longer than the system allows
        raise WeightsError(name, [f"no such file: {error.strerror}"]) from error
    if not present:
        raise WeightsError(name, ["no such file"])
    real, home = path.resolve(), directory.resolve()
    blobs = home.parent.parent / "blobs"
    cached = home.parent.name == "snapshots" and real.parent == blobs
    if not cached and not real.is_relative_to(home):
        raise WeightsError(name, ["refused: the link leads out of the checkpoint"])
    if not real.is_file():
        raise WeightsError(name, ["not a regular file"])
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
