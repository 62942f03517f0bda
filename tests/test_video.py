"""Clips: which frames, which sizes, which embeddings; files with PyAV, made here."""

import math
import struct
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

import parity_helpers as helpers
from conftest import TINY
from moonvit.cli import group
from moonvit.clips import video_chunks
from moonvit.config import PixelConfig
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, ImageError, MoonvitError
from moonvit.pixels.clips import (
    K25_CLIP,
    kimi_samples,
    smart_resize_clip,
    timestamp_text,
)
from moonvit.pixels.video import open_video

av = pytest.importorskip("av")

CLIP_MEDIA = {
    "sample_fps": 2.0, "temporal_merge_kernel_size": 4, "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None, "timestamp_mode": "hh:mm:ss.fff", "max_num_frames_each_video": None,
}  # fmt: skip


def make_video(path, count=24, fps=8, size=(96, 64)):
    """Frame n is grey 10·n, with a white upper left quarter, so that turns and numbers can be seen."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * number, np.uint8)
            pixels[: size[1] // 2, : size[0] // 2] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def turn_video(path, matrix):
    """Write a display matrix into the mp4's track header."""
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 4 + 40
    data[start : start + 36] = struct.pack(">9i", *matrix)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = helpers.PAIRS[name](tmp_path_factory.mktemp("family"))[0]
        return made[name]

    return get


@pytest.mark.parametrize(
    ("count", "fps", "expected"),
    [(24, 8.0, [0, 5, 9, 14, 18, 23]), (1, 30.0, [0]), (3, 1.0, [0, 1, 2]), (7, 30.0, [0]), (60, 30.0, [0, 20, 39, 59])],
)  # fmt: skip
def test_kimi_samples(count, fps, expected):
    """By hand: round(count·min(2, fps)/fps) frames, evenly from the first to the last."""
    assert kimi_samples(count, fps, 2.0) == expected


@pytest.mark.parametrize(
    ("seconds", "mode", "expected"),
    [
        (0, "hh:mm:ss.fff", "00:00:00.000"),
        (65.25, "mm:ss.fff", "01:05.250"),
        (65.9999, "mm:ss", "01:05"),
        (3661.5, "hh:mm:ss.fff", "01:01:01.500"),
        (1.005, "hh:mm:ss.fff", "00:00:01.004"),
    ],
)
def test_timestamps(seconds, mode, expected):
    assert timestamp_text(seconds, mode) == expected


def test_clip_rules_of_a_checkpoint():
    assert PixelConfig.from_dict({"media_proc_cfg": helpers.K25_MEDIA}).clip is None
    assert PixelConfig.from_dict({"media_proc_cfg": {**helpers.K25_MEDIA, **CLIP_MEDIA}}).clip == K25_CLIP
    wrong = {**helpers.K25_MEDIA, **CLIP_MEDIA, "timestamp_mode": "seconds"}
    with pytest.raises(ConfigError, match="timestamp_mode"):
        PixelConfig.from_dict({"media_proc_cfg": wrong})


def test_k25_takes_a_file(encoders, tmp_path):
    """Chunks of four and two frames; each equals a pass over its own frames' patches."""
    encoder = encoders("kimi_k25")
    path = make_video(tmp_path / "clip.mp4")
    chunks = list(encoder.encode_video(str(path)))
    assert [chunk.frames for chunk in chunks] == [(0, 5, 9, 14), (18, 23)]
    assert [chunk.grid for chunk in chunks] == [(4, 6, 8), (2, 6, 8)]
    assert [chunk.timestamp for chunk in chunks] == ["00:00:00.000", "00:00:02.250"]
    assert chunks[0].prompt.startswith("00:00:00.000<|media_begin|>video<|media_content|>")
    video = open_video(path)
    assert (video.count, video.fps) == (24, 8.0)
    pictures = list(video.frames([18, 23]))
    stills = [encoder.processor(picture).pixel_values for picture in pictures]
    expected = encoder.model(torch.cat(stills), [(2, 6, 8)])[0]
    assert helpers.relative_error(chunks[1].embeddings, expected) < 1e-6
    assert abs(int(np.asarray(pictures[0])[60, 90, 0]) - 180) < 6


def test_frames_are_a_video(encoders):
    encoder = encoders("kimi_k25")
    frames = [Image.new("RGB", (60, 40), (n, n, n)) for n in range(5)]
    chunks = list(encoder.encode_video(frames, fps=2))
    assert [chunk.frames for chunk in chunks] == [(0, 1, 2, 3), (4,)]
    alone = encoder.encode(frames[4], convert_to_tensor=True)
    assert helpers.relative_error(chunks[1].embeddings, alone) < 1e-6


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_qwen_in_one_pass_or_by_chunks(encoders, name, tmp_path):
    """Chunks of one patch of frames equal one pass over the whole video; the odd last frame repeats."""
    encoder = encoders(name)
    frames = [Image.effect_noise((90, 70), 60) for _ in range(5)]
    chunks = list(encoder.encode_video(frames, fps=2))
    taken = [number for chunk in chunks for number in chunk.frames]
    _, h, w = chunks[0].grid
    patch = encoder.processor.config.patch_size
    whole = encoder.processor.clip([frames[n] for n in taken], (w * patch, h * patch))
    assert whole.plan.grid == (len(chunks), h, w)
    expected = encoder.features(encoder.processor.pack([whole]))
    found = torch.cat([chunk.embeddings for chunk in chunks])
    assert helpers.relative_error(found, expected.embeddings[0]) < 1e-6
    for layer, rows in enumerate(expected.deepstack):
        mine = torch.cat([chunk.deepstack[layer] for chunk in chunks])
        assert helpers.relative_error(mine, rows[0]) < 1e-6
    for chunk in chunks:  # the middle of its frames
        assert chunk.seconds == sum(chunk.frames) / len(chunk.frames) / 2
        assert chunk.timestamp == f"<{chunk.seconds:.1f} seconds>"
    assert chunks[0].seconds > 0


