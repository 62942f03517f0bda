"""Videos in, embeddings with timestamps out, one chunk at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from moonvit.config import ClipRules
from moonvit.configs.qwen import QwenPixels, video_limits
from moonvit.errors import MoonvitError
from moonvit.fields import read_json
from moonvit.pixels.base import Prepared
from moonvit.pixels.clips import (
    K25_CLIP,
    kimi_samples,
    qwen2_samples,
    qwen3_samples,
    smart_resize_clip,
    timestamp_text,
)
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.qwen import QwenProcessor, smart_resize
from moonvit.pixels.video import Video

if TYPE_CHECKING:
    from moonvit.encoder import Encoder

QWEN_FPS = 2.0


@dataclass(frozen=True)
class VideoChunk:
    """What a prompt needs of one chunk of a video.

    Attributes:
        embeddings: [tokens, text_hidden_size]; the frames of a Kimi chunk share their tokens.
        deepstack: for each of Qwen3-VL's listed layers, such rows; else empty.
        seconds: when the chunk begins (Kimi) or the middle of its frames (Qwen).
        timestamp: the same as the family's prompts write it.
        frames: numbers of its frames in the video.
        grid: (t, h, w) in patches.
        size: (width, height) of the first frame in pixels, upright.
    """

    embeddings: Tensor
    deepstack: list[Tensor]
    seconds: float
    timestamp: str
    frames: tuple[int, ...]
    grid: tuple[int, int, int]
    size: tuple[int, int]

    @property
    def prompt(self) -> str:
        """K2.5's prompt of the chunk, with one pad; Qwen's prompts differ and are left to its template."""
        return f"{self.timestamp}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"


def video_chunks(encoder: "Encoder", video: Video, experimental: bool = False) -> Iterator[VideoChunk]:
    """The chunks of a video in order; only one is held at a time. See `Encoder.encode_video`."""
    processor = encoder.processor
    if isinstance(processor, QwenProcessor):
        return _qwen_chunks(encoder, processor, _video_rules(encoder, processor), video)
    assert isinstance(processor, KimiProcessor)
    return _kimi_chunks(encoder, processor, _kimi_rules(encoder.family, processor, experimental), video)


def _kimi_chunks(
    encoder: "Encoder", processor: KimiProcessor, rules: ClipRules, video: Video
) -> Iterator[VideoChunk]:
    numbers = kimi_samples(video.count, video.fps, rules.sample_fps)
    for taken, frames in _grouped(video, numbers, rules.frames):
        prepared = processor.clip(frames, rules)
        seconds = taken[0] / video.fps
        yield _chunk(encoder, prepared, taken, seconds, timestamp_text(seconds, rules.timestamp_mode))


def _kimi_rules(family: str, processor: KimiProcessor, experimental: bool) -> ClipRules:
    check_videos(family, experimental)
    return processor.config.clip or K25_CLIP


def check_videos(family: str, experimental: bool = False) -> None:
    """`MoonvitError` for a family that takes no videos; see `Encoder.encode_video`."""
    if family == "kimi_vl":
        raise MoonvitError("kimi_vl takes no videos", "encode frames as pictures")
    if family == "kimi_k3" and not experimental:
        raise MoonvitError(
            "kimi_k3: its own processor takes pictures only",
            "experimental=True (--experimental) cuts clips as K2.5 does",
        )


def _video_rules(encoder: "Encoder", processor: QwenProcessor) -> QwenPixels:
    """Limits of videos: the checkpoint's `video_preprocessor_config.json`, else transformers' own."""
    cell = processor.config.cell**2
    low, high = 128 * cell, 768 * cell
    if encoder.checkpoint is not None:
        path = encoder.checkpoint.directory / "video_preprocessor_config.json"
        if path.is_file():
            low, high = video_limits(read_json(path), str(path))
    return replace(processor.config, min_pixels=low, max_pixels=high)


def _qwen_chunks(
    encoder: "Encoder", processor: QwenProcessor, rules: QwenPixels, video: Video
) -> Iterator[VideoChunk]:
    """Whole patches of frames; attention does not reach further, so each is its own chunk."""
    temporal = processor.config.temporal_patch_size
    newest = encoder.family == "qwen3_vl"
    if newest:
        numbers = qwen3_samples(video.count, video.fps, QWEN_FPS)
    else:
        numbers = qwen2_samples(video.count, video.fps, QWEN_FPS, temporal)
    size: tuple[int, int] | None = None
    for taken, frames in _grouped(video, numbers, temporal):
        if size is None and newest:
            size = smart_resize_clip(len(numbers), *frames[0].size, rules)
        elif size is None:
            size = smart_resize(*frames[0].size, rules)
        seconds = (taken[0] + taken[-1]) / 2 / video.fps
        yield _chunk(encoder, processor.clip(frames, size), taken, seconds, f"<{seconds:.1f} seconds>")


def _grouped(
    video: Video, numbers: Sequence[int], count: int
) -> Iterator[tuple[tuple[int, ...], list[Image.Image]]]:
    frames = video.frames(numbers)
    for start in range(0, len(numbers), count):
        taken = tuple(numbers[start : start + count])
        yield taken, list(islice(frames, len(taken)))


def _chunk(
    encoder: "Encoder", prepared: Prepared, taken: tuple[int, ...], seconds: float, text: str
) -> VideoChunk:
    features = encoder.features(encoder.processor.pack([prepared]))
    plan = prepared.plan
    return VideoChunk(
        embeddings=features.embeddings[0],
        deepstack=[rows[0] for rows in features.deepstack],
        seconds=seconds,
        timestamp=text,
        frames=taken,
        grid=plan.grid,
        size=(plan.width, plan.height),
    )
