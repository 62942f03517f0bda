"""What every tower checks before it computes."""

from typing import Any

import torch
from torch import Tensor

from moonvit.config import MAX_SIDE, VisionConfig
from moonvit.errors import NumericsError
from moonvit.ops.grid import Grid, as_grids, lengths


def checked_grids(pixel_values: Tensor, grid_thws: Any, config: VisionConfig) -> list[Grid]:
    """The grids as integers, after checking that they fit the pixels and the tower.

    Raises `ValueError` naming the argument and both numbers, `NumericsError` for pixels that are not
    finite. This is the one place of a forward pass that waits for the device.
    """
    grids = as_grids(grid_thws)
    patch = config.patch_size
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, patch, patch):
        raise ValueError(
            f"pixel_values: expected shape [N, 3, {patch}, {patch}], found {list(pixel_values.shape)}"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values: expected a floating-point type, found {pixel_values.dtype}")
    for grid in grids:
        _check_grid(grid, config)
    expected = sum(lengths(grids))
    if pixel_values.shape[0] != expected:
        raise ValueError(
            f"pixel_values has {pixel_values.shape[0]} patches, but grid_thws asks for {expected}"
        )
    _check_finite(pixel_values)
    return grids


def _check_grid(grid: Grid, config: VisionConfig) -> None:
    t, h, w = grid
    if h % config.merge_size or w % config.merge_size:
        raise ValueError(
            f"grid_thws: height and width must be multiples of {config.merge_size}, found {list(grid)}"
        )
    if t > config.pos_emb_time:
        raise ValueError(
            f"grid_thws: at most {config.pos_emb_time} frames in one clip, found {t} in {list(grid)}"
        )
    if max(h, w) > MAX_SIDE:
        raise ValueError(f"grid_thws: at most {MAX_SIDE} patches along a side, found {list(grid)}")


def _check_finite(pixel_values: Tensor) -> None:
    if pixel_values.device.type == "meta" or torch.compiler.is_compiling():
        return
    if not bool(torch.isfinite(pixel_values).all()):
        first = int((~torch.isfinite(pixel_values)).flatten(1).any(dim=1).nonzero()[0])
        raise NumericsError(f"pixel_values: NaN or infinity, first in patch {first}")
