"""Pictures that any program can draw, so that two programs can be given the same one."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moonvit.errors import ImageError
from moonvit.pixels.kimi import PixelBatch

PATTERNS = ("black", "white", "gray", "checkerboard", "ramp")


def draw(pattern: str, width: int, height: int, frame: int = 0) -> NDArray[np.uint8]:
    """The pattern as uint8 [height, width, 3].

    For the pixel at row y, column x (both from 0) of frame f:
    black is 0, white 255, gray 128; checkerboard is 255 where (x//8 + y//8 + f) is even, else 0;
    ramp is red (x + 16 f) mod 256, green (y + 32 f) mod 256, blue (x + y) mod 256.
    """
    y, x = np.mgrid[:height, :width]
    if pattern == "ramp":
        channels = [x + 16 * frame, y + 32 * frame, x + y]
        return np.stack([channel % 256 for channel in channels], axis=-1).astype(np.uint8)
    if pattern == "checkerboard":
        gray = np.where((x // 8 + y // 8 + frame) % 2 == 0, 255, 0)
    elif pattern in PATTERNS:
        gray = np.full((height, width), {"black": 0, "white": 255, "gray": 128}[pattern])
    else:
        raise ImageError(f"pattern is {pattern!r}, expected one of {', '.join(PATTERNS)}")
    return np.repeat(gray[:, :, None], 3, axis=2).astype(np.uint8)


def parse_size(text: str) -> tuple[int, int]:
    """`448x300` as (448, 300), width first."""
    parts = text.lower().split("x")
    if len(parts) == 1:
        parts *= 2
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ImageError(f"size is {text!r}, expected WIDTHxHEIGHT in pixels, such as 448x300")
    return int(parts[0]), int(parts[1])


def as_clip(batch: PixelBatch) -> PixelBatch:
    """Still pictures of one size as the frames of one clip."""
    grids = {tuple(grid) for grid in batch.grid_thws.tolist()}
    if len(grids) != 1:
        sizes = ", ".join(f"{w}x{h}" for w, h in batch.sizes)
        raise ImageError(f"the frames of a clip must have one size, found {sizes}")
    _, h, w = grids.pop()
    grid_thws = batch.grid_thws.new_tensor([[len(batch), h, w]])
    return PixelBatch(batch.pixel_values, grid_thws, batch.sizes[:1])


def frames(pattern: str, size: tuple[int, int], count: int) -> list[Image.Image]:
    """The first `count` frames of a pattern; `size` is (width, height)."""
    return [Image.fromarray(draw(pattern, *size, frame)) for frame in range(count)]
