"""Memory of a pass at full width, in a process of its own; one block, since blocks share their buffers."""

import json
import os
import subprocess
import sys

import pytest

from native import needs_native

LARGEST = 65_536
"""Patches of the largest picture that a checkpoint's budget lets through."""

BUDGET = 1.5e9
"""Bytes above the weights that it may take."""

CODE = """
import json, resource, sys
import torch
from moonvit.backends import set_backend
from moonvit.config import VisionConfig
from moonvit.families import family_of
from moonvit.presets import model_config
from moonvit.towers import base

backend, side, pictures, at_once = sys.argv[1], *map(int, sys.argv[2:])
base.PATCHES_AT_ONCE = at_once
config = model_config("full")
config["vision_config"]["vt_num_hidden_layers"] = 1
model = family_of(config).empty_model(VisionConfig.from_dict(config, "here"))
model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
for parameter in model.parameters():
    parameter.data.normal_(0, 0.02)
set_backend(model, backend)

def now():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

with torch.no_grad():
    model(torch.zeros(64, 3, 14, 14), [(1, 8, 8)])
    before = now()
    grids = [(1, side, side)] * pictures
    pixels = torch.zeros(side * side * pictures, 3, 14, 14).uniform_(-1, 1)
    results = model(pixels, grids)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
outputs = sum(rows.numel() * rows.element_size() for rows in results)
inputs = pixels.numel() * pixels.element_size()
print(json.dumps({"above": peak - before, "inputs": inputs, "outputs": outputs}))
"""


# What is freed goes back at once, so that holes left in the heap do not count as memory in use.
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}


def measured(*arguments):
    if sys.platform != "linux":
        pytest.skip("memory is read from Linux' /proc")
    words = [sys.executable, "-c", CODE, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_the_largest_picture_fits_the_budget(backend):
    """Reckoned from two smaller ones: memory grows in a straight line, and no faster than is allowed."""
    if backend == "native":
        needs_native()
    (few, small), (many, large) = ((side**2, measured(backend, side, 1, 2**20)["above"]) for side in (48, 88))
    slope = (large - small) / (many - few)
    assert large + slope * (LARGEST - many) < BUDGET


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_four_pictures_take_no_more_than_one(backend):
    if backend == "native":
        needs_native()
    side = 56
    alone, four = (measured(backend, side, pictures, side**2) for pictures in (1, 4))
    beside = [found["above"] - found["inputs"] - found["outputs"] for found in (alone, four)]
    assert beside[1] < beside[0] + 0.2 * BUDGET * side**2 / LARGEST
