"""From a checkpoint's tensors into a module, strictly."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moonvit.errors import WeightsError
from moonvit.weights.checkpoint import TORCH_DTYPES, LocalCheckpoint

Shapes = Mapping[str, tuple[int, ...]]

_HINT = "moonvit info lists what the checkpoint holds"


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all tensors that the module loads."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def checkpoint_faults(checkpoint: LocalCheckpoint, expected: Shapes) -> list[str]:
    """One line for each missing, misshapen, mistyped, unexpected or doubled tensor and each bad shard."""
    faults = list(checkpoint.faults)
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            if name not in checkpoint.lost:
                faults.append(f"{name}: missing, expected shape {list(shape)}")
            continue
        where = f"in {stored.shard.name}"
        if stored.entry.dtype not in TORCH_DTYPES:
            kinds = ", ".join(TORCH_DTYPES)
            faults.append(f"{name}: type {stored.entry.dtype} {where}, expected one of {kinds}")
        if stored.entry.shape != shape:
            faults.append(f"{name}: shape {list(stored.entry.shape)} {where}, expected {list(shape)}")
    for name in sorted(checkpoint.tensors.keys() - expected.keys()):
        stored = checkpoint.tensors[name]
        faults.append(f"{stored.entry.name}: in {stored.shard.name}, but this geometry has no such tensor")
    return faults


def load_weights(model: nn.Module, checkpoint: LocalCheckpoint, dtype: torch.dtype) -> None:
    """Fill the module, built on the meta device, in place.

    Tensors of that dtype already are mapped, not copied. `WeightsError` holds every fault.
    """
    if not checkpoint.tensors and not checkpoint.faults:
        raise WeightsError(
            str(checkpoint.directory),
            ["no vision tensors: nothing named vision_tower.* or mm_projector.*"],
            "this checkpoint is text only",
        )
    faults = checkpoint_faults(checkpoint, expected_shapes(model))
    if faults:
        raise WeightsError(str(checkpoint.directory), faults, _HINT)
    state: dict[str, Tensor] = {name: checkpoint.read(name).to(dtype) for name in expected_shapes(model)}
    model.load_state_dict(state, strict=True, assign=True)


def fingerprint(checkpoint: LocalCheckpoint) -> str:
    """`sha256:` over name, type, shape and bytes of every vision tensor, in order of name."""
    digest = hashlib.sha256()
    for name, stored in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {stored.entry.dtype} {list(stored.entry.shape)}\n".encode())
        digest.update(checkpoint.bytes_of(name))
    return f"sha256:{digest.hexdigest()}"
