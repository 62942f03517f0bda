"""The Qwen-VL picture processor; bit-equal to transformers' `Qwen2VLImageProcessorPil`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from moonvit.configs.qwen import QwenPixels
from moonvit.errors import ImageError
from moonvit.ops.patchify import block_patches
from moonvit.pixels.base import PictureProcessor, Prepared, resized, strips
from moonvit.pixels.decode import Limits
from moonvit.pixels.plan import ImagePlan

MAX_ASPECT = 200
"""Pictures longer than this many times their other side are refused, as by the reference."""


def smart_resize(width: int, height: int, config: QwenPixels) -> tuple[int, int]:
    """New (width, height): multiples of a cell nearest to the picture's, its pixels within the limits.

    `ImageError` for a picture beyond `MAX_ASPECT`.
    """
    check_aspect(width, height)
    cell = config.cell
    new_width, new_height = round(width / cell) * cell, round(height / cell) * cell
    if new_width * new_height > config.max_pixels:
        shrink = math.sqrt((height * width) / config.max_pixels)
        new_height = max(cell, math.floor(height / shrink / cell) * cell)
        new_width = max(cell, math.floor(width / shrink / cell) * cell)
    elif new_width * new_height < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        new_height = math.ceil(height * grow / cell) * cell
        new_width = math.ceil(width * grow / cell) * cell
    return new_width, new_height


def check_aspect(width: int, height: int) -> None:
    """`ImageError` for a picture beyond `MAX_ASPECT`."""
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ImageError(f"{width}x{height} is more than {MAX_ASPECT} times as long as wide", "crop it")


def plan_qwen(width: int, height: int, config: QwenPixels, max_tokens: int | None = None) -> ImagePlan:
    """The plan for a still; `max_tokens` lowers both limits until the tokens fit."""
    plan = _plan(width, height, config)
    if max_tokens is None or plan.tokens <= max_tokens:
        return plan
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    low, high = 1, min(config.max_pixels, max_tokens * config.cell**2)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _plan(width, height, _lowered(config, middle)).tokens <= max_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return _plan(width, height, _lowered(config, low))


def _lowered(config: QwenPixels, pixels: int) -> QwenPixels:
    return replace(config, min_pixels=1, max_pixels=pixels)


def _plan(width: int, height: int, config: QwenPixels) -> ImagePlan:
    new_width, new_height = smart_resize(width, height, config)
    h, w = new_height // config.patch_size, new_width // config.patch_size
    return ImagePlan(
        width=width,
        height=height,
        new_width=new_width,
        new_height=new_height,
        pad_width=0,
        pad_height=0,
        grid=(1, h, w),
        tokens=h * w // config.merge_size**2,
    )


def on_white(picture: Image.Image) -> Image.Image:
    """RGB, with white behind whatever is transparent, as the reference does since its fifth version."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


class QwenProcessor(PictureProcessor):
    """The processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    config: QwenPixels
    order = "block"

    def __init__(self, config: QwenPixels, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.config = config

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (3 * self.config.temporal_patch_size * self.config.patch_size**2,)

    def plan_size(self, width: int, height: int, max_tokens: int | None = None) -> ImagePlan:
        """See `plan_qwen`."""
        return plan_qwen(width, height, self.config, max_tokens)

    def opaque(self, picture: Image.Image, plan: ImagePlan) -> Image.Image:
        """On white, then resized with Pillow's filter of the checkpoint, bicubic as released."""
        return resized(on_white(picture), plan, Image.Resampling(self.config.resample))

    def clip(self, frames: Sequence[Image.Image], size: tuple[int, int]) -> Prepared:
        """Frames at `size` (width, height), a multiple of a cell; an odd rest repeats the last frame."""
        config = self.config
        width, height = frames[0].size
        h, w = size[1] // config.patch_size, size[0] // config.patch_size
        plan = ImagePlan(
            width=width,
            height=height,
            new_width=size[0],
            new_height=size[1],
            pad_width=0,
            pad_height=0,
            grid=(-(-len(frames) // config.temporal_patch_size), h, w),
            tokens=-(-len(frames) // config.temporal_patch_size) * h * w // config.merge_size**2,
        )
        return Prepared(tuple(self.opaque(frame, plan) for frame in frames), plan)

    def cut(self, prepared: Prepared, out: NDArray[np.float32]) -> None:
        """In merge-block order; the last frame, or a still, stands for those that lack of its patches."""
        config = self.config
        patch, size, temporal = config.patch_size, config.merge_size, config.temporal_patch_size
        t, h, w = prepared.plan.grid
        levels = self._levels()
        rows = out.reshape(t, h // size, w // size, size, size, 3, temporal, patch, patch)
        for number, frame in enumerate(prepared.frames):
            clip, among = divmod(number, temporal)
            until = temporal if number == len(prepared.frames) - 1 else among + 1
            for row, strip in zip(rows[clip], strips(frame, size * patch, h // size, w * patch), strict=True):
                values = np.stack([levels[c][strip[:, c]] for c in range(3)], axis=1)
                row[..., among:until, :, :] = block_patches(values, patch, size)[..., None, :, :]

    def _levels(self) -> NDArray[np.float32]:
        """What each of the 256 levels becomes, float32 [3, 256]; scaled in float64, then float32."""
        config = self.config
        scaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
        mean, std = (np.array(v, np.float32)[:, None] for v in (config.mean, config.std))
        levels: NDArray[np.float32] = (scaled - mean) / std
        return levels
