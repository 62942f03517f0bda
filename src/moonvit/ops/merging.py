"""Patch cells put side by side."""

from torch import Tensor

from moonvit.ops.grid import Grid


def merge_cells(x_LD: Tensor, grid: Grid, size: int) -> Tensor:
    """The mean over frames, then each size×size cell as one row, [h·w/size², size²·D].

    `x_LD` is one picture or clip in raster order. Within a row the patches come row by row,
    (0,0), (0,1), (1,0), (1,1) for size 2; rows run row by row over the cells.
    """
    t, h, w = grid
    cells = x_LD.reshape(t, h // size, size, w // size, size, -1)
    pooled = cells.mean(dim=0) if t > 1 else cells[0]
    merged: Tensor = pooled.transpose(1, 2).reshape(h * w // size**2, -1)
    return merged


def merge_blocks(x_ND: Tensor, size: int) -> Tensor:
    """Each run of size² patches as one row, [N/size², size²·D]: `merge_cells` for merge-block order."""
    return x_ND.reshape(-1, size**2 * x_ND.shape[-1])
