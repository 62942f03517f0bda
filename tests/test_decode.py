"""Files as people have them: orientations, broken ones, limits, data URLs."""

import base64
import io
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conftest import IMAGES, pixel_config
from moonvit.errors import ImageError
from moonvit.pixels.decode import Limits, image_size, read_image
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.plan import plan_image

LIMITS = Limits()
FULL = KimiProcessor(pixel_config())
UPRIGHT = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 90, 3), dtype=np.uint8))
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(data).decode()}"


def oriented(orientation: int) -> bytes:
    """The upright picture stored turned, with the tag that undoes it."""
    turn = STORED_AS[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(UPRIGHT.transpose(turn) if turn is not None else UPRIGHT, exif=exif)


@pytest.mark.parametrize("orientation", STORED_AS)
def test_orientations_on_every_way_in(orientation, tmp_path):
    data = oriented(orientation)
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    expected = FULL(UPRIGHT)
    for source in (path, str(path), data, bytearray(data), data_url(data), Image.open(io.BytesIO(data))):
        found = FULL(source)
        assert torch.equal(found.pixel_values, expected.pixel_values)
        assert found.sizes == [(90, 40)]
        assert FULL.plan(source).tokens == len(expected.pixel_values) // 4
    stored = FULL(data, exif="ignore")
    assert stored.sizes == [(40, 90) if orientation >= 5 else (90, 40)]
    assert torch.equal(stored.pixel_values, expected.pixel_values) == (orientation == 1)


def test_unknown_exif_mode():
    with pytest.raises(ValueError, match="'apply' or 'ignore'"):
        FULL(UPRIGHT, exif="maybe")


@pytest.mark.parametrize("kind", ["TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", STORED_AS)
def test_orientations_of_other_formats(kind, orientation):
    """Upright once, not twice; Pillow turns TIFF itself, so there is no other way to have it."""
    turn = STORED_AS[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth = UPRIGHT.resize((9, 4)).resize((90, 40), Image.Resampling.BILINEAR)
    stored = smooth.transpose(turn) if turn is not None else smooth
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 98, "subsampling": 0}}.get(kind, {})
    data = saved(stored, kind, exif=exif, **options)
    found = np.asarray(read_image(data, limits=LIMITS).convert("RGB")).astype(int)
    assert image_size(data, limits=LIMITS) == (90, 40)
    assert np.abs(found - np.asarray(smooth)).max() <= (12 if kind == "JPEG" else 0)
    size = image_size(data, limits=LIMITS, exif="ignore")
    assert size == ((40, 90) if orientation >= 5 and kind != "TIFF" else (90, 40))
    assert read_image(data, limits=LIMITS, exif="ignore").size == size


def test_orientation_behind_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = saved(UPRIGHT.transpose(STORED_AS[6]))
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = len(body).to_bytes(4, "big") + b"eXIf" + body + zlib.crc32(b"eXIf" + body).to_bytes(4, "big")
    end = plain.rindex(b"IEND") - 4
    data = plain[:end] + chunk + plain[end:]
    assert torch.equal(FULL(data).pixel_values, FULL(UPRIGHT).pixel_values)
    assert FULL.plan(data).tokens == len(FULL(UPRIGHT).pixel_values) // 4


def test_damage_with_right_checksums_is_found():
    """A stream that is damaged before its checksum was made: refused, whatever is done about EXIF."""
    at = PNG.index(b"IDAT")
    length = int.from_bytes(PNG[at - 4 : at], "big")
    stream = bytearray(PNG[at + 4 : at + 4 + length])
    stream[length // 2 : length // 2 + 64] = b"\xff" * 64
    body = b"IDAT" + bytes(stream)
    data = PNG[:at] + body + zlib.crc32(body).to_bytes(4, "big") + PNG[at + 8 + length :]
    for exif in ("apply", "ignore"):
        with pytest.raises(ImageError, match="broken"):
            read_image(data, limits=LIMITS, exif=exif)


def test_default_limits():
    assert (LIMITS.max_pixels, LIMITS.max_bytes) == (89_478_485, 67_108_864)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_meaningless_orientation_turns_nothing(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert FULL(saved(UPRIGHT, exif=exif)).sizes == [(90, 40)]


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_animations_give_their_first_frame(kind, options):
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert read_image(data, limits=LIMITS).convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_name_does_not_matter(tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(saved(UPRIGHT))
    assert torch.equal(FULL(path).pixel_values, FULL(UPRIGHT).pixel_values)


def bad_checksum() -> bytes:
    data = bytearray(saved(UPRIGHT))
    at = data.index(b"IDAT") + 4
    data[at + 40] ^= 0xFF
    return bytes(data)


BROKEN = {
    "truncated": saved(UPRIGHT, "JPEG")[:-900],
    "half png": saved(UPRIGHT)[:2000],
    "checksum": bad_checksum(),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "text": b"hello",
    "zeros": bytes(1000),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "pdf": b"%PDF-1.4\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("way", ["path", "bytes", "url"])
def test_broken_pictures_are_one_line(name, way, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(BROKEN[name])
    source = {"path": path, "bytes": BROKEN[name], "url": data_url(BROKEN[name])}[way]
    with pytest.raises(ImageError) as caught:
        FULL(source)
    message = str(caught.value)
    assert "\n" not in message
    assert "0x" not in message
    assert {"path": "broken.png", "bytes": "bytes", "url": "data URL"}[way] in message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "empty"),
        ("no/such/file.png", "no such file"),
        (".", "is a directory"),
        ("", "name is empty"),
        ("a\0b", "null|no such"),
        ("x" * 5000, "cannot be read|no such file"),
        ("http://127.0.0.1/a.png", "URLs are not fetched"),
        ("file:///etc/passwd", "URLs are not fetched"),
        ("/dev/zero", "not a regular file"),
    ],
)
def test_sources_that_cannot_be_read(source, message):
    with pytest.raises(ImageError, match=message):
        FULL(source)


PNG = saved(UPRIGHT)


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64", "data:image/png;charset=utf-8;base64", "DATA:image/png;BASE64", "data:;base64"],
)
def test_data_urls_understood(head):
    assert torch.equal(FULL(data_url(PNG, head)).pixel_values, FULL(PNG).pixel_values)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png,abc", "only base64"),
        ("data:image/png;base64,", "empty"),
        (data_url(PNG).rstrip("=") + "A", "not valid base64|broken|not a picture"),
        (
            data_url(PNG)[:-1] if data_url(PNG).endswith("=") else data_url(PNG + b"x")[:-1],
            "not valid base64",
        ),
        ("data:image/png;base64,_-_-", "not valid base64"),
        ("data:image/png;base64,äöü=", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "not a picture"),
    ],
)
def test_data_urls_refused(url, message):
    with pytest.raises(ImageError, match=message):
        FULL(url)


