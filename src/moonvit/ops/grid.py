"""Grids: how many patches a picture has in time, height and width, and where each one lies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""(t, h, w) in patches."""


def as_grids(grid_thws: Any) -> list[Grid]:
    """Grids as Python integers, from a tensor, an array or nested sequences of shape [n, 3] or [n, 2].

    Two columns are (h, w) of still pictures. Reading a tensor from another device waits for it: call
    this once a forward pass.
    """
    rows = grid_thws.tolist() if hasattr(grid_thws, "tolist") else list(grid_thws)
    grids = []
    for row in rows:
        if not isinstance(row, list | tuple) or len(row) not in (2, 3):
            raise ValueError(f"grid_thws: expected shape [n, 3] or [n, 2], found the row {row!r}")
        if any(isinstance(side, bool) or side != int(side) or side < 1 for side in row):
            raise ValueError(f"grid_thws: expected whole numbers above 0, found {row!r}")
        t, h, w = [1, *row][-3:]
        grids.append((int(t), int(h), int(w)))
    return grids


def lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each picture or clip."""
    return [t * h * w for t, h, w in grids]


def raster_positions(h: int, w: int) -> tuple[Tensor, Tensor]:
    """Row and column of each of the h·w patches of one frame, row by row; two int64 [h·w] on the CPU."""
    cpu = torch.device("cpu")
    rows = torch.arange(h, device=cpu).repeat_interleave(w)
    return rows, torch.arange(w, device=cpu).repeat(h)


def block_order(grids: Sequence[Grid], size: int) -> Tensor:
    """Raster numbers of the patches in merge-block order, int64 [N] on the CPU.

    In block order the size² patches of a merged cell are neighbours, row by row within the cell, and
    cells run row by row over each frame. `x_ND[block_order(...)]` turns raster order into block order.
    """
    parts = []
    start = 0
    for t, h, w in grids:
        if h % size or w % size:
            raise ValueError(f"grid_thws: {h}x{w} patches cannot be cut into {size}x{size} cells")
        numbers = torch.arange(start, start + t * h * w, device="cpu")
        cells = numbers.view(t, h // size, size, w // size, size)
        parts.append(cells.transpose(2, 3).flatten())
        start += t * h * w
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def raster_order(grids: Sequence[Grid], size: int) -> Tensor:
    """The inverse of `block_order`: `x_ND[raster_order(...)]` turns block order into raster order."""
    return torch.argsort(block_order(grids, size))


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each single frame, where attention does not reach over frames."""
    return [h * w for t, h, w in grids for _ in range(t)]


def block_positions(h: int, w: int, size: int) -> tuple[Tensor, Tensor]:
    """`raster_positions` in merge-block order."""
    order = block_order([(1, h, w)], size)
    rows, columns = raster_positions(h, w)
    return rows[order], columns[order]
