"""Learned position tables resampled to a grid, and sine tables for the frames of a clip."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moonvit.ops.grid import Grid

TIME_THETA = 10000.0


def resample_table(
    table_hwD: Tensor, h: int, w: int, mode: str, dtype: torch.dtype, align_corners: bool = False
) -> Tensor:
    """The [height, width, D] table at h×w points in raster order, `dtype` [h·w, D].

    The points are half-pixel centres or, with `align_corners` (Qwen3-VL), run from corner to corner.
    `mode` is "bilinear" or "bicubic"; there is no antialias and edges are clamped. A table of that very
    size is taken untouched.
    """
    table_hwD = table_hwD.to(dtype)
    if table_hwD.shape[:2] != (h, w):
        planes = table_hwD.permute(2, 0, 1)[None]
        planes = F.interpolate(planes, size=(h, w), mode=mode, align_corners=align_corners, antialias=False)
        table_hwD = planes[0].permute(1, 2, 0)
    return table_hwD.flatten(0, 1)


def time_table(frames: int, width: int, dtype: torch.dtype) -> Tensor:
    """[sin | cos] of frame·10000^(-i/(width/2)), `dtype` [frames, width] on the CPU.

    Computed in float64 and rounded once.
    """
    steps = torch.arange(width // 2, dtype=torch.float64, device="cpu") / (width / 2)
    angles = torch.arange(frames, dtype=torch.float64, device="cpu")[:, None] * TIME_THETA**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype)


def grid_positions(table_hwD: Tensor, grids: Sequence[Grid], mode: str, dtype: torch.dtype) -> Tensor:
    """Position embeddings of a packed batch, `dtype` [N, D] on the table's device.

    Frames of a clip get their row of the time table on top; a still picture gets nothing, not even row 0.
    """
    planes = {(h, w): resample_table(table_hwD, h, w, mode, dtype) for _, h, w in grids}
    width = table_hwD.shape[-1]
    parts = []
    for t, h, w in grids:
        if t == 1:
            parts.append(planes[h, w])
        else:
            times = time_table(t, width, dtype).to(table_hwD.device)
            parts.append((planes[h, w][None] + times[:, None]).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
