"""Videos in, embeddings with timestamps out, one chunk at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from PIL import Image
from torch import Tensor

from moonvit.config import ClipRules
from moonvit.configs.kimi import kimi_clip
from moonvit.configs.qwen import QwenVideo, qwen_video
from moonvit.errors import MoonvitError
from moonvit.fields import Fields
from moonvit.pixels.base import PictureProcessor, Prepared
from moonvit.pixels.clips import (
    K25_CLIP,
    kimi_samples,
    qwen2_frame_size,
    qwen2_samples,
    qwen3_frame_size,
    qwen3_samples,
    timestamp_text,
)
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.qwen import QwenProcessor, plan_qwen
from moonvit.pixels.video import Video

if TYPE_CHECKING:
    from moonvit.encoder import Encoder


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


def video_chunks(
    encoder: "Encoder", video: Video, experimental: bool = False, max_tokens: int | None = None
) -> Iterator[VideoChunk]:
    """The chunks of a video in order; only one is held at a time. See `Encoder.encode_video`."""
    processor = encoder.processor
    rules = encoder.checkpoint.video_rules if encoder.checkpoint is not None else None
    if isinstance(processor, QwenProcessor):
        newest = encoder.family == "qwen3_vl"
        return _qwen_chunks(
            encoder, processor, qwen_video(rules, processor.config, newest), video, max_tokens
        )
    assert isinstance(processor, KimiProcessor)
    clip = _kimi_rules(encoder.family, processor, rules, experimental)
    return _kimi_chunks(encoder, processor, clip, video, max_tokens)


def _kimi_chunks(
    encoder: "Encoder", processor: KimiProcessor, rules: ClipRules, video: Video, max_tokens: int | None
) -> Iterator[VideoChunk]:
    numbers = kimi_samples(video.count, video.fps, rules.sample_fps)
    for taken, frames in _grouped(video, numbers, rules.frames):
        prepared = processor.clip(frames, rules, max_tokens)
        seconds = taken[0] / video.fps
        text = timestamp_text(seconds, rules.timestamp_mode)
        yield _chunk(encoder, processor, prepared, taken, seconds, text)


def _kimi_rules(family: str, processor: KimiProcessor, rules: Fields | None, experimental: bool) -> ClipRules:
    check_videos(family, experimental)
    if processor.config.clip is not None:
        return processor.config.clip
    return kimi_clip(rules) if rules is not None and family == "kimi_k25" else K25_CLIP


def check_videos(family: str, experimental: bool = False) -> None:
    """`MoonvitError` for a family that takes no videos; see `Encoder.encode_video`."""
    if family == "kimi_vl":
        raise MoonvitError("kimi_vl takes no videos", "encode frames as pictures")
    if family == "kimi_k3" and not experimental:
        raise MoonvitError(
            "kimi_k3: its own processor takes pictures only",
            "experimental=True (--experimental) cuts clips as K2.5 does",
        )


def _qwen_chunks(
    encoder: "Encoder", processor: QwenProcessor, rules: QwenVideo, video: Video, max_tokens: int | None
) -> Iterator[VideoChunk]:
    """Whole patches of frames; attention does not reach further, so each is its own chunk."""
    newest = encoder.family == "qwen3_vl"
    numbers = (qwen3_samples if newest else qwen2_samples)(video.count, video.fps, rules)
    cutter = QwenProcessor(rules.pixels, processor.limits)
    size: tuple[int, int] | None = None
    for taken, frames in _grouped(video, numbers, rules.pixels.temporal_patch_size):
        if size is None:
            sized = qwen3_frame_size if newest else qwen2_frame_size
            size = _within(sized(len(numbers), *frames[0].size, rules), frames[0].size, rules, max_tokens)
        seconds = (taken[0] + taken[-1]) / 2 / video.fps
        prepared = cutter.clip(frames, size)
        yield _chunk(encoder, cutter, prepared, taken, seconds, f"<{seconds:.1f} seconds>")


def _within(
    size: tuple[int, int], frame: tuple[int, int], rules: QwenVideo, max_tokens: int | None
) -> tuple[int, int]:
    """The size of a frame, or the largest that gives a chunk at most `max_tokens` tokens."""
    if max_tokens is None or size[0] * size[1] <= max_tokens * rules.pixels.cell**2:
        return size
    plan = plan_qwen(*frame, rules.pixels, max_tokens)
    return plan.new_width, plan.new_height


def _grouped(
    video: Video, numbers: Sequence[int], count: int
) -> Iterator[tuple[tuple[int, ...], list[Image.Image]]]:
    frames = video.frames(numbers)
    for start in range(0, len(numbers), count):
        taken = tuple(numbers[start : start + count])
        yield taken, list(islice(frames, len(taken)))


def _chunk(
    encoder: "Encoder",
    cutter: PictureProcessor,
    prepared: Prepared,
    taken: tuple[int, ...],
    seconds: float,
    text: str,
) -> VideoChunk:
    features = encoder.features(cutter.pack([prepared]))
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
