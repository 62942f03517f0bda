"""The vision half written as a checkpoint of its own, and a checkpoint read through to the last byte."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from moonvit.weights.index import TORCH_DTYPES, Checkpoint, index_bytes
from moonvit.weights.load import converted, fingerprint
from moonvit.weights.place import new_directory
from moonvit.weights.writer import SafetensorsWriter

FILE = "model.safetensors"


def export(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype | None = None) -> int:
    """Write the vision tensors under their released names to one file; returns its tensors' bytes.

    Values and types stay as stored unless `dtype` is given. The directory appears only when complete;
    `MoonvitError` if it exists.
    """
    with new_directory(directory) as partial:
        return _write(checkpoint, partial, dtype)


def _write(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype | None) -> int:
    total = 0
    with SafetensorsWriter(directory / FILE, reserve=256 * len(checkpoint.tensors) + 1024) as writer:
        for name in sorted(checkpoint.tensors):
            tensor = checkpoint.read(name)
            tensor = tensor if dtype is None else converted(name, tensor, dtype)
            writer.add(name, tensor)
            total += tensor.nbytes
        writer.metadata.update(format="pt", source_fingerprint=fingerprint(checkpoint))
    weight_map = dict.fromkeys(checkpoint.tensors, FILE)
    (directory / "model.safetensors.index.json").write_bytes(index_bytes(weight_map, total))
    for name, data in checkpoint.json_files().items():
        (directory / name).write_bytes(data)
    return total


@dataclass(frozen=True)
class Verified:
    """One tensor read through: its type, shape, values that are not finite, and SHA-256 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    not_finite: int
    sha256: str


def verify(checkpoint: Checkpoint, progress: Callable[[int], object] | None = None) -> Iterator[Verified]:
    """Read every vision tensor, in order of name; `progress` is called with the bytes of each."""
    for name, stored in sorted(checkpoint.tensors.items()):
        data = checkpoint.bytes_of(name)
        bad = 0
        if stored.entry.dtype in TORCH_DTYPES:
            tensor = checkpoint.read(name)
            bad = int(tensor.numel() - torch.isfinite(tensor).sum())
        digest = hashlib.sha256(data.data).hexdigest()
        yield Verified(name, stored.entry.dtype, stored.shape, bad, digest)
        if progress:
            progress(stored.entry.nbytes)
