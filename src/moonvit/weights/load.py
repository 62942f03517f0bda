"""From a checkpoint's tensors into a module, strictly."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moonvit.errors import WeightsError
from moonvit.towers.base import VisionModel
from moonvit.weights.index import TORCH_DTYPES, Checkpoint
from moonvit.weights.names import MAPS, companion, read_names

Shapes = Mapping[str, tuple[int, ...]]

_HINT = "moonvit info lists what the checkpoint holds"


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all tensors that the module loads."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def checkpoint_faults(checkpoint: Checkpoint, expected: Shapes) -> list[str]:
    """One line for each missing, misshapen, mistyped, unexpected or doubled tensor and each bad shard."""
    faults = list(checkpoint.faults)
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            if name not in checkpoint.lost:
                faults.append(f"{name}: missing, expected shape {list(shape)}")
            continue
        where = f"in {stored.shard}"
        if stored.entry.dtype not in TORCH_DTYPES:
            kinds = ", ".join(TORCH_DTYPES)
            faults.append(f"{name}: type {stored.entry.dtype} {where}, expected one of {kinds}")
        if stored.shape != shape:
            faults.append(f"{name}: shape {list(stored.entry.shape)} {where}, expected {list(shape)}")
    for name in sorted(checkpoint.tensors.keys() - expected.keys()):
        stored = checkpoint.tensors[name]
        what = companion(stored.entry.name) or "but this geometry has no such tensor"
        faults.append(f"{stored.entry.name}: in {stored.shard}, {what}")
    return faults


def stored_shapes(model: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """`expected_shapes` as this checkpoint splits them: transformers' `kimi_k25` has q, k and v apart."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(model).items():
        parts = _parts(name)
        if parts and parts[0] in checkpoint.tensors:
            shapes.update(dict.fromkeys(parts, (shape[0] // 3, *shape[1:])))
        else:
            shapes[name] = shape
    return shapes


def _parts(name: str) -> list[str]:
    """Names of a fused tensor's parts, or none."""
    before, fused, after = name.partition(".wqkv.")
    return [f"{before}.wqkv.{part}.{after}" for part in "qkv"] if fused else []


def read_released(checkpoint: Checkpoint, name: str, heads: int) -> Tensor:
    """The tensor in the released layout, joined where the checkpoint splits it."""
    parts = _parts(name)
    if name in checkpoint.tensors or not parts:
        return checkpoint.read(name)
    q, k, v = (checkpoint.read(part) for part in parts)
    return torch.cat([paired_rows(q, heads), paired_rows(k, heads), v])


def paired_rows(x: Tensor, heads: int) -> Tensor:
    """Rows of each head from half-split order (all first members, then all second) to adjacent pairs."""
    halves = x.reshape(heads, 2, -1, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


def tower_only(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds a tower and nothing of a projector."""
    names = checkpoint.tensors.keys() | checkpoint.lost
    return bool(names) and all(name.startswith("vision_tower.") for name in names)


def check_loadable(model: nn.Module, checkpoint: Checkpoint) -> None:
    """`WeightsError`, holding every fault, unless the checkpoint fills the module exactly."""
    if not checkpoint.tensors and not checkpoint.faults:
        roots = " or ".join(f"{root}*" for root in reversed(checkpoint.names.released_roots))
        raise WeightsError(
            checkpoint.where, [f"no vision tensors: nothing named {roots}"], _other(checkpoint)
        )
    faults = checkpoint_faults(checkpoint, stored_shapes(model, checkpoint))
    if faults:
        raise WeightsError(checkpoint.where, faults, _HINT)


def _other(checkpoint: Checkpoint) -> str:
    """What a checkpoint without this family's vision tensors holds."""
    for family, names in MAPS.items():
        if found := read_names(checkpoint.weight_map, names).names:
            return f"{min(found)} is named as {family}'s are; does config.json belong to these weights?"
    return "this checkpoint is text only"


def load_weights(model: VisionModel, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Fill the module, built on the meta device, in place.

    Tensors of that dtype already are mapped, not copied. `WeightsError` holds every fault.
    """
    check_loadable(model, checkpoint)
    heads = model.config.num_heads
    names = expected_shapes(model)
    state = {name: converted(name, read_released(checkpoint, name, heads), dtype) for name in names}
    model.load_state_dict(state, strict=True, assign=True)


def converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another type; `WeightsError` where a finite value becomes infinite."""
    result = tensor.to(dtype)
    if (
        dtype == torch.float16
        and tensor.dtype != dtype
        and torch.isinf(result).sum() > torch.isinf(tensor).sum()
    ):
        raise WeightsError(
            name, [f"values up to {tensor.abs().max():.3g} do not fit into float16"], "use bfloat16"
        )
    return result


def fingerprint(checkpoint: Checkpoint) -> str:
    """`sha256:` over name, type, shape and bytes of every vision tensor, in order of name."""
    digest = hashlib.sha256()
    for name, stored in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {stored.entry.dtype} {list(stored.entry.shape)}\n".encode())
        digest.update(checkpoint.bytes_of(name).data)
    return f"sha256:{digest.hexdigest()}"
