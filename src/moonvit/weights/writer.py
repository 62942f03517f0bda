"""Safetensors files written as their tensors come, without holding them in memory."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from moonvit.weights.place import beside, check_output

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


class SafetensorsWriter:
    """Appends tensors to a file that appears under its name only when complete.

    The header lies before the data and is known last, so `reserve` bytes are kept for it and padded
    with spaces, as the format allows; a larger header costs one copy of the data. On an error inside
    the `with` block the unfinished file is removed.
    """

    def __init__(self, path: Path, reserve: int = 64 * 1024) -> None:
        self.path = check_output(path)
        self.metadata: dict[str, str] = {}
        self._reserve = reserve + (-reserve % 8)
        self._entries: dict[str, Any] = {}
        self._offset = 0
        self._partial = beside(self.path)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("w+b")
        self._file.seek(8 + self._reserve)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor under a name not yet used."""
        tensor = tensor.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        self.add_bytes(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)

    def add_bytes(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> None:
        """Append one tensor given by its raw little-endian bytes."""
        if name in self._entries:
            raise ValueError(f"tensor {name!r} was written already")
        stop = self._offset + len(data)
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [self._offset, stop]}
        self._file.write(data)
        self._offset = stop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        header = _header_bytes(self._entries, self.metadata)
        if len(header) > self._reserve:
            self._move_data(len(header))
        self._file.seek(0)
        self._file.write(self._reserve.to_bytes(8, "little") + header.ljust(self._reserve))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.replace(self.path)

    def _move_data(self, reserve: int) -> None:
        """Copy the data into a file with more room before it."""
        reserve += -reserve % 8
        wider = self._partial.with_suffix(".wider")
        self._file.seek(8 + self._reserve)
        target = wider.open("w+b")
        target.seek(8 + reserve)
        shutil.copyfileobj(self._file, target, 2**20)
        self._file.close()
        wider.replace(self._partial)
        self._file, self._reserve = target, reserve


def _header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    header = {"__metadata__": dict(metadata), **entries} if metadata else dict(entries)
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
