"""The families' picture processors against references, bit for bit, over random sizes and modes.

transformers' processors for the Kimi models need torchvision, which does not go with the pinned torch; there
the written rules, in plain Pillow below, are the reference.
"""

import ast
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import parity_helpers as helpers
from conftest import IMAGES
from moonvit.configs.kimi import kimi_pixels, kimi_vl_pixels
from moonvit.configs.qwen import qwen_pixels
from moonvit.errors import ConfigError, ImageError
from moonvit.pixels.kimi import KimiProcessor, KimiVLProcessor
from moonvit.pixels.qwen import QwenProcessor

SIZES = 320
MODES = ("RGB", "RGB", "RGB", "L", "RGBA", "LA", "P", "1", "CMYK", "I;16")

QWEN = {
    "qwen2_vl": {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 60,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen2_5_vl": {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 28 * 28 * 9, "longest_edge": 28 * 28 * 40},
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen3_vl": {
        "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 50}, **helpers.HALVES,
    },
}  # fmt: skip


def pictures(count: int, seed: int, most: int = 420):
    """Random pictures of all modes: small and large, wide and tall."""
    chance = random.Random(seed)
    generator = np.random.default_rng(seed)
    for number in range(count):
        width, height = chance.randint(1, most), chance.randint(1, most)
        if number % 5 == 0:
            width = chance.randint(1, 40)
        noise = Image.fromarray(generator.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
        mode = chance.choice(MODES)
        yield (
            noise
            if mode == "RGBA"
            else noise.convert("L").convert("I;16")
            if mode == "I;16"
            else (noise.convert("RGB").convert(mode) if mode in ("P", "1", "CMYK") else noise.convert(mode))
        )


@pytest.mark.parametrize("family", QWEN)
def test_qwen_is_bit_equal(family):
    """transformers' PIL-backed processor; its default one, on torchvision, differs in the last bits."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rules = QWEN[family]
    theirs, ours = Qwen2VLImageProcessorPil(**rules), QwenProcessor(qwen_pixels(rules))
    grown = shrunk = 0
    for picture in pictures(SIZES, seed=len(family)):
        if max(picture.size) / min(picture.size) > 200:
            continue
        expected = theirs(picture, return_tensors="pt")
        found = ours(picture)
        assert torch.equal(found.grid_thws, expected["image_grid_thw"]), picture
        assert torch.equal(found.pixel_values, expected["pixel_values"]), picture
        plan = ours.plan(picture)
        assert plan.tokens == found.grid_thws.prod() // 4
        grown += plan.new_width > picture.width + 32
        shrunk += plan.new_width < picture.width - 32
    assert grown > 10
    assert shrunk > 10


@pytest.mark.parametrize("name", ["palette_trns_64x64.png", "la_70x50.png", "rgba_half_black_56x56.png"])
def test_qwen_puts_white_behind(name):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rules = QWEN["qwen2_vl"]
    picture = Image.open(IMAGES / name)
    expected = Qwen2VLImageProcessorPil(**rules)(picture, return_tensors="pt")
    assert torch.equal(QwenProcessor(qwen_pixels(rules))(picture).pixel_values, expected["pixel_values"])


def written_rule(picture: Image.Image, limit: int, kimi_vl: bool) -> np.ndarray:
    """The Kimi rules in plain Pillow: uint8 [height, width, 3], padded."""
    w, h = picture.size
    if kimi_vl:
        patches = (w // 14) * (h // 14)
        if patches > limit:
            scale = math.sqrt(limit / patches)
            picture = picture.resize((int(w * scale), int(h * scale)), Image.Resampling.BICUBIC)
    else:
        patches = max(1, w // 14) * max(1, h // 14)
        scale = min(1, math.sqrt(limit / patches), 512 * 14 / w, 512 * 14 / h)
        size = (max(1, int(w * scale)), max(1, int(h * scale)))
        picture = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    w, h = picture.size
    padded = Image.new(picture.mode, (w + -w % 28, h + -h % 28), 0)
    if picture.mode == "P":
        padded.putpalette(picture.getpalette())
    padded.paste(picture, (0, 0))
    return np.asarray(padded.convert("RGB"))


def raster_patches(pixels: np.ndarray) -> torch.Tensor:
    scaled = (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
    rows = scaled.unfold(1, 14, 14).unfold(2, 14, 14)
    return rows.permute(1, 2, 0, 3, 4).flatten(0, 1)


@pytest.mark.parametrize("kimi_vl", [False, True], ids=["kimi_k25", "kimi_vl"])
def test_kimi_follows_the_written_rules(kimi_vl):
    limit = 300
    if kimi_vl:
        ours = KimiVLProcessor(kimi_vl_pixels({**helpers.KIMI_VL_PIXELS, "in_token_limit": limit}))
    else:
        media = {**helpers.K25_MEDIA, "in_patch_limit": limit}
        ours = KimiProcessor(kimi_pixels({"media_proc_cfg": media}))
    shrunk = 0
    for picture in pictures(SIZES, seed=7):
        expected = written_rule(picture, limit, kimi_vl)
        found = ours(picture)
        assert found.grid_thws.tolist() == [[1, expected.shape[0] // 14, expected.shape[1] // 14]]
        assert torch.equal(found.pixel_values, raster_patches(expected)), picture
        shrunk += ours.plan(picture).new_width < picture.width
    assert shrunk > 50


def test_k25_has_its_own_budget():
    k25 = KimiProcessor(kimi_pixels({"media_proc_cfg": helpers.K25_MEDIA}))
    assert k25.plan_size(4000, 3000).tokens == 4200
    vl = KimiVLProcessor(kimi_vl_pixels(helpers.KIMI_VL_PIXELS))
    assert vl.plan_size(4000, 3000).grid == (1, 56, 74)  # 1036x777 by hand: sqrt(4096 / (285 * 214))


def test_transformers_spelling_of_k25():
    native = {
        "max_patches": 16384, "patch_size": 14, "merge_size": 2,
        "size": {"max_height": 512, "max_width": 512}, **helpers.HALVES,
    }  # fmt: skip
    assert kimi_pixels(native) == kimi_pixels({"media_proc_cfg": helpers.K25_MEDIA})


def test_kimi_vl_refuses_long_pictures():
    ours = KimiVLProcessor(kimi_vl_pixels(helpers.KIMI_VL_PIXELS))
    assert ours.plan_size(7140, 28).grid == (1, 2, 510)
    with pytest.raises(ImageError, match="512x2 patches"):
        ours.plan_size(7168, 28)


def test_kimi_vl_counts_whole_patches():
    """A picture narrower than a patch has none, and so is never scaled down."""
    ours = KimiVLProcessor(kimi_vl_pixels({**helpers.KIMI_VL_PIXELS, "in_token_limit": 300}))
    assert ours.plan_size(13, 5600).grid == (1, 400, 2)
    assert ours.plan_size(14, 5600).grid[1] < 400


def test_kimi_vl_without_padding_is_refused():
    with pytest.raises(ConfigError, match="pad_input"):
        kimi_vl_pixels({**helpers.KIMI_VL_PIXELS, "pad_input": False})


def test_qwen_refuses_long_pictures():
    ours = QwenProcessor(qwen_pixels(QWEN["qwen2_vl"]))
    assert ours.plan_size(2000, 10).grid[1] == 2
    with pytest.raises(ImageError, match="2001x10 is more than 200 times"):
        ours.plan_size(2001, 10)


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("most", [1, 3, 10, 39])
def test_max_tokens_holds(family, most):
    ours = QwenProcessor(qwen_pixels(QWEN[family]))
    for size in [(300, 300), (1000, 6), (6, 1000), (57, 400), (5000, 4000)]:
        plan, free = ours.plan_size(*size, most), ours.plan_size(*size)
        assert 1 <= plan.tokens <= most
        assert plan.tokens <= free.tokens
    with pytest.raises(ValueError, match="max_tokens is 0"):
        ours.plan_size(300, 300, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_pixels": None}, "'min_pixels' is missing"),
        ({"max_pixels": 0}, "'max_pixels' is 0"),
        ({"min_pixels": 10**7}, "cannot both be kept"),
        ({"do_normalize": False}, "'do_normalize' is False"),
        ({"image_std": [0, 1, 1]}, "image_std"),
    ],
)
def test_qwen_rules_that_cannot_be(change, message):
    rules = {**QWEN["qwen2_vl"], **change}
    rules = {key: value for key, value in rules.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        qwen_pixels(rules)


def sizes(count: int) -> list[tuple[int, int]]:
    """Random sizes from a pixel to far beyond every budget, wide and tall."""
    chance = random.Random(12)
    return [(int(2 ** chance.uniform(0, 14)), int(2 ** chance.uniform(0, 14))) for _ in range(count)]


@pytest.mark.parametrize(("patch", "low", "high"), [(14, 3136, 12845056), (16, 65536, 16777216)])
def test_qwen_counts_as_transformers(patch, low, high):
    """At the released limits of Qwen2-VL and Qwen3-VL."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rules = {**QWEN["qwen2_vl"], "patch_size": patch, "min_pixels": low, "max_pixels": high}
    theirs, ours = Qwen2VLImageProcessorPil(**rules), QwenProcessor(qwen_pixels(rules))
    compared = 0
    for width, height in sizes(500):
        if max(width, height) / min(width, height) <= 200:
            expected = theirs.get_number_of_image_patches(height, width)
            assert ours.plan_size(width, height).patches == expected, (width, height)
            assert ours.plan_size(width, height).tokens == expected // 4
            compared += 1
    assert compared > 300


@pytest.mark.parametrize(("limit", "side"), [(16384, 512), (4096, 512), (65536, 512), (1000, 40)])
def test_kimi_counts_as_transformers(limit, side):
    """`navit_resize`, taken from the source of transformers' `kimi_k25`, whose class needs torchvision."""
    import transformers

    path = Path(transformers.__file__).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    wanted = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == "navit_resize"]
    space = {"math": math}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    media = {**helpers.K25_MEDIA, "in_patch_limit": limit, "patch_limit_on_one_side": side}
    ours = KimiProcessor(kimi_pixels({"media_proc_cfg": media}))
    for width, height in sizes(400):
        (new_height, new_width), (full_height, full_width) = space["navit_resize"](
            height, width, 14, 2, limit, side
        )
        plan = ours.plan_size(width, height)
        assert (plan.new_width, plan.new_height) == (new_width, new_height)
        assert plan.grid == (1, full_height // 14, full_width // 14)
