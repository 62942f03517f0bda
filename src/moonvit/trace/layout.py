"""Finding out how another program lays its arrays out: shapes, axes, order of patches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonvit.ops.grid import Grid, block_order, lengths
from moonvit.trace.metrics import relative_l2
from moonvit.trace.stages import has_patch_rows

F64 = NDArray[np.float64]

CLEAR = 0.5
"""Another layout is believed only if it halves the error of the plain one."""


@dataclass(frozen=True)
class Aligned:
    """An array brought to our shape and raster order, and how it was found to lie.

    `axes` is "" for our own layout, otherwise a phrase such as "axes transposed".
    """

    values: F64
    axes: str
    order: str


def shapes_of(array: F64, shape: tuple[int, ...]) -> Iterator[tuple[F64, str]]:
    """The array as `shape` in every way that makes sense, each with a phrase; the plain way first."""
    if array.size != int(np.prod(shape)):
        return
    rows = shape[0] if shape else 1
    squeezed = array.reshape([side for side in array.shape if side != 1] or [1])
    kept = [side for side in shape if side != 1] or [1]
    if list(squeezed.shape) == kept or squeezed.shape[0] == rows or len(squeezed.shape) == 1:
        yield array.reshape(shape), ""
    if squeezed.ndim == 2 and squeezed.shape[1] == rows:
        yield squeezed.T.reshape(shape), "axes transposed"
    if len(shape) == 3 and squeezed.ndim == 3 and squeezed.shape == (shape[1], shape[0], shape[2]):
        yield squeezed.transpose(1, 0, 2), "heads first"
    if len(shape) == 4 and squeezed.ndim == 4 and squeezed.shape == (rows, *shape[2:], shape[1]):
        yield squeezed.transpose(0, 3, 1, 2), "channels last"


def align(
    name: str, array: F64, want: F64, grids: Sequence[Grid], size: int, order: str = "auto"
) -> Aligned | None:
    """The array as a stage of `want`'s shape; None if its number of elements is another.

    Args:
        name: the stage.
        array: as it was read.
        want: the reference's, in raster order.
        grids: of the pictures.
        size: patches along a side of a merged cell.
        order: "raster" or "block" if it is known, "auto" to take the one that fits clearly better.
    """
    best: tuple[float, Aligned] | None = None
    orders = ("raster", "block") if order == "auto" else (order,)
    permuted = has_patch_rows(name) and want.shape[:1] == (sum(lengths(grids)),)
    for values, axes in shapes_of(array, want.shape):
        for kind in orders if permuted else ("raster",):
            placed = to_raster(values, grids, size) if kind == "block" and permuted else values
            error = relative_l2(placed, want)
            if best is None or not error >= CLEAR * best[0]:
                best = (error, Aligned(placed, axes, kind if permuted else ""))
    return best[1] if best else None


def to_raster(values: F64, grids: Sequence[Grid], size: int) -> F64:
    """Rows in merge-block order put into raster order."""
    out = np.empty_like(values)
    out[block_order(grids, size).numpy()] = values
    return out


def rows_in_words(
    name: str, row: int, grids: Sequence[Grid], size: int
) -> tuple[int, tuple[int, int, int] | None]:
    """(picture, (t, row, column)) of a stage's row; for merged rows, row and column count cells, t is 0."""
    merged = not has_patch_rows(name)
    for picture, (t, h, w) in enumerate(grids):
        if merged:
            t, h, w = 1, h // size, w // size
        if row < t * h * w:
            return picture, (row // (h * w), row // w % h, row % w)
        row -= t * h * w
    return -1, None
