"""A checkpoint's vision half written as a mmproj file that llama.cpp reads.

Names, rows and keys are those of llama.cpp's own converter; `moonvit.weights.gguf_names` has the sources.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonvit.config import PatchRules, PixelConfig, TowerConfig
from moonvit.configs.qwen import QwenConfig
from moonvit.errors import ConfigError, MoonvitError
from moonvit.families import Family, family_of
from moonvit.fields import Fields
from moonvit.pixels.clips import K25_CLIP
from moonvit.weights.gguf_config import Mmproj, config_json, metadata_of, preprocessor_json, swapped
from moonvit.weights.gguf_header import as_written
from moonvit.weights.gguf_layout import parts_of, pieces
from moonvit.weights.gguf_names import LAYOUTS, Layout
from moonvit.weights.index import TORCH_DTYPES, Checkpoint
from moonvit.weights.load import check_loadable, converted, expected_shapes, read_released, tower_only
from moonvit.weights.place import new_file

FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""`general.file_type` where most matrices are of that type."""


@dataclass(frozen=True)
class Planned:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def export_gguf(
    checkpoint: Checkpoint, path: Path, dtype: torch.dtype | None = None, experimental: bool = False
) -> int:
    """Write the vision half to `path`; returns its tensors' bytes. One tensor is held at a time.

    Matrices keep their type unless `dtype` is given; as by llama.cpp's converter, vectors and the position
    table are float32, and the patch matrix is float16 or float32. The file appears only when complete.

    Args:
        checkpoint: of any family and layout.
        path: the file to make.
        dtype: of the matrices: float32, float16 or bfloat16.
        experimental: allow a layout that no released llama.cpp reads: K3's.

    Raises:
        MoonvitError: if the path is taken, the `gguf` package is missing, or a layout is experimental.
        ConfigError: for geometry or pixel rules that such a file cannot say.
        WeightsError: for missing or wrong tensors.
    """
    family = family_of(checkpoint.config, f"{checkpoint.where}/config.json")
    layout = _layout(family, experimental)
    config, pixels = family.read(checkpoint)
    if tower_only(checkpoint):
        raise MoonvitError(f"{checkpoint.where}: no projector, which a mmproj file must have")
    if isinstance(config, QwenConfig) and config.temporal_patch_size != 2:
        fault = f"cannot say: temporal_patch_size {config.temporal_patch_size}"
        raise ConfigError(f"{checkpoint.where}: a mmproj file of {layout.projector} {fault}")
    model = family.empty_model(config)
    check_loadable(model, checkpoint)
    plan = _plan(model, checkpoint, layout, dtype)
    metadata = metadata_of(layout, config, pixels)
    _check_reads_back(family, layout, metadata, plan, config, pixels, checkpoint.where)
    if path.exists():
        raise MoonvitError(f"{path}: exists already", "remove it or choose another place")
    tensors = _tensors(list(expected_shapes(model)), checkpoint, layout, config)
    _write(path, metadata, plan, tensors)
    return sum(tensor.nbytes for tensor in plan)


def _layout(family: Family, experimental: bool) -> Layout:
    layout = next(layout for layout in LAYOUTS if layout.family == family.name)
    if layout.experimental and not experimental:
        raise MoonvitError(
            f"{family.name}: no released llama.cpp reads such a file",
            f"experimental=True (--experimental) writes {layout.projector} as a branch of it does",
        )
    return layout


def _layers(config: TowerConfig) -> Sequence[int]:
    return config.deepstack_layers if isinstance(config, QwenConfig) else ()


def _plan(model: Any, checkpoint: Checkpoint, layout: Layout, dtype: torch.dtype | None) -> list[Planned]:
    """Names, shapes and types of the file's tensors, from those of the checkpoint."""
    plan = []
    heads, layers = model.config.num_heads, _layers(model.config)
    for name, empty in model.state_dict().items():
        kind = dtype or _stored_dtype(checkpoint, name)
        if kind not in FILE_TYPES:
            raise MoonvitError(f"{name}: {kind} has no place in a mmproj file", "--dtype float32 converts")
        for stored, piece in pieces(name, empty, layout, heads, layers):
            plan.append(Planned(stored, tuple(piece.shape), file_dtype(stored, piece.ndim, kind)))
    return plan


