"""Videos from files, decoded with PyAV (the extra `video`), and from lists of frames."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from moonvit.errors import ImageError, MoonvitError
from moonvit.pixels.decode import Exif, Layout, Limits, describe, read_image

SUFFIXES = frozenset((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"))
"""File name endings taken for videos."""

_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class Video:
    """A video whose frames are read as they are asked for.

    Attributes:
        name: what to call it in errors.
        count: frames in all.
        fps: frames a second, on average.
        source: a path, or the frames.
    """

    name: str
    count: int
    fps: float
    source: Any
    limits: Limits
    exif: Exif
    layout: Layout | None = None

    def frames(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """Those frames, in rising order of their numbers; one that is asked for twice comes twice.

        A file is decoded once from its beginning, and only one frame is held. `ImageError` for a broken
        file and for one that ends before a wanted frame.
        """
        if not isinstance(self.source, Path):
            for number in numbers:
                yield read_image(self.source[number], limits=self.limits, exif=self.exif, layout=self.layout)
            return
        wanted = list(numbers)
        place = 0
        for number, frame in enumerate(_decoded(self.source, self.name)):
            if place == len(wanted):
                return
            if number == wanted[place]:
                picture = self._upright(frame)
                while place < len(wanted) and wanted[place] == number:
                    yield picture
                    place += 1
        if place < len(wanted):
            raise ImageError(f"{self.name}: ends before frame {wanted[place]} of the {self.count} announced")

    def _upright(self, frame: Any) -> Image.Image:
        picture: Image.Image = frame.to_image()
        turn = _TURNS.get(round(frame.rotation) % 360) if self.exif == "apply" else None
        return picture.transpose(turn) if turn is not None else picture


def open_video(
    source: Any,
    *,
    fps: float | None = None,
    limits: Limits | None = None,
    exif: Exif = "apply",
    layout: Layout | None = None,
) -> Video:
    """A video from a path, or from a list of frames (pictures of any kind) with their `fps`.

    `ImageError` for what is no video, is broken or over a limit.
    """
    limits = limits or Limits()
    if isinstance(source, str | os.PathLike):
        if fps is not None:
            raise ValueError("fps: a file knows its own; give fps with a list of frames")
        return _from_file(Path(source), limits, exif)
    frames = _listed(source)
    if not isinstance(fps, Real) or isinstance(fps, bool) or not 0 < fps < float("inf"):
        raise ValueError(f"fps is {fps!r}, expected the frames a second of the list")
    return Video(f"video of {len(frames)} frames", len(frames), float(fps), frames, limits, exif, layout)


def _listed(source: Any) -> list[Any]:
    """The frames of a list, an iterator or an array of four dimensions; `ImageError` for anything else."""
    shape = getattr(source, "shape", None)
    whole = isinstance(source, bytes | bytearray | memoryview | Image.Image) or hasattr(source, "read")
    if whole or not isinstance(source, Iterable) or (shape is not None and len(shape) != 4):
        raise ImageError(
            f"video: {describe(source)} is neither a path nor frames",
            "give the path of a file, a list of pictures, or an array [frames, …] of four dimensions",
        )
    frames = list(source)
    if not frames:
        raise ImageError("video: has no frames")
    return frames


def _from_file(path: Path, limits: Limits, exif: Exif) -> Video:
    name = describe(path)
    if not path.is_file():
        hint = "URLs are not fetched; download it first" if re.match(r"[a-z][a-z0-9+.-]*:/", name) else ""
        raise ImageError(f"{name}: {'not a regular file' if path.exists() else 'no such file'}", hint)
    if path.stat().st_size == 0:
        raise ImageError(f"{name}: empty")
    with _container(path, name) as (container, stream):
        if stream.width * stream.height > limits.max_pixels:
            raise ImageError(
                f"{name}: {stream.width}x{stream.height} is {stream.width * stream.height} pixels, "
                f"the limit is {limits.max_pixels}",
                "raise max_pixels to allow it",
            )
        count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
    if count < 1 or not rate:
        raise ImageError(f"{name}: has no frames, or no rate of frames")
    return Video(name, count, float(rate), path, limits, exif)


def _decoded(path: Path, name: str) -> Iterator[Any]:
    with _container(path, name) as (container, stream):
        yield from container.decode(stream)


@contextmanager
def _container(path: Path, name: str) -> Iterator[tuple[Any, Any]]:
    """The open file and its first video stream; what the decoder raises becomes one line naming the file."""
    av = _pyav()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ImageError(f"{name}: holds no video")
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ImageError(f"{name}: broken video: {reason}", _hint(path)) from error


def _hint(path: Path) -> str:
    """What to do about an animation that the decoder does not know, such as WebP's."""
    try:
        with Image.open(path) as picture:
            animated = getattr(picture, "n_frames", 1) > 1
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    return "read it with Pillow and give its frames as a list, with fps" if animated else ""


def _pyav() -> ModuleType:
    try:
        import av
        import av.error
    except ImportError as error:
        raise MoonvitError(
            "videos need PyAV, which is not installed", "pip install 'moonvit[video]'"
        ) from error
    module: ModuleType = av
    return module