def bomb(side: int = 30000) -> bytes:
    """A one-bit PNG of side² pixels in a few kilobytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(4000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9460, 12000, 30000])
def test_too_many_pixels_are_refused_from_the_header(side):
    before = Image.MAX_IMAGE_PIXELS
    data = bomb(side)
    assert len(data) < 10_000
    with pytest.raises(ImageError, match="pixels"):
        FULL(data)
    with pytest.raises(ImageError, match="pixels"):
        FULL.plan(data)
    assert before == Image.MAX_IMAGE_PIXELS


def test_limits_are_settable():
    small = KimiProcessor(pixel_config(), Limits(max_pixels=90 * 40 - 1))
    with pytest.raises(ImageError, match=r"90x40 is 3600 pixels, the limit is 3599 \(raise max_pixels"):
        small(UPRIGHT)
    assert len(KimiProcessor(pixel_config(), Limits(max_pixels=90 * 40))(UPRIGHT)) == 1
    with pytest.raises(ImageError, match="the limit is 10"):
        KimiProcessor(pixel_config(), Limits(max_bytes=10))(PNG)
    with pytest.raises(ImageError, match="10"):
        KimiProcessor(pixel_config(), Limits(max_bytes=10))(data_url(PNG))
    with pytest.raises(ImageError, match="the limit is 10"):
        KimiProcessor(pixel_config(), Limits(max_bytes=10))(IMAGES / "rgb_300x200.png")


def test_calls_at_once_do_not_see_each_other():
    """Two budgets in two threads, and the picture handed in stays as it was."""
    image = Image.open(IMAGES / "rgba_120x90.png")
    expected = {n: FULL(IMAGES / "rgba_120x90.png", max_tokens=n).grid_thws.tolist() for n in (2, 20)}
    failures = []

    def work(n: int) -> None:
        for _ in range(40):
            if FULL(IMAGES / "rgba_120x90.png", max_tokens=n).grid_thws.tolist() != expected[n]:
                failures.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
    FULL(image)
    assert (image.mode, image.size) == ("RGBA", (120, 90))


def test_header_alone_is_read(tmp_path):
    """The token counter works on a file whose pixel data are missing."""
    path = tmp_path / "head.png"
    path.write_bytes(saved(UPRIGHT)[:200])
    assert image_size(path, limits=LIMITS) == (90, 40)
    with pytest.raises(ImageError):
        read_image(path, limits=LIMITS)


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF", b"II*\0", b"BM"]),
)
def test_random_bytes_never_escape(data, magic):
    try:
        read_image(magic + data, limits=LIMITS)
    except ImageError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 3000), st.integers(0, 255))
def test_flipped_bytes_never_escape(position, value):
    data = bytearray(PNG)
    data[position % len(data)] = value
    try:
        image = read_image(bytes(data), limits=LIMITS)
    except ImageError as error:
        assert "\n" not in str(error)
    else:
        assert plan_image(*image.size, pixel_config()).tokens > 0


def test_open_files(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    with path.open("rb") as file:
        assert torch.equal(FULL(file).pixel_values, FULL(PNG).pixel_values)
    assert torch.equal(FULL(io.BytesIO(PNG)).pixel_values, FULL(PNG).pixel_values)
    with pytest.raises(ImageError, match="opened as text"):
        FULL(io.StringIO("text"))
    with pytest.raises(ImageError, match="the limit is 10"):
        KimiProcessor(pixel_config(), Limits(max_bytes=10))(io.BytesIO(PNG))


def test_file_is_closed(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    began = time.monotonic()
    for _ in range(50):
        image_size(path, limits=LIMITS)
    path.unlink()
    assert time.monotonic() - began < 60
