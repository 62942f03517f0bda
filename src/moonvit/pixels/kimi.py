"""The Kimi picture processors: resize, composite, pad, normalise, cut; bit-equal to the models' own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from moonvit.config import Chessboard, ClipRules, PixelConfig
from moonvit.errors import ImageError
from moonvit.ops.patchify import normalized, raster_patches
from moonvit.pixels.base import PictureProcessor, PixelBatch, Prepared, resized, strips
from moonvit.pixels.decode import Limits
from moonvit.pixels.plan import ImagePlan, plan_image, plan_kimi_vl

__all__ = [
    "KimiProcessor",
    "KimiVLProcessor",
    "PixelBatch",
    "Prepared",
    "chessboard",
    "composite",
    "opaque_picture",
]

_ROWS = 64  # rows composited at once, so that the float copies stay small


class KimiProcessor(PictureProcessor):
    """The processor of Kimi K3, K2.5 and K2.6."""

    config: PixelConfig

    def __init__(self, config: PixelConfig, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.config = config

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (3, self.config.patch_size, self.config.patch_size)

    def plan_size(self, width: int, height: int, max_tokens: int | None = None) -> ImagePlan:
        """See `plan_image`."""
        return plan_image(width, height, self.config, max_tokens)

    def opaque(self, picture: Image.Image, plan: ImagePlan) -> Image.Image:
        """See `opaque_picture`."""
        return opaque_picture(picture, plan, self.config)

    def clip(
        self, frames: Sequence[Image.Image], rules: ClipRules, max_tokens: int | None = None
    ) -> Prepared:
        """A chunk of at most `rules.frames` frames, all at the size that the first one gets."""
        limit = rules.frame_limit
        if rules.clip_limit is not None:
            limit = min(max(1, round(rules.clip_limit / len(frames))), limit)
        plan = plan_image(*frames[0].size, replace(self.config, in_patch_limit=limit), max_tokens)
        plan = replace(plan, grid=(len(frames), *plan.grid[1:]))
        return Prepared(tuple(self.opaque(frame, plan) for frame in frames), plan)

    def cut(self, prepared: Prepared, out: NDArray[np.float32]) -> None:
        """In raster order, frames of a clip one behind the other."""
        config, patch = self.config, self.config.patch_size
        t, h, w = prepared.plan.grid
        for frame, rows in zip(prepared.frames, out.reshape(t, h, w, 3, patch, patch), strict=True):
            for row, strip in zip(rows, strips(frame, patch, h, w * patch), strict=True):
                row[:] = raster_patches(normalized(strip, config.mean, config.std), patch)


class KimiVLProcessor(KimiProcessor):
    """The processor of Kimi-VL: no limit along a side but a refusal, RGB after resizing and padding."""

    def plan_size(self, width: int, height: int, max_tokens: int | None = None) -> ImagePlan:
        """Truncated sides under `in_token_limit`; `ImageError` where the grid has 512 patches or more."""
        plan = plan_kimi_vl(width, height, self.config)
        if max_tokens is not None and plan.tokens > max_tokens:
            plan = plan_image(width, height, self.config, max_tokens)
        _, h, w = plan.grid
        if max(h, w) > self.config.side_limit:
            raise ImageError(
                f"{width}x{height} makes {w}x{h} patches, the limit is {self.config.side_limit} a side",
                "give it smaller",
            )
        return plan

    def opaque(self, picture: Image.Image, plan: ImagePlan) -> Image.Image:
        """Resized and padded in the picture's own mode, then `convert("RGB")`."""
        picture = resized(picture, plan, Image.Resampling.BICUBIC)
        return ImageOps.expand(picture, (0, 0, plan.pad_width, plan.pad_height), 0).convert("RGB")


def opaque_picture(picture: Image.Image, plan: ImagePlan, config: PixelConfig) -> Image.Image:
    """The picture at its new size without transparency, of mode RGB.

    Resizing is Pillow's bicubic in the picture's own mode: nearest-neighbour for palette and one-bit
    pictures, premultiplied for those with alpha, a plain copy at the same size.
    """
    if config.fill_before_resize:
        picture = _fill(picture, config.background)
    picture = resized(picture, plan, Image.Resampling.BICUBIC)
    return picture if config.fill_before_resize else _fill(picture, config.background)


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
        out[rows] = composite(rgba[rows], board)
    return Image.fromarray(out)


def composite(rgba: NDArray[np.uint8], background: NDArray[np.float32]) -> NDArray[np.uint8]:
    """alpha·rgb + (1 - alpha)·background in float32, truncated; `background` is grey, [height, width]."""
    alpha = rgba[:, :, 3].astype(np.float32) / np.float32(255)
    behind = (np.float32(1) - alpha) * background
    out = np.empty((*alpha.shape, 3), np.uint8)
    for channel in range(3):
        out[:, :, channel] = alpha * rgba[:, :, channel] + behind
    return out


def chessboard(rows: range, width: int, board: Chessboard) -> NDArray[np.float32]:
    """Grey levels of those rows of the background, float32 [len(rows), width]."""
    odd = (np.array(rows)[:, None] // board.square + np.arange(width) // board.square) % 2
    first, second = (board.white, board.gray) if board.white_first else (board.gray, board.white)
    return np.where(odd == 0, np.float32(first), np.float32(second))
