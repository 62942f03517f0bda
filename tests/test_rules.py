"""Rules for pictures and videos: which file they are read from, and what they make of sizes and frames.

The rules of Qwen's videos are held against transformers' own methods, taken from its source: its classes need
torchvision, which does not go with the pinned torch.
"""

import ast
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from PIL import Image

import parity_helpers as helpers
from moonvit.cli import group
from moonvit.configs.files import PICTURES, VIDEOS, find_rules
from moonvit.configs.kimi import kimi_clip, kimi_pixels, kimi_vl_pixels
from moonvit.configs.qwen import qwen_pixels, qwen_video
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError, ImageError
from moonvit.fields import Fields
from moonvit.pixels.clips import K25_CLIP, qwen2_frame_size, qwen2_samples, qwen3_frame_size, qwen3_samples
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.qwen import QwenProcessor
from moonvit.weights.checkpoint import LocalCheckpoint
from moonvit.weights.export import export

STEPS = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "rescale_factor": 0.00392156862745098, "merge_size": 2, "patch_size": 16, "temporal_patch_size": 2,
    **helpers.HALVES,
}  # fmt: skip
NESTED = {
    "image_processor": {
        **STEPS, "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    },
    "processor_class": "Qwen3VLProcessor",
    "video_processor": {
        **STEPS, "video_processor_type": "Qwen3VLVideoProcessor", "do_sample_frames": True, "fps": 2,
        "max_frames": 768, "min_frames": 4, "return_metadata": False,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    },
}  # fmt: skip
"""`processor_config.json` as transformers 5 writes it for Qwen3-VL."""

PICTURES_28 = qwen_pixels(helpers.QWEN_PIXELS)
PICTURES_32 = qwen_pixels(NESTED["image_processor"])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return helpers.qwen3_vl_pair(tmp_path_factory.mktemp("qwen3"))[0]


@pytest.fixture
def saved_by_5(qwen3, tmp_path):
    """A checkpoint whose rules lie in `processor_config.json` alone."""
    directory = tmp_path / "saved"
    shutil.copytree(qwen3.checkpoint.directory, directory)
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps(NESTED))
    return directory


def test_nested_rules_are_read_by_all(saved_by_5, tmp_path):
    """By the encoder, its videos, `count`, `info` and an export."""
    encoder = Encoder.from_pretrained(saved_by_5, dtype="float32")
    config = encoder.processor.config
    assert (config.min_pixels, config.max_pixels) == (65536, 16777216)
    first = next(encoder.encode_video([Image.new("RGB", (64, 64))] * 2, fps=2))
    assert first.grid == (
        1,
        4,
        4,
    )  # 64x64x2 pixels are above the 4096 for videos, below the 65536 for pictures
    picture = tmp_path / "a.png"
    Image.new("RGB", (300, 200)).save(picture)
    for arguments in (["count", str(picture), "--model", str(saved_by_5)], ["info", str(saved_by_5)]):
        done = CliRunner().invoke(group, [*arguments, "--format", "json"])
        assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["preprocessor"]["max_pixels"] == 16777216
    export(encoder.checkpoint, tmp_path / "half")
    again = Encoder.from_pretrained(tmp_path / "half", dtype="float32")
    assert again.processor.config == config
    assert again.checkpoint.video_rules.values == NESTED["video_processor"]


