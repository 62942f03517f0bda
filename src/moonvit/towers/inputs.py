"""What every tower checks before it computes."""

from typing import Any

import torch
from torch import Tensor

from moonvit.config import MAX_SIDE, TowerConfig, VisionConfig
from moonvit.errors import NumericsError
from moonvit.ops.grid import Grid, as_grids, lengths


def checked_kimi_grids(pixel_values: Tensor, grid_thws: Any, config: VisionConfig) -> list[Grid]:
    """`checked_grids` for patches [N, 3, patch, patch] and clips no longer than the time table."""
    patch = config.patch_size
    return checked_grids(pixel_values, grid_thws, config, (3, patch, patch), config.pos_emb_time)


def checked_grids(
    pixel_values: Tensor,
    grid_thws: Any,
    config: TowerConfig,
    patch_shape: tuple[int, ...],
    max_frames: int | None = None,
    max_side: int | None = MAX_SIDE,
) -> list[Grid]:
    """The grids as integers, after checking that they fit the pixels and the tower.

    Raises `ValueError` naming the argument and both numbers, `NumericsError` for pixels that are not
    finite. All waiting for the device in a forward pass is done here.
    """
    grids = as_grids(grid_thws)
    if pixel_values.shape[1:] != patch_shape:
        expected_shape = ", ".join(["N", *map(str, patch_shape)])
        raise ValueError(f"pixel_values: expected shape [{expected_shape}], found {list(pixel_values.shape)}")
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values: expected a floating-point type, found {pixel_values.dtype}")
    for grid in grids:
        _check_grid(grid, config.merge_size, max_frames, max_side)
    expected = sum(lengths(grids))
    if pixel_values.shape[0] != expected:
        raise ValueError(
            f"pixel_values has {pixel_values.shape[0]} patches, but grid_thws asks for {expected}"
        )
    check_pixels(pixel_values)
    return grids


def _check_grid(grid: Grid, merge_size: int, max_frames: int | None, max_side: int | None) -> None:
    t, h, w = grid
    if h % merge_size or w % merge_size:
        raise ValueError(f"grid_thws: height and width must be multiples of {merge_size}, found {list(grid)}")
    if max_frames is not None and t > max_frames:
        raise ValueError(f"grid_thws: at most {max_frames} frames in one clip, found {t} in {list(grid)}")
    if max_side is not None and max(h, w) > max_side:
        raise ValueError(f"grid_thws: at most {max_side} patches along a side, found {list(grid)}")


def check_pixels(pixel_values: Tensor) -> None:
    """`NumericsError` for pixels that are not finite; waits for the device."""
    if pixel_values.device.type == "meta" or torch.compiler.is_compiling():
        return
    if not all_finite(pixel_values):
        first = int((~torch.isfinite(pixel_values)).flatten(1).any(dim=1).nonzero()[0])
        raise NumericsError(f"pixel_values: NaN or infinity, first in patch {first}")


def all_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite; takes no memory beside the tensor, waits for the device once."""
    if values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())
