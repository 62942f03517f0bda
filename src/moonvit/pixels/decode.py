"""Pictures from paths, bytes, data URLs, PIL images and arrays, with limits set before decoding."""

import base64
import binascii
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from moonvit.errors import ImageError

Exif = Literal["apply", "ignore"]
Layout = Literal["HWC", "CHW"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA")
"""What is read, if Pillow was built with it. Formats that run other programs (EPS) are not."""

SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("png", "apng", "jpg", "jpeg", "jpe", "jfif", "mpo", "webp", "gif", "bmp", "dib", "tif", "tiff"),
        *("avif", "jp2", "j2k", "jpx", "ppm", "pgm", "pbm", "pnm", "ico", "tga"),
    )
)
"""File name endings taken for pictures when a directory is given."""

_EXIF_LIMIT = 2**20
_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ARRAY_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds checked before a picture is decoded: pixels of its header, bytes of its file."""

    max_pixels: int = 89_478_485
    max_bytes: int = 64 * 2**20


def read_image(
    source: Any, *, limits: Limits, exif: Exif = "apply", layout: Layout | None = None
) -> Image.Image:
    """The decoded picture, first frame of an animation.

    Args:
        source: a path, bytes, an open binary file, a `data:` URL, a PIL image, or a numpy or torch
            array: uint8 (0..255) or floating (0..1).
        limits: checked before decoding.
        exif: "apply" turns the picture upright, "ignore" leaves it as stored.
        layout: of a three-dimensional array, "HWC" or "CHW"; never guessed.

    `ImageError` says in one line what is wrong.
    """
    with _opened(source, limits, layout, whole=True) as (image, name):
        with _naming(name):
            image.load()  # before anything else can decode it and swallow what is wrong
        turn = _turn(image, exif)
        with _naming(name):
            return image.transpose(turn) if turn is not None else image


def image_size(
    source: Any, *, limits: Limits, exif: Exif = "apply", layout: Layout | None = None
) -> tuple[int, int]:
    """(width, height) as `read_image` would give it, from the header alone."""
    with _opened(source, limits, layout, whole=False) as (image, _):
        width, height = image.size
        turn = _turn(image, exif)
        return (height, width) if turn in _SWAPPING else (width, height)


_SWAPPING = {_TURNS[n] for n in (5, 6, 7, 8)}


def describe(source: Any) -> str:
    """A short name of a source for errors and metadata; never the picture's bytes."""
    if isinstance(source, str) and _is_data_url(source):
        return f"data URL of {len(source)} characters"
    if isinstance(source, str | os.PathLike):
        return str(os.fspath(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{len(source)} bytes"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or f"PIL image {source.width}x{source.height}")
    shape = getattr(source, "shape", None)
    return f"array of shape {list(shape)}" if shape is not None else type(source).__name__


@cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def _opened(
    source: Any, limits: Limits, layout: Layout | None, *, whole: bool
) -> Iterator[tuple[Image.Image, str]]:
    """An image whose header is read and within the limits, and what to call it.

    With `whole`, its checksums are checked too.
    """
    name = describe(source)
    if isinstance(source, Image.Image):
        _check_size(source, name, limits)
        yield source, name
    elif isinstance(source, str | os.PathLike) and not (isinstance(source, str) and _is_data_url(source)):
        with _open_path(Path(source), name, limits) as file:
            yield _open_file(file, name, limits, whole), name
    elif isinstance(source, str | bytes | bytearray | memoryview):
        data = _data_url_bytes(source, name, limits) if isinstance(source, str) else bytes(source)
        _check_bytes(len(data), name, limits)
        yield _open_file(BytesIO(data), name, limits, whole), name
    elif hasattr(source, "read"):
        yield _open_file(BytesIO(_read_all(source, name, limits)), name, limits, whole), name
    else:
        yield _from_array(source, name, layout, limits), name


def _open_path(path: Path, name: str, limits: Limits) -> BinaryIO:
    if not name:
        raise ImageError("a picture's name is empty")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", name):
        raise ImageError(f"{name}: URLs are not fetched", "download it first and give the path or the bytes")
    try:
        if path.is_dir():
            hint = "give the pictures in it; commands find those that end in .jpg, .png and the like"
            raise ImageError(f"{name}: is a directory", hint)
        if not path.is_file():
            raise ImageError(f"{name}: {'not a regular file' if path.exists() else 'no such file'}")
        _check_bytes(path.stat().st_size, name, limits)
        return path.open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{name[:200]}: cannot be read: {reason}") from error


def _read_all(file: Any, name: str, limits: Limits) -> bytes:
    """The rest of an open binary file, no more than the limit and a byte."""
    data = file.read(limits.max_bytes + 1)
    if not isinstance(data, bytes):
        raise ImageError(f"{name}: opened as text", "open it in binary mode")
    _check_bytes(len(data), name, limits)
    return data


def _open_file(file: BinaryIO, name: str, limits: Limits, whole: bool) -> Image.Image:
    with _naming(name):
        image = Image.open(file, formats=known_formats())
        _check_size(image, name, limits)
        if whole and image.format == "PNG":
            file.seek(0)
            _check_png(file)
            image = Image.open(file, formats=("PNG",))
    return image


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Whatever the decoder raises for a broken file becomes one line that names it."""
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: not a picture in a known format", f"known: {', '.join(known_formats())}"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{name}: too many pixels for Pillow's own limit, PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except Exception as error:  # Pillow's decoders raise nearly every type for hostile files
        detail = re.sub(r"<[^>]*0x[0-9a-f]+>", "the file", str(error)).strip() or type(error).__name__
        raise ImageError(f"{name}: broken picture: {detail}") from error


def _check_bytes(count: int, name: str, limits: Limits) -> None:
    if count == 0:
        raise ImageError(f"{name}: empty")
    if count > limits.max_bytes:
        raise ImageError(
            f"{name}: {count} bytes, the limit is {limits.max_bytes}", "raise max_bytes to allow it"
        )


def _check_size(image: Image.Image, name: str, limits: Limits) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name}: has no pixels ({width}x{height})")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{name}: {width}x{height} is {width * height} pixels, the limit is {limits.max_pixels}",
            "raise max_pixels to allow it",
        )


def _check_png(file: BinaryIO) -> None:
    """Raise for wrong checksums, which Pillow's decoder passes over; the file is left at its start."""
    # A file cut behind its last pixel is whole enough: what lacks pixels fails when decoded.
    with suppress(OSError):
        Image.open(file, formats=("PNG",)).verify()
    file.seek(0)


def _turn(image: Image.Image, exif: Exif) -> Image.Transpose | None:
    if exif not in ("apply", "ignore"):
        raise ValueError(f"exif is {exif!r}, expected 'apply' or 'ignore'")
    if exif == "ignore" or image.format == "TIFF":  # Pillow turns TIFF itself, as it loads
        return None
    try:
        tags = _png_exif(image) if image.format == "PNG" else image.getexif()
        orientation = tags.get(_ORIENTATION_TAG)
    except Exception:  # an unreadable tag block turns nothing, as in browsers
        return None
    return _TURNS.get(orientation) if isinstance(orientation, int) else None


def _png_exif(image: Image.Image) -> Image.Exif:
    """The tags of a PNG, which may stand behind its pixels, without decoding these as Pillow would."""
    file = getattr(image, "fp", None)
    if "exif" in image.info or file is None:
        return image.getexif()
    tags = Image.Exif()
    place = file.tell()
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length = int.from_bytes(head[:4], "big")
        if head[4:] == b"eXIf":
            tags.load(b"Exif\0\0" + file.read(min(length, _EXIF_LIMIT)))
            break
        file.seek(length + 4, os.SEEK_CUR)
    file.seek(place)
    return tags


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def _data_url_bytes(url: str, name: str, limits: Limits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ImageError(f"{name}: no comma behind its header")
    if not head.lower().endswith(";base64"):
        raise ImageError(f"{name}: only base64 data URLs are read")
    if len(body) * 3 // 4 > limits.max_bytes + 4:
        raise ImageError(f"{name}: more than {limits.max_bytes} bytes", "raise max_bytes to allow it")
    try:
        return base64.b64decode(body.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ImageError(f"{name}: not valid base64") from error


def _from_array(source: Any, name: str, layout: Layout | None, limits: Limits) -> Image.Image:
    if hasattr(source, "is_floating_point"):  # a torch tensor
        source = source.detach().cpu()
        source = source.float().numpy() if source.is_floating_point() else source.numpy()
    if not isinstance(source, np.ndarray):
        raise ImageError(
            f"{name}: not a picture", "give a path, bytes, an open file, a data URL, a PIL image or an array"
        )
    pixels = _channels_last(source, name, layout)
    if pixels.shape[2] not in _ARRAY_MODES:
        raise ImageError(f"{name}: {pixels.shape[2]} channels with layout {layout!r}, expected 1, 2, 3 or 4")
    height, width, channels = pixels.shape
    if height * width == 0:
        raise ImageError(f"{name}: has no pixels ({width}x{height})")
    if height * width > limits.max_pixels:
        raise ImageError(f"{name}: {height * width} pixels, the limit is {limits.max_pixels}")
    eight_bit = np.ascontiguousarray(_eight_bit(pixels, name))
    mode = _ARRAY_MODES[channels]
    return Image.frombytes(mode, (width, height), eight_bit.tobytes())


def _channels_last(array: np.ndarray, name: str, layout: Layout | None) -> np.ndarray:
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        raise ImageError(f"{name}: expected 2 or 3 dimensions", "give several pictures as a list")
    if layout == "HWC":
        return array
    if layout == "CHW":
        return array.transpose(1, 2, 0)
    raise ImageError(f"{name}: layout is {layout!r}", "say layout='HWC' or layout='CHW' for an array")


def _eight_bit(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise ImageError(f"{name}: type {array.dtype}, expected uint8 (0..255) or floating (0..1)")
    if not np.isfinite(array).all():
        raise ImageError(f"{name}: holds NaN or infinity")
    low, high = array.min(), array.max()
    if low < 0 or high > 1:
        raise ImageError(f"{name}: floating values from {low:g} to {high:g}, expected 0 to 1")
    scaled: np.ndarray = np.rint(array.astype(np.float32) * np.float32(255)).astype(np.uint8)
    return scaled