def test_nested_rules_go_before_files_of_their_own(saved_by_5):
    for file, size in (("preprocessor_config.json", 1), ("video_preprocessor_config.json", 2)):
        (saved_by_5 / file).write_text(json.dumps({**STEPS, "min_pixels": size, "max_pixels": size}))
    checkpoint = LocalCheckpoint(saved_by_5)
    assert checkpoint.preprocessor == NESTED["image_processor"]
    assert checkpoint.video_rules.values == NESTED["video_processor"]
    (saved_by_5 / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    checkpoint = LocalCheckpoint(saved_by_5)
    assert checkpoint.preprocessor["min_pixels"] == 1
    assert checkpoint.video_rules.values["min_pixels"] == 2


def test_a_fault_names_the_file_and_the_object(saved_by_5):
    wrong = {**NESTED, "image_processor": {**NESTED["image_processor"], "patch_size": "16"}}
    (saved_by_5 / "processor_config.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=r"processor_config\.json: image_processor: field 'patch_size'"):
        Encoder.from_pretrained(saved_by_5)
    (saved_by_5 / "processor_config.json").write_text('{"image_processor": [1]}')
    with pytest.raises(ConfigError, match=r"image_processor: expected an object"):
        Encoder.from_pretrained(saved_by_5)
    (saved_by_5 / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: no such file.*image_processor"):
        Encoder.from_pretrained(saved_by_5)


def test_places_in_order():
    files = {"processor_config.json": {"image_processor": {"a": 1}}, "preprocessor_config.json": {"a": 2}}
    assert find_rules(files.get, "w", PICTURES).values == {"a": 1}
    assert find_rules(files.get, "w", VIDEOS) is None
    assert find_rules({"preprocessor_config.json": {"a": 2}}.get, "w", PICTURES).where.endswith("config.json")


FILTERS = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("resample", FILTERS)
def test_the_filter_is_the_checkpoints(resample):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rules = {**helpers.QWEN_PIXELS, "resample": resample, "min_pixels": 100000}
    picture = Image.effect_noise((90, 130), 80)
    expected = Qwen2VLImageProcessorPil(**rules)(picture, return_tensors="pt")["pixel_values"]
    assert torch.equal(QwenProcessor(qwen_pixels(rules))(picture).pixel_values, expected)


NATIVE_K25 = {
    "max_patches": 16384, "patch_size": 14, "merge_size": 2, "size": {"max_height": 512, "max_width": 512},
    **helpers.HALVES,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 2},
        {"do_resize": False},
        {"do_normalize": False},
        {"rescale_factor": 1.0},
        {"size": {"max_height": 512, "max_width": 256}},
    ],
    ids=str,
)
def test_what_the_kimi_processor_does_not_do_is_refused(change):
    kimi_pixels({**NATIVE_K25, **{k: v for k, v in STEPS.items() if k.startswith(("do_", "res"))}})
    (field,) = change
    with pytest.raises(ConfigError, match="max_width" if field == "size" else field):
        kimi_pixels({**NATIVE_K25, **change})


@pytest.mark.parametrize("field", ["max_num_frames_each_video", "fixed_output_tokens_each_frame"])
def test_a_clip_rule_that_is_not_known_is_refused(field):
    media = {
        **helpers.K25_MEDIA, "sample_fps": 2.0, "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff", field: 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=field):
        kimi_pixels({"media_proc_cfg": media})


def test_clips_of_transformers_own_k25():
    assert kimi_clip(Fields({}, "w")) == K25_CLIP
    rules = {"max_patches": 900, "fps": 1.5, "temporal_patch_size": 2, "merge_size": 2, "resample": 3}
    found = kimi_clip(Fields(rules, "w"))
    assert (found.frame_limit, found.sample_fps, found.frames) == (900, 1.5, 2)


def test_kimi_vl_merges_two_by_two_without_saying_so():
    rules = {key: value for key, value in helpers.KIMI_VL_PIXELS.items() if key != "merge_kernel_size"}
    assert kimi_vl_pixels(rules) == kimi_vl_pixels(helpers.KIMI_VL_PIXELS)


def video_class(family, name):
    """transformers' video processor with nothing below it: `resize` gives the new (width, height)."""
    path = Path(transformers.__file__).parent / f"models/{family}/video_processing_{family}.py"
    tree = ast.parse("from __future__ import annotations\n" + path.read_text())
    kept = [tree.body[0]]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "smart_resize":
            kept.append(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            node.bases, node.decorator_list = [ast.Name("Base", ast.Load())], []
            node.body = [n for n in node.body if getattr(n, "name", "") in ("sample_frames", "resize")]
            kept.append(node)

    class Base:
        def resize(self, image, size, resample):
            return size.width, size.height

    space = {"math": math, "torch": torch, "np": np, "Base": Base, "SizeDict": SimpleNamespace}
    exec(compile(ast.fix_missing_locations(ast.Module(kept, [])), str(path), "exec"), space)
    return space[name]()


KINDS = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", PICTURES_28, qwen2_samples, qwen2_frame_size),
    "qwen3_vl": ("Qwen3VLVideoProcessor", PICTURES_32, qwen3_samples, qwen3_frame_size),
}


@pytest.mark.parametrize("family", KINDS)
def test_frames_and_sizes_are_the_references(family):
    """Random lengths, rates and sizes, with and without `cap_pixels_per_frame`."""
    name, pictures, samples, frame_size = KINDS[family]
    theirs, chance = video_class(family, name), random.Random(2)
    compared = capped = grown = 0
    for case in range(400):
        given = {
            "fps": chance.choice([2, 1, 0.5, 4.0]), "min_frames": chance.choice([4, 2, 6]),
            "max_frames": chance.choice([768, 33, 8]), "cap_pixels_per_frame": case % 2 == 0,
            "size": {"shortest_edge": chance.choice([4096, 100352]), "longest_edge": 12845056 // (1 + case % 20)},
        }  # fmt: skip
        rules = qwen_video(Fields(given, "w"), pictures, newest=family == "qwen3_vl")
        vars(theirs).update(given, num_frames=None, temporal_patch_size=2)
        theirs.max_video_tokens = 768 if family == "qwen3_vl" else 128000
        count, fps = int(2 ** chance.uniform(1, 13)), chance.choice([24, 23.976, 30, 60, 5, 0.7])
        expected = [int(n) for n in theirs.sample_frames(SimpleNamespace(total_num_frames=count, fps=fps))]
        found = samples(count, fps, rules)
        # The reference may ask for a frame behind the last one; ours takes the last.
        assert found == [min(n, count - 1) for n in expected], (count, fps)
        width, height = int(2 ** chance.uniform(5, 11.5)), int(2 ** chance.uniform(5, 11.5))
        if len(found) < 2:
            continue
        ours = frame_size(len(found), width, height, rules)
        clip = torch.empty(1, len(found), 3, height, width, device="meta")
        size = SimpleNamespace(**given["size"])
        how = {"factor": pictures.cell, "temporal_factor": 2}
        free = theirs.resize(clip, size, None, **how, cap_pixels_per_frame=False)
        assert ours == theirs.resize(clip, size, None, **how, cap_pixels_per_frame=case % 2 == 0)
        compared += 1
        capped += ours != free
        grown += ours[0] > width
    assert compared > 300
    assert capped > 5
    assert grown > 5


def test_limits_of_videos_without_rules_of_their_own():
    """transformers reads `preprocessor_config.json` for videos too, where nothing else is there."""
    alone = qwen_video(None, PICTURES_28, newest=False)
    assert alone.pixels == PICTURES_28
    assert (alone.fps, alone.min_frames, alone.max_frames, alone.frame_tokens) == (2, 4, 768, None)
    silent = qwen_video(Fields({"fps": 1, "size": None, "max_frames": None}, "w"), PICTURES_28, newest=False)
    assert (silent.pixels.min_pixels, silent.pixels.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    assert (silent.fps, silent.max_frames) == (1, 768)
    one = qwen_video(Fields({"max_pixels": 10**6}, "w"), PICTURES_28, newest=False).pixels
    assert (one.min_pixels, one.max_pixels) == (128 * 28 * 28, 10**6)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"patch_size": 14}, "'patch_size' is 14"),
        ({"fps": 0}, "'fps' is 0"),
        ({"max_frames": 1}, "'max_frames' is 1"),
        ({"do_resize": False}, "'do_resize' is False"),
        ({"cap_pixels_per_frame": 1}, "'cap_pixels_per_frame' is 1"),
    ],
    ids=str,
)
def test_rules_of_videos_that_cannot_be(rules, message):
    with pytest.raises(ConfigError, match=message):
        qwen_video(Fields(rules, "w"), PICTURES_32, newest=True)