def test_qwen3_limits_bound_all_frames_together(encoders):
    config = encoders("qwen3_vl").processor.config
    for frames in (4, 40):
        width, height = smart_resize_clip(frames, 1920, 1080, config)
        assert frames * width * height <= config.max_pixels
    assert smart_resize_clip(40, 1920, 1080, config) < smart_resize_clip(4, 1920, 1080, config)


def test_k3_only_when_asked(tmp_path):
    encoder = Encoder.from_pretrained(TINY, dtype="float32")
    frames = [Image.new("RGB", (30, 30), (n, 0, 0)) for n in range(3)]
    with pytest.raises(MoonvitError, match="experimental"):
        encoder.encode_video(frames, fps=2)
    (chunk,) = encoder.encode_video(frames, fps=2, experimental=True)
    assert chunk.grid == (3, 4, 4)


def test_kimi_vl_takes_none(encoders):
    with pytest.raises(MoonvitError, match="kimi_vl takes no videos"):
        encoders("kimi_vl").encode_video([Image.new("RGB", (30, 30))], fps=2)


QUARTER = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)


def test_a_turned_video_is_upright(tmp_path):
    """A display matrix of a quarter turn clockwise puts the upper left quarter at the upper right."""
    path = turn_video(make_video(tmp_path / "turned.mp4", count=4), QUARTER)
    (upright,) = open_video(path).frames([0])
    assert upright.size == (64, 96)
    pixels = np.asarray(upright)[:, :, 0].astype(int)
    assert pixels[10, 54] > 200
    assert pixels[10, 10] < 60
    (stored,) = open_video(path, exif="ignore").frames([0])
    assert stored.size == (96, 64)


def test_broken_files(tmp_path):
    whole = make_video(tmp_path / "whole.mp4").read_bytes()
    cases = {"empty.mp4": b"", "text.mp4": b"no video at all" * 20, "cut.mp4": whole[: len(whole) // 3]}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError, match=name) as caught:
            list(open_video(tmp_path / name).frames([0]))
        assert "0x" not in str(caught.value)
    with pytest.raises(ImageError, match="no such file"):
        open_video(tmp_path / "absent.mp4")


def test_a_video_that_ends_early(tmp_path):
    path = make_video(tmp_path / "short.mp4", count=4)
    video = open_video(path)
    with pytest.raises(ImageError, match="ends before frame 9 of the 4"):
        list(video.frames([0, 9]))


@pytest.mark.parametrize("fps", [None, 0, -1, math.inf, math.nan])
def test_frames_need_their_rate(fps):
    with pytest.raises(ValueError, match="fps is"):
        open_video([Image.new("RGB", (9, 9))], fps=fps)


def test_no_frames_and_a_rate_too_many(tmp_path):
    with pytest.raises(ImageError, match="no frames"):
        open_video([], fps=2)
    with pytest.raises(ValueError, match="a file knows its own"):
        open_video("clip.mp4", fps=2)


def test_without_pyav(monkeypatch, tmp_path):
    path = make_video(tmp_path / "clip.mp4", count=2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MoonvitError, match=r"moonvit\[video\]"):
        open_video(path)


def test_the_encode_verb(encoders, tmp_path):
    directory = encoders("kimi_k25").checkpoint.directory
    path = make_video(tmp_path / "clip.mp4")
    output = tmp_path / "out.safetensors"
    arguments = ["encode", str(path), "--model", str(directory), "--dtype", "float32", "-o", str(output)]
    done = CliRunner().invoke(group, arguments)
    assert done.exit_code == 0, done.output
    assert "at 00:00:02.250" in done.output
    stored = load_file(output)
    assert stored["grid_thws"].tolist() == [[4, 6, 8], [2, 6, 8]]
    assert stored["embeddings/1"].shape == (12, 40)


def opened(path):
    """How many file handles of this process lead to that file."""
    handles = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.exists() and link.resolve() == path.resolve() for link in handles)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_video_left_early_is_closed(encoders, tmp_path):
    path = make_video(tmp_path / "clip.mp4", count=24)
    chunks = encoders("kimi_k25").encode_video(path)
    next(chunks)
    assert opened(path) == 1
    chunks.close()
    assert opened(path) == 0


def test_one_chunk_is_held_at_a_time(encoders):
    """Frames are asked for as their chunk is, and no more are alive than a chunk has."""
    alive, most = [], 0

    class Frames(list):
        def __getitem__(self, number):
            nonlocal most
            picture = Image.new("RGB", (30, 30), (number, 0, 0))
            alive.append(weakref.ref(picture))
            most = max(most, sum(frame() is not None for frame in alive))
            return picture

    video = open_video([Image.new("RGB", (30, 30))], fps=2)
    encoder = encoders("kimi_k25")
    chunks = video_chunks(encoder, replace(video, count=40, source=Frames()))
    assert len(list(chunks)) == 10
    assert most <= 8


def test_an_animation_that_is_not_decoded_says_how(encoders, tmp_path):
    frames = [Image.new("RGB", (60, 40), (n * 20,) * 3) for n in range(3)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=100, lossless=True)
    try:
        chunks = list(encoders("kimi_k25").encode_video(tmp_path / "a.webp"))
    except ImageError as error:
        assert "give its frames as a list" in str(error)
    else:  # a decoder that knows them
        assert chunks
