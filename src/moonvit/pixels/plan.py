"""Sizes and token counts; whole numbers only, no picture is touched."""

import math
from dataclasses import dataclass, replace

from moonvit.config import PatchRules, PixelConfig
from moonvit.ops.grid import Grid


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What becomes of a width×height picture: resized to new_width×new_height, padded to `grid`."""

    width: int
    height: int
    new_width: int
    new_height: int
    pad_width: int
    pad_height: int
    grid: Grid
    tokens: int

    @property
    def patches(self) -> int:
        return math.prod(self.grid)


def plan_image(width: int, height: int, config: PixelConfig, max_tokens: int | None = None) -> ImagePlan:
    """The plan for a picture of that size in pixels.

    Never enlarges. Sides are truncated, then padded to whole cells, so that the patches may come out
    above `in_patch_limit`. `max_tokens` lowers the limits until the tokens fit; it never raises them.
    """
    if width < 1 or height < 1:
        raise ValueError(f"expected a picture of at least 1x1 pixels, found {width}x{height}")
    plan = _plan(width, height, config)
    if max_tokens is None or plan.tokens <= max_tokens:
        return plan
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    return _fitting_plan(width, height, config, max_tokens)


def _plan(width: int, height: int, config: PixelConfig) -> ImagePlan:
    patch = config.patch_size
    longest = config.side_limit * patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(config.in_patch_limit / patches), longest / width, longest / height)
    new_width = min(max(1, int(width * scale)), longest)
    new_height = min(max(1, int(height * scale)), longest)
    return padded_plan(width, height, new_width, new_height, config)


def padded_plan(width: int, height: int, new_width: int, new_height: int, config: PatchRules) -> ImagePlan:
    """The plan of a resize to those sides and padding to whole cells."""
    patch, cell = config.patch_size, config.cell
    pad_width, pad_height = -new_width % cell, -new_height % cell
    h, w = (new_height + pad_height) // patch, (new_width + pad_width) // patch
    return ImagePlan(
        width=width,
        height=height,
        new_width=new_width,
        new_height=new_height,
        pad_width=pad_width,
        pad_height=pad_height,
        grid=(1, h, w),
        tokens=h * w // config.merge_size**2,
    )


def plan_kimi_vl(width: int, height: int, config: PixelConfig) -> ImagePlan:
    """Kimi-VL's plan: scaled down where whole patches exceed the budget; sides are not limited."""
    patches = (width // config.patch_size) * (height // config.patch_size)
    scale = math.sqrt(config.in_patch_limit / patches) if patches > config.in_patch_limit else 1.0
    return padded_plan(width, height, max(1, int(width * scale)), max(1, int(height * scale)), config)


def _fitting_plan(width: int, height: int, config: PixelConfig, max_tokens: int) -> ImagePlan:
    """The largest plan of at most max_tokens tokens; tokens never fall as the limit rises.

    With one patch in all and max_tokens cells along a side, every picture fits.
    """
    cell_patches = config.merge_size**2
    config = replace(config, side_limit=min(config.side_limit, max_tokens * config.merge_size))
    low, high = 1, min(config.in_patch_limit, max_tokens * cell_patches)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _plan(width, height, replace(config, in_patch_limit=middle)).tokens <= max_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return _plan(width, height, replace(config, in_patch_limit=low))
