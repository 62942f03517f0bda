"""The Kimi K3 picture processor: resize, composite, pad, normalise, cut; bit-equal to the model's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from moonvit.config import Chessboard, PixelConfig
from moonvit.errors import ImageError
from moonvit.ops.patchify import normalized_patches
from moonvit.pixels.decode import Exif, Layout, Limits, describe, image_size, read_image
from moonvit.pixels.plan import ImagePlan, plan_image

_ROWS = 256  # rows composited at once, so that the float copies stay small


@dataclass(frozen=True)
class PixelBatch:
    """Pictures as a tower takes them.

    Attributes:
        pixel_values: float32 [N, 3, patch, patch], raster order, pictures one behind the other.
        grid_thws: int64 [n, 3], (t, h, w) in patches.
        sizes: (width, height) in pixels before resizing, upright; the size that the prompt names.
    """

    pixel_values: Tensor
    grid_thws: Tensor
    sizes: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Prepared:
    """One picture, resized and free of transparency, not yet cut: uint8 [height, width, 3]."""

    pixels: NDArray[np.uint8]
    plan: ImagePlan


class KimiProcessor:
    """Turns pictures into a `PixelBatch` by a checkpoint's rules.

    Holds no state between calls. `limits` bound what is decoded at all.
    """

    def __init__(self, config: PixelConfig, limits: Limits | None = None) -> None:
        self.config = config
        self.limits = limits or Limits()

    def __call__(
        self,
        images: Any,
        *,
        max_tokens: int | None = None,
        exif: Exif = "apply",
        layout: Layout | None = None,
    ) -> PixelBatch:
        """The batch for one picture or a list of them.

        Args:
            images: what `moonvit.pixels.decode.read_image` takes, or a list or tuple of such.
            max_tokens: for each picture, lowers the checkpoint's budget.
            exif: "apply" turns pictures upright, "ignore" leaves them as stored (the reference's way).
            layout: "HWC" or "CHW", for arrays of three dimensions.

        Raises:
            ImageError: for a picture that cannot be read or is over a limit.
        """
        sources = list(images) if isinstance(images, list | tuple) else [images]
        prepared = [self.prepare(s, max_tokens=max_tokens, exif=exif, layout=layout) for s in sources]
        return self.pack(prepared)

    def prepare(
        self, image: Any, *, max_tokens: int | None = None, exif: Exif = "apply", layout: Layout | None = None
    ) -> Prepared:
        """One picture decoded, resized and composited."""
        picture = read_image(image, limits=self.limits, exif=exif, layout=layout)
        plan = plan_image(*picture.size, self.config, max_tokens)
        try:
            return Prepared(opaque_pixels(picture, plan, self.config), plan)
        except (ValueError, OSError) as error:
            raise ImageError(
                f"{describe(image)}: mode {picture.mode} cannot be converted: {error}"
            ) from error

    def pack(self, prepared: Sequence[Prepared]) -> PixelBatch:
        """Normalise and cut prepared pictures into one batch."""
        patch = self.config.patch_size
        total = sum(p.plan.patches for p in prepared)
        pixel_values = torch.empty((total, 3, patch, patch), dtype=torch.float32, device="cpu")
        out = pixel_values.numpy()
        start = 0
        for picture in prepared:
            stop = start + picture.plan.patches
            _, h, w = picture.plan.grid
            normalized_patches(
                picture.pixels, (h, w), patch, self.config.mean, self.config.std, out[start:stop]
            )
            start = stop
        grids = [picture.plan.grid for picture in prepared]
        grid_thws = torch.tensor(grids, dtype=torch.int64, device="cpu").reshape(-1, 3)
        sizes = [(picture.plan.width, picture.plan.height) for picture in prepared]
        return PixelBatch(pixel_values, grid_thws, sizes)

    def plan(
        self, image: Any, *, max_tokens: int | None = None, exif: Exif = "apply", layout: Layout | None = None
    ) -> ImagePlan:
        """Sizes and tokens of one picture, from its header alone."""
        size = image_size(image, limits=self.limits, exif=exif, layout=layout)
        return plan_image(*size, self.config, max_tokens)


def opaque_pixels(picture: Image.Image, plan: ImagePlan, config: PixelConfig) -> NDArray[np.uint8]:
    """The picture at its new size without transparency, uint8 [new_height, new_width, 3].

    Resizing is Pillow's bicubic in the picture's own mode: nearest-neighbour for palette and one-bit
    pictures, premultiplied for those with alpha, a plain copy at the same size.
    """
    size = (plan.new_width, plan.new_height)
    if config.fill_before_resize:
        picture = _fill(picture, config.background)
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    if not config.fill_before_resize:
        resized = _fill(resized, config.background)
    return np.asarray(resized)


def _fill(picture: Image.Image, background: Chessboard | None) -> Image.Image:
    """RGB, with the background wherever the picture is transparent.

    A picture of mode RGB is returned as it is, even with a transparent colour declared.
    """
    if picture.mode == "RGB":
        return picture
    transparent = "A" in picture.getbands() or "transparency" in picture.info
    if transparent:
        picture = picture.convert("RGBA")
    if background is None or not transparent:
        return picture.convert("RGB")
    rgba = np.asarray(picture)
    out = np.empty((*rgba.shape[:2], 3), np.uint8)
    for top in range(0, len(rgba), _ROWS):
        rows = slice(top, min(top + _ROWS, len(rgba)))
        board = chessboard(range(rows.start, rows.stop), rgba.shape[1], background)
        out[rows] = composite(rgba[rows], board[:, :, None])
    return Image.fromarray(out)


def composite(rgba: NDArray[np.uint8], background: NDArray[np.float32]) -> NDArray[np.uint8]:
    """alpha·rgb + (1 - alpha)·background in float32, truncated."""
    alpha = rgba[:, :, 3:].astype(np.float32) / np.float32(255)
    mixed = alpha * rgba[:, :, :3] + (np.float32(1) - alpha) * background
    return mixed.astype(np.uint8)


def chessboard(rows: range, width: int, board: Chessboard) -> NDArray[np.float32]:
    """Grey levels of those rows of the background, float32 [len(rows), width]."""
    odd = (np.array(rows)[:, None] // board.square + np.arange(width) // board.square) % 2
    first, second = (board.white, board.gray) if board.white_first else (board.gray, board.white)
    return np.where(odd == 0, np.float32(first), np.float32(second))
