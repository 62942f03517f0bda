"""Modes, transparency, arrays: what the processor does with each."""

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import pixel_config
from moonvit.errors import ImageError
from moonvit.pixels.kimi import KimiProcessor, opaque_picture
from moonvit.pixels.plan import plan_image
from moonvit.presets import preprocessor_config

FULL = KimiProcessor(pixel_config())


def pixels(image: Image.Image, **media) -> np.ndarray:
    config = pixel_config(**media)
    return np.asarray(opaque_picture(image, plan_image(*image.size, config), config))


def test_clear_picture_shows_the_chessboard():
    found = pixels(Image.new("RGBA", (56, 56), (0, 0, 0, 0)))
    assert set(np.unique(found)) == {180, 255}
    assert found[0, 0].tolist() == [255] * 3
    assert found[0, 8].tolist() == [180] * 3
    assert found[8, 0].tolist() == [180] * 3


def test_half_black_is_truncated():
    assert set(np.unique(pixels(Image.new("RGBA", (56, 56), (0, 0, 0, 128))))) == {89, 126}


def test_composite_of_every_pair_is_float32_truncated():
    """All 65,536 pairs of value and alpha over both greys, by the rule written out."""
    value, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    rgba = np.stack([value, value, value, alpha], axis=-1)
    found = pixels(Image.fromarray(rgba, "RGBA"))
    rows, columns = np.mgrid[:256, :256]
    board = np.where((rows // 8 + columns // 8) % 2 == 0, 255, 180).astype(np.float32)
    weight = alpha.astype(np.float32) / np.float32(255)
    expected = (weight * value + (np.float32(1) - weight) * board).astype(np.uint8)
    assert np.array_equal(found, np.repeat(expected[:, :, None], 3, axis=2))


def test_hidden_colour_does_not_bleed():
    """Premultiplied resizing: what lies under full transparency is invisible."""
    results = []
    for hidden in ((255, 0, 255, 0), (0, 0, 0, 0)):
        image = Image.new("RGBA", (112, 112), (10, 200, 30, 255))
        image.paste(hidden, (0, 56, 112, 112))
        results.append(pixels(image, in_patch_limit=4))
    assert results[0].shape == (28, 28, 3)
    assert np.array_equal(*results)


def test_palette_is_resized_by_nearest_neighbour():
    image = Image.new("P", (100, 100))
    image.putpalette([0, 0, 0, 255, 255, 255] + [0] * 750)
    image.putdata([(x + y) % 2 for y in range(100) for x in range(100)])
    config = pixel_config(in_patch_limit=12)
    plan = plan_image(100, 100, config)
    found = np.asarray(opaque_picture(image, plan, config))
    assert plan.new_width < 100
    assert set(np.unique(found)) <= {0, 255}


@pytest.mark.parametrize("mode", ["L", "P"])
@pytest.mark.parametrize("key", [0, 7])
def test_transparent_colour_composites(mode, key):
    image = Image.new(mode, (28, 28), key)
    if mode == "P":
        image.putpalette([9, 9, 9] * 256)
    image.info["transparency"] = key
    assert set(np.unique(pixels(image))) == {180, 255}


def test_transparent_colour_of_rgb_does_not():
    image = Image.new("RGB", (28, 28), (1, 2, 3))
    image.info["transparency"] = (1, 2, 3)
    assert np.unique(pixels(image).reshape(-1, 3), axis=0).tolist() == [[1, 2, 3]]


def test_sixteen_bit_grey_is_clipped_as_pillow_does():
    row = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert pixels(Image.fromarray(row))[0, :, 0].tolist() == [0, 255, 255, 255, 255]


def test_cmyk_is_converted():
    found = pixels(Image.new("CMYK", (28, 28), (0, 0, 0, 255)))
    assert set(np.unique(found)) == {0}


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"]
)
@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
def test_every_mode_in_use_gives_patches(mode, stage):
    config = pixel_config(in_patch_limit=4, transparent_bg_fill_stage=stage)
    batch = KimiProcessor(config)(Image.new(mode, (90, 70)))
    assert batch.grid_thws.tolist() == [[1, 2, 4]]
    assert torch.isfinite(batch.pixel_values).all()


def test_mode_that_cannot_be_converted_is_named():
    with pytest.raises(ImageError, match="PIL image 90x70: mode La cannot be converted"):
        FULL.prepare(Image.new("La", (90, 70)))


def test_background_is_at_the_resized_origin():
    big = pixels(Image.new("RGBA", (112, 112)), in_patch_limit=4)
    assert big.shape == (28, 28, 3)
    assert (big[:8, :8] == 255).all()
    before = pixels(
        Image.new("RGBA", (112, 112)), in_patch_limit=4, transparent_bg_fill_stage="before_resize"
    )
    assert not np.array_equal(before, big)


def test_padding_is_black_before_normalising():
    batch = FULL(Image.new("RGB", (29, 28), "white"))
    first_row = batch.pixel_values[:4, :, 0]
    assert (first_row[2, :, 0] == 1).all()
    assert (first_row[2, :, 1:] == -1).all()
    assert (first_row[3] == -1).all()


def test_raster_order_of_patches():
    image = Image.new("RGB", (56, 28))
    for column in range(4):
        image.paste((column * 10, 0, 0), (column * 14, 0, column * 14 + 14, 14))
    red = FULL(image).pixel_values[:, 0, 0, 0]
    expected = torch.tensor([0, 10, 20, 30]) / 255 * 2 - 1
    torch.testing.assert_close(red[:4], expected)


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.48145466, 0.4578275, 0.40821073)], ids=str)
def test_normalising_is_float32(mean):
    std = (0.26862954, 0.26130258, 0.27577711)
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.stack([ramp] * 3, axis=-1))
    batch = KimiProcessor(pixel_config(image_mean=list(mean), image_std=list(std)))(image)
    scaled = np.asarray(image, np.float32)[:14, :14] / np.float32(255)
    expected = (scaled - np.array(mean, np.float32)) / np.array(std, np.float32)
    assert np.array_equal(batch.pixel_values[0].numpy(), expected.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [None, 1])