def test_a_videos_own_mean_is_used(saved_by_5):
    rules = {**NESTED, "video_processor": {**NESTED["video_processor"], "image_mean": [0.0] * 3}}
    (saved_by_5 / "processor_config.json").write_text(json.dumps(rules))
    frames = [Image.new("RGB", (64, 64), (9, 9, 9))] * 2
    other = next(Encoder.from_pretrained(saved_by_5, dtype="float32").encode_video(frames, fps=2))
    (saved_by_5 / "processor_config.json").write_text(json.dumps(NESTED))
    plain = next(Encoder.from_pretrained(saved_by_5, dtype="float32").encode_video(frames, fps=2))
    assert other.grid == plain.grid
    assert not torch.allclose(other.embeddings, plain.embeddings)


@pytest.mark.parametrize("most", [1, 5])
def test_max_tokens_holds_for_every_chunk(qwen3, most, tmp_path):
    frames = [Image.effect_noise((200, 130), 60)] * 6
    k25 = helpers.kimi_k25_pair(tmp_path / "k25")[0]
    for encoder in (qwen3, k25):
        chunks = list(encoder.encode_video(frames, fps=2, max_tokens=most))
        assert max(len(chunk.embeddings) for chunk in chunks) <= most
        assert len(next(encoder.encode_video(frames, fps=2)).embeddings) > most


FRAME = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    "video",
    [b"bytes", 5, Image.fromarray(FRAME), FRAME, np.zeros((2, 2, 8, 8, 3), np.uint8)],
    ids=["bytes", "number", "picture", "one frame", "five dimensions"],
)
def test_what_is_no_video(qwen3, video):
    with pytest.raises(ImageError, match="neither a path nor frames"):
        qwen3.encode_video(video, fps=2)


def test_arrays_of_frames(qwen3):
    frames = np.stack([np.full((40, 70, 3), 40 * n, np.uint8) for n in range(4)])
    expected = list(qwen3.encode_video([Image.fromarray(frame) for frame in frames], fps=2))
    for form, layout in ((frames, "HWC"), (torch.from_numpy(frames).permute(0, 3, 1, 2), "CHW")):
        found = list(qwen3.encode_video(form, fps=2, layout=layout))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.embeddings, theirs.embeddings)


def test_an_address_is_not_fetched(qwen3):
    with pytest.raises(ImageError, match="URLs are not fetched"):
        qwen3.encode_video("https://example.org/clip.mp4")


@pytest.mark.parametrize("fps", ["2", True, None])
def test_a_rate_that_is_no_number(qwen3, fps):
    with pytest.raises(ValueError, match="fps is"):
        qwen3.encode_video([FRAME], fps=fps)


@pytest.mark.parametrize(("clip", "frame", "side"), [(80, 4096, 6), (10**6, 20, 6), (None, 80, 10)])
def test_a_chunk_shares_its_limit_among_its_frames(clip, frame, side):
    """By hand: 80 patches for four frames are 20 for each, so 200 pixels become int(200·√(20/196)) = 63."""
    processor = KimiProcessor(kimi_pixels({"media_proc_cfg": helpers.K25_MEDIA}))
    rules = replace(K25_CLIP, clip_limit=clip, frame_limit=frame)
    assert processor.clip([Image.new("RGB", (200, 200))] * 4, rules).plan.grid == (4, side, side)