def _stored_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    before, _, kind = name.rpartition(".")
    names = [name, *(f"{before}.{part}.{kind}" for part in parts_of(name))]
    found = next(checkpoint.tensors[stored] for stored in names if stored in checkpoint.tensors)
    return TORCH_DTYPES[found.entry.dtype]


def file_dtype(stored: str, rank: int, kind: torch.dtype) -> torch.dtype:
    """The type in the file, by `prepare_tensors` and `tensor_force_quant` of llama.cpp's converter."""
    if rank < 2 or stored.startswith("v.position_embd."):
        return torch.float32
    if stored.startswith("v.patch_embd.") and kind != torch.float16:
        return torch.float32
    return kind


def _tensors(
    names: Sequence[str], checkpoint: Checkpoint, layout: Layout, config: TowerConfig
) -> Iterator[Tensor]:
    """The file's tensors in the order of the plan, in their stored types."""
    for name in names:
        tensor = read_released(checkpoint, name, config.num_heads)
        for _, piece in pieces(name, tensor, layout, config.num_heads, _layers(config)):
            yield piece


def _check_reads_back(
    family: Family,
    layout: Layout,
    metadata: Mapping[str, Any],
    plan: Sequence[Planned],
    config: TowerConfig,
    pixels: PatchRules,
    where: str,
) -> None:
    """`ConfigError` naming what would be read back otherwise than it is written."""
    shapes = {tensor.name: tensor.shape for tensor in plan}
    mmproj = Mmproj(layout, Fields({key: _rounded(value) for key, value in metadata.items()}, where), shapes)
    faults = [f"{key} {value}" for key, value in metadata.items() if type(value) is int and value >= 2**32]
    if not faults:
        found = family.vision(config_json(mmproj), where), family.pixels(preprocessor_json(mmproj), where)
        faults = _differences(config, found[0]) + _differences(pixels, found[1])
        if swapped(layout, shapes, config.hidden_size):
            faults.append("intermediate_size as large as hidden_size (it means swapped matrices)")
    if faults:
        raise ConfigError(f"{where}: a mmproj file of {layout.projector} cannot say: {'; '.join(faults)}")


def _differences(given: Any, found: Any) -> list[str]:
    mine, theirs = asdict(_plain(given)), asdict(_plain(found))
    return [
        f"{name} {value} (it means {theirs[name]})"
        for name, value in mine.items()
        if _rounded(value) != _rounded(theirs[name])
    ]


def _plain(config: Any) -> Any:
    """Without what makes no difference: layers past the last, rules of clips that are the family's own."""
    if isinstance(config, QwenConfig):
        return replace(config, full_layers=tuple(n for n in config.full_layers if n < config.num_layers))
    if isinstance(config, PixelConfig) and config.clip == K25_CLIP:
        return replace(config, clip=None)
    return config


def _rounded(value: Any) -> Any:
    """As a float32 says it."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return as_written(value) if isinstance(value, float) else value


def _write(
    path: Path, metadata: Mapping[str, Any], plan: Sequence[Planned], tensors: Iterator[Tensor]
) -> None:
    try:
        from gguf import GGMLQuantizationType, GGUFWriter
    except ImportError as error:
        raise MoonvitError(
            "writing a mmproj file needs the package gguf, which is not installed",
            "pip install 'moonvit[gguf]'",
        ) from error
    types = {
        torch.float32: GGMLQuantizationType.F32,
        torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16,
    }
    with new_file(path) as partial, closing(GGUFWriter(partial, "clip")) as writer:
        _add_keys(writer, {**metadata, "general.file_type": FILE_TYPES[_mostly(plan)]})
        for planned in plan:
            kind = np.dtype(np.int16 if planned.dtype == torch.bfloat16 else str(planned.dtype)[6:])
            writer.add_tensor_info(planned.name, planned.shape, kind, planned.nbytes, types[planned.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for planned, tensor in zip(plan, tensors, strict=True):
            writer.write_tensor_data(_array(converted(planned.name, tensor, planned.dtype)))
        writer.flush()
        writer.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())


def _mostly(plan: Sequence[Planned]) -> torch.dtype:
    totals: dict[torch.dtype, int] = {}
    for tensor in plan:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    return max(totals, key=lambda dtype: totals[dtype])


def _add_keys(writer: Any, metadata: Mapping[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)


def _array(tensor: Tensor) -> NDArray[Any]:
    """The values as NumPy has them; bfloat16 as the integers that its bits spell."""
    tensor = tensor.contiguous()
    return np.asarray((tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy())
