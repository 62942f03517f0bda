"""Pixels bit-equal to the reference processor's, for every picture under four configs."""

import hashlib
import json

import numpy as np
import pytest

from conftest import DATA, IMAGES
from moonvit.config import PixelConfig
from moonvit.pixels.kimi import KimiProcessor
from moonvit.pixels.plan import plan_image

GOLDEN = json.loads((DATA / "golden" / "k3_pixels.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['file']}-{c['config']}")
def test_bit_equal(case):
    config = PixelConfig.from_dict({"media_proc_cfg": GOLDEN["configs"][case["config"]]})
    batch = KimiProcessor(config)(IMAGES / case["file"])
    assert batch.grid_thws.tolist() == [case["grid_thw"]]
    assert batch.sizes == [tuple(case["size"])]
    pixels = batch.pixel_values.numpy()
    np.testing.assert_allclose(pixels[0, 0, 0, :6], case["first_patch_row"], rtol=0, atol=1e-6)
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("plan", GOLDEN["plans"], ids=lambda p: "x".join(map(str, p["size"])))
def test_plans(plan):
    found = plan_image(*plan["size"], PixelConfig.from_dict({"media_proc_cfg": GOLDEN["configs"]["k3"]}))
    for name in ("new_width", "new_height", "pad_width", "pad_height"):
        assert getattr(found, name) == plan[name]
