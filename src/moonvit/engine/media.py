"""Pictures and videos on their way into a conversation: opened, counted, and encoded once."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from moonvit.clips import video_chunks
from moonvit.configs.qwen import QwenConfig
from moonvit.encoder import Encoder
from moonvit.errors import PromptError
from moonvit.ops.grid import Grid
from moonvit.pixels.base import Prepared
from moonvit.pixels.decode import Exif
from moonvit.pixels.video import open_video
from moonvit.prompt import Chunk, Image, Video
from moonvit.prompt.embeds import is_video
from moonvit.schedule import grouped

CACHE_BYTES = 512 * 2**20
"""Embeddings that a generator keeps for pictures that come again."""


@dataclass(frozen=True)
class Clip:
    """Frames in place of a video's file: pictures of any kind, and how many there are in a second."""

    frames: Sequence[Any]
    fps: float


@dataclass(frozen=True)
class Look:
    """How pictures are read: `exif` turns them upright, `max_tokens` lowers the budget of each picture."""

    max_tokens: int | None = None
    exif: Exif = "apply"


@dataclass(frozen=True)
class Media:
    """A picture or video with all that a text model needs of it; may be used in any number of turns.

    Attributes:
        part: what the prompt's builder takes.
        embeddings: [tokens, width] for each slot: one for a picture, one for each chunk of a video.
        deepstack: for each of Qwen3-VL's listed layers, such tensors; else empty.
        grids: (t, h, w) in patches, one a slot.
        interval: seconds from one chunk of a video to the next, as Qwen2.5-VL counts them; 0 for a picture.
        key: equal for media with equal embeddings.
        name: for reports.
        family: of the tower.
    """

    part: Image | Video
    embeddings: tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...]
    grids: tuple[Grid, ...]
    interval: float
    key: str
    name: str
    family: str = ""

    @property
    def tokens(self) -> int:
        """Rows in all slots together."""
        return sum(len(rows) for rows in self.embeddings)

    def check(self, family: str, width: int) -> None:
        """`PromptError` unless they are embeddings of that family and of that width."""
        if self.family != family:
            raise PromptError(f"{self.name}: encoded by the tower of {self.family}, not of {family}")
        rows = [*self.embeddings, *(rows for layer in self.deepstack for rows in layer)]
        wrong = [tensor.shape[1] for tensor in rows if tensor.shape[1] != width]
        if wrong:
            raise PromptError(f"{self.name}: embeddings of {wrong[0]}, but the text model's width is {width}")

    @property
    def nbytes(self) -> int:
        tensors = [*self.embeddings, *(rows for layer in self.deepstack for rows in layer)]
        return sum(rows.nbytes for rows in tensors)


@dataclass(frozen=True)
class Opened:
    """A picture that has been read and resized, but not yet encoded."""

    prepared: Prepared
    key: str

    @property
    def part(self) -> Image:
        plan = self.prepared.plan
        return Image((plan.width, plan.height), plan.tokens)


