"""Which frames of a video are taken, how they are grouped, and what their timestamps read.

Sources: Kimi K2.5's own processor; transformers' `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from moonvit.config import ClipRules
from moonvit.configs.qwen import QwenPixels, QwenVideo
from moonvit.pixels.qwen import check_aspect, smart_resize

K25_CLIP = ClipRules(
    frame_limit=4096, clip_limit=None, sample_fps=2.0, frames=4, timestamp_mode="hh:mm:ss.fff"
)
"""K2.5's released rules."""


def kimi_samples(count: int, fps: float, sample_fps: float) -> list[int]:
    """Numbers of the frames taken of `count` at `fps`: evenly spread, first and last among them."""
    taken = max(round(count * min(sample_fps, fps) / fps), 1)
    return [int(n) for n in np.linspace(0, count - 1, taken).round()]


def qwen2_samples(count: int, fps: float, rules: QwenVideo) -> list[int]:
    """Qwen2-VL's and 2.5's: whole patches of frames, `min_frames` at least where there are so many.

    A video shorter than one patch is taken whole, which the reference cannot do.
    """
    temporal = rules.pixels.temporal_patch_size
    most = min(rules.max_frames, count) // temporal * temporal
    taken = min(max(count / fps * rules.fps, rules.min_frames), most, count)
    taken = math.floor(taken / temporal) * temporal
    if taken == 0:
        return list(range(count))
    numbers = torch.arange(0, count, count / taken, device="cpu").int()  # rounds as the reference does
    return [min(int(n), count - 1) for n in numbers]


def qwen3_samples(count: int, fps: float, rules: QwenVideo) -> list[int]:
    """Qwen3-VL's: evenly spread, `min_frames` at least where there are so many, `max_frames` at most."""
    taken = min(max(int(count / fps * rules.fps), rules.min_frames), rules.max_frames, count)
    return [int(n) for n in np.linspace(0, count - 1, taken).round()]


def timestamp_text(seconds: float, mode: str) -> str:
    """The time as K2.5's prompts write it: milliseconds cut off, not rounded, and a clock of 24 hours."""
    whole = int(seconds)
    milliseconds = int(seconds % 1 * 1000)
    hours, minutes, rest = whole // 3600 % 24, whole // 60 % 60, whole % 60
    if mode == "hh:mm:ss.fff":
        return f"{hours:02}:{minutes:02}:{rest:02}.{milliseconds:03}"
    if mode == "mm:ss.fff":
        return f"{minutes:02}:{rest:02}.{milliseconds:03}"
    return f"{minutes:02}:{rest:02}"


def smart_resize_clip(frames: int, width: int, height: int, config: QwenPixels) -> tuple[int, int]:
    """Qwen3-VL's new (width, height) of a video's frames: the limits bound the pixels of all together."""
    cell, temporal = config.cell, config.temporal_patch_size
    if min(width, height) < cell:
        scale = max(cell / width, cell / height)
        width, height = int(width * scale), int(height * scale)
    check_aspect(width, height)
    new_width, new_height = round(width / cell) * cell, round(height / cell) * cell
    whole = round(max(frames, temporal) / temporal) * temporal
    if whole * new_width * new_height > config.max_pixels:
        shrink = math.sqrt(frames * height * width / config.max_pixels)
        new_height = max(cell, math.floor(height / shrink / cell) * cell)
        new_width = max(cell, math.floor(width / shrink / cell) * cell)
    elif whole * new_width * new_height < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (frames * height * width))
        new_height = math.ceil(height * grow / cell) * cell
        new_width = math.ceil(width * grow / cell) * cell
    return new_width, new_height


def qwen2_frame_size(frames: int, width: int, height: int, rules: QwenVideo) -> tuple[int, int]:
    """Qwen2-VL's and 2.5's new (width, height) of a frame; `frames` are all that are taken."""
    pixels = rules.pixels
    if rules.frame_tokens is not None:
        share = int(rules.frame_tokens * pixels.cell**2 * 0.9) * pixels.temporal_patch_size // frames
        pixels = _capped(pixels, min(pixels.max_pixels, share))
    return smart_resize(width, height, pixels)


def qwen3_frame_size(frames: int, width: int, height: int, rules: QwenVideo) -> tuple[int, int]:
    """Qwen3-VL's new (width, height) of a frame; `frames` are all that are taken."""
    pixels = rules.pixels
    if rules.frame_tokens is not None:
        share = min(rules.frame_tokens * pixels.cell**2, pixels.max_pixels // frames)
        capped = _capped(pixels, share)
        pixels = replace(capped, max_pixels=capped.max_pixels * frames)
    return smart_resize_clip(frames, width, height, pixels)


def _capped(pixels: QwenPixels, most: int) -> QwenPixels:
    """At most so many pixels, but never below 1.05 times the least."""
    return replace(pixels, max_pixels=max(most, int(pixels.min_pixels * 1.05)))
