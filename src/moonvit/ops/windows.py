"""Windows of merged cells, the segments of local attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonvit.ops.grid import Grid


def window_order(grids: Sequence[Grid], size: int, window: int) -> tuple[Tensor, list[int]]:
    """The order that makes the cells of each window neighbours, and the patches of each window.

    `size` patches make a side of a cell, `window` cells a side of a window; windows at the right and lower
    edge are cut off. Gives int64 [cells of the batch] on the CPU, numbers of cells (row by row, frame by
    frame) in window order, and the lengths of the windows in patches.
    """
    parts, lengths = [], []
    start = 0
    for t, h, w in grids:
        rows, columns = h // size, w // size
        numbers = torch.arange(start, start + t * rows * columns, device="cpu").view(t, rows, columns)
        for frame in numbers:
            for band in frame.split(window):
                for cells in band.split(window, dim=1):
                    parts.append(cells.flatten())
                    lengths.append(cells.numel() * size**2)
        start += t * rows * columns
    return torch.cat(parts), lengths


def reorder_blocks(x: Tensor, order: Tensor, block: int) -> Tensor:
    """`x` [blocks·block, …] with its runs of `block` rows put into `order`."""
    return x.reshape(-1, block, *x.shape[1:])[order.to(x.device)].flatten(0, 1)