@dataclass
class Eyes:
    """An encoder with a memory for pictures, bounded by `limit` bytes of embeddings."""

    encoder: Encoder
    limit: int = CACHE_BYTES
    kept: OrderedDict[str, Media] = field(default_factory=OrderedDict)
    encoded: int = 0
    """Pictures and videos that the tower has been run for."""

    def open(self, source: Any, look: Look) -> Opened | Media:
        """A picture, read; a video, encoded, as its tokens are only known then.

        `ImageError` for what cannot be read, `MoonvitError` for a video where the family takes none.
        """
        if isinstance(source, Media):
            return source
        if isinstance(source, Clip) or _names_video(source):
            return self._video(source, look)
        prepared = self.encoder.processor.prepare(source, max_tokens=look.max_tokens, exif=look.exif)
        return Opened(prepared, _picture_key(prepared))

    def see(self, opened: Sequence[Opened | Media]) -> list[Media]:
        """All of them encoded, each distinct picture once."""
        fresh = {item.key: item for item in opened if isinstance(item, Opened) and item.key not in self.kept}
        found = {item.key: self.kept[item.key] for item in opened if item.key in self.kept}
        names = iter(fresh)
        for group in grouped((item.prepared for item in fresh.values()), 16):
            features = self.encoder.features(self.encoder.processor.pack(group))
            for place, prepared in enumerate(group):
                key = next(names)
                found[key] = Media(
                    part=fresh[key].part,
                    embeddings=(alone(features.embeddings[place]),),
                    deepstack=tuple((alone(rows[place]),) for rows in features.deepstack),
                    grids=(prepared.plan.grid,),
                    interval=0.0,
                    key=key,
                    name=prepared.name,
                    family=self.encoder.family,
                )
                self.encoded += 1
        for item in opened:
            if item.key in found:
                self._keep(found[item.key])
        return [item if isinstance(item, Media) else _named(found[item.key], item) for item in opened]

    def _video(self, source: Any, look: Look) -> Media:
        key = _file_key(source, look)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        frames, fps = (source.frames, source.fps) if isinstance(source, Clip) else (source, None)
        video = open_video(frames, fps=fps, limits=self.encoder.processor.limits, exif=look.exif)
        chunks = list(video_chunks(self.encoder, video, max_tokens=look.max_tokens))
        sampled_fps = sum(len(chunk.frames) for chunk in chunks) / video.count * video.fps
        media = Media(
            part=Video(tuple(Chunk(chunk.timestamp, len(chunk.embeddings)) for chunk in chunks)),
            embeddings=tuple(alone(chunk.embeddings) for chunk in chunks),
            deepstack=tuple(zip(*(map(alone, chunk.deepstack) for chunk in chunks), strict=True)),
            grids=tuple(chunk.grid for chunk in chunks),
            interval=_frames_of_a_patch(self.encoder) / sampled_fps,
            key=key,
            name=video.name,
            family=self.encoder.family,
        )
        self.encoded += 1
        self._keep(media)
        return media

    def _keep(self, media: Media) -> None:
        """Remember it, and forget the longest unused beyond the limit."""
        self.kept[media.key] = media
        self.kept.move_to_end(media.key)
        total = sum(item.nbytes for item in self.kept.values())
        while total > self.limit and self.kept:
            total -= self.kept.popitem(last=False)[1].nbytes


def as_list(media: Any) -> list[Any]:
    """One picture or several as a list."""
    return list(media) if isinstance(media, list | tuple) else [media]


def _named(media: Media, opened: Opened) -> Media:
    """The picture under the name, and for the prompt of the size, with which it came this time."""
    if media.name == opened.prepared.name and media.part == opened.part:
        return media
    return replace(media, name=opened.prepared.name, part=opened.part)


def alone(rows: Tensor) -> Tensor:
    """The rows without the rest of a batch, which a view of them would keep in memory."""
    return rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()


def _names_video(source: Any) -> bool:
    return isinstance(source, str | os.PathLike) and is_video(str(os.fspath(source)))


def _frames_of_a_patch(encoder: Encoder) -> int:
    return encoder.config.temporal_patch_size if isinstance(encoder.config, QwenConfig) else 1


def _picture_key(prepared: Prepared) -> str:
    digest = hashlib.sha256(repr(prepared.plan.grid).encode())
    for frame in prepared.frames:
        digest.update(repr(frame.size).encode())
        digest.update(frame.tobytes())
    return f"picture {digest.hexdigest()}"


def _file_key(source: Any, look: Look) -> str:
    """A file's is its place, size and time; frames in memory are not recognised when they come again."""
    if isinstance(source, Clip):
        return f"frames {uuid4()}"
    try:
        status = Path(source).stat()
    except OSError:  # said when it is opened
        return f"missing {uuid4()}"
    return f"video {Path(source).resolve()} {status.st_size} {status.st_mtime_ns} {look}"
