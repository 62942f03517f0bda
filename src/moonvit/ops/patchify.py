"""Pixels cut into patches."""

import numpy as np
from numpy.typing import NDArray


def normalized_patches(
    pixels: NDArray[np.uint8],
    grid_hw: tuple[int, int],
    patch: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    out: NDArray[np.float32],
) -> None:
    """Write (x/255 - mean)/std of a uint8 [height, width, 3] picture into `out`, [h·w, 3, patch, patch].

    `out` is float32, contiguous, in raster order. What lies right of and below the picture is black
    (0 before normalising). One row of patches is worked on at a time, so that it stays in the cache;
    all arithmetic is float32.
    """
    h, w = grid_hw
    width = pixels.shape[1]
    mean_C11, std_C11 = (np.array(v, np.float32).reshape(3, 1, 1) for v in (mean, std))
    rows = out.reshape(h, w, 3, patch, patch)
    strip = np.zeros((patch, w * patch, 3), np.uint8)
    for row in range(h):
        band = pixels[row * patch : (row + 1) * patch]
        if band.shape[0] < patch:
            strip[band.shape[0] :] = 0
        strip[: band.shape[0], :width] = band
        target = rows[row]
        cut = strip.reshape(patch, w, patch, 3).transpose(1, 3, 0, 2)
        np.divide(cut, np.float32(255), out=target, dtype=np.float32)
        np.subtract(target, mean_C11, out=target)
        np.divide(target, std_C11, out=target)


def block_patches(frames: NDArray[np.float32], patch: int, size: int, temporal: int) -> NDArray[np.float32]:
    """Frames [frames, 3, height, width] as flat patches in merge-block order.

    Returns [t·h·w, 3·temporal·patch²], each row (channel, frame, row, column), where t = frames/temporal;
    an odd rest is filled with the last frame.
    """
    short = -len(frames) % temporal
    if short:
        frames = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)])
    count, channels, height, width = frames.shape
    cut = frames.reshape(
        count // temporal, temporal, channels,
        height // patch // size, size, patch, width // patch // size, size, patch,
    )  # fmt: skip
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(ordered).reshape(-1, channels * temporal * patch**2)
