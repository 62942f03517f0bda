"""Pixels cut into patches, a strip of rows at a time, so that the work stays in the cache.

A strip holds full rows of a picture by lines: [lines, 3, width], red, green and blue of a line one behind
the other.
"""

import numpy as np
from numpy.typing import NDArray


def normalized(
    strip: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """(x/255 - mean)/std of a uint8 strip; all arithmetic is float32."""
    mean_C1, std_C1 = (np.array(v, np.float32).reshape(3, 1) for v in (mean, std))
    values = np.divide(strip, np.float32(255), dtype=np.float32)
    values -= mean_C1
    values /= std_C1
    return values


def raster_patches(strip: NDArray[np.float32], patch: int) -> NDArray[np.float32]:
    """A view of a strip `patch` lines high as its row of patches, [w, 3, patch, patch]."""
    return strip.reshape(patch, 3, -1, patch).transpose(2, 1, 0, 3)


def block_patches(strip: NDArray[np.float32], patch: int, size: int) -> NDArray[np.float32]:
    """A view of a strip size·patch lines high as its row of cells, [w/size, size, size, 3, patch, patch].

    The patches of a cell come row by row.
    """
    return strip.reshape(size, patch, 3, -1, size, patch).transpose(3, 0, 4, 2, 1, 5)