def test_grey_arrays_have_three_equal_channels(channels):
    grey = np.arange(56 * 28, dtype=np.uint8).reshape(28, 56)
    found = FULL(grey if channels is None else grey[:, :, None], layout="HWC").pixel_values
    assert torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(found, FULL(Image.fromarray(grey)).pixel_values)


def test_layout_is_what_the_caller_says():
    array = np.arange(3 * 22 * 3, dtype=np.uint8).reshape(3, 22, 3)
    assert FULL(array, layout="HWC").sizes == [(22, 3)]
    assert FULL(array, layout="CHW").sizes == [(3, 22)]
    with pytest.raises(ImageError, match="layout='HWC' or layout='CHW'"):
        FULL(array)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_arrays_equal_the_picture(kind, dtype):
    rgb = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    array = rgb if dtype == "uint8" else (rgb / 255).astype(dtype)
    source = torch.from_numpy(array.copy()) if kind == "torch" else array
    assert torch.equal(FULL(source, layout="HWC").pixel_values, FULL(Image.fromarray(rgb)).pixel_values)


def test_floats_are_rounded_not_truncated():
    assert FULL(np.full((2, 2), 0.999)).pixel_values[0, 0, 0, 0] == 1


def test_chessboard_runs_through_tall_pictures():
    """Squares that do not divide the height worked on at once."""
    board = pixel_config().background
    config = pixel_config(
        transparent_bg_config=preprocessor_config()["media_proc_cfg"]["transparent_bg_config"]
        | {"chessboard_square_size": 7}
    )
    found = np.asarray(opaque_picture(Image.new("RGBA", (28, 700)), plan_image(28, 700, config), config))[
        :, 0, 0
    ]
    expected = np.where(np.arange(700) // 7 % 2 == 0, board.white, board.gray)
    assert np.array_equal(found, expected)


def test_arrays_with_alpha_composite():
    assert set(np.unique(FULL(np.zeros((28, 28, 4), np.uint8), layout="HWC").pixel_values)) == {
        np.float32(1),
        np.float32((np.float32(180) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)),
    }


@pytest.mark.parametrize(
    ("array", "layout", "message"),
    [
        (np.full((4, 4, 3), np.nan), "HWC", "NaN or infinity"),
        (np.full((4, 4, 3), np.inf, np.float32), "HWC", "NaN or infinity"),
        (np.full((4, 4, 3), 255.0), "HWC", "expected 0 to 1"),
        (np.full((4, 4, 3), -0.1), "HWC", "expected 0 to 1"),
        (np.zeros((4, 4, 3), np.int64), "HWC", "int64, expected uint8"),
        (np.zeros((4, 4, 3), np.uint16), "HWC", "uint16, expected uint8"),
        (np.zeros((4, 4, 5), np.uint8), "HWC", "5 channels"),
        (np.zeros((0, 4, 3), np.uint8), "HWC", "no pixels"),
        (np.zeros((1, 3, 4, 4), np.uint8), "CHW", "as a list"),
        (np.zeros((4, 4, 3), np.uint8), "chw", "layout is 'chw'"),
        (np.array([[None]]), None, "object, expected uint8"),
        (12, None, "not a picture"),
        (None, None, "not a picture"),
        ({}, None, "not a picture"),
    ],
    ids=str,
)
def test_arrays_that_are_no_pictures(array, layout, message):
    with pytest.raises(ImageError, match=message):
        FULL(array, layout=layout)
