"""Memory of a pass at full width, in a process of its own; one block, since blocks share their buffers."""

import json
import subprocess
import sys

import pytest

from native import needs_native

BUDGET = 1.5e9 / 65_536
"""Bytes a patch: 1.5 GB above the weights at the largest picture."""

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


def measured(*arguments):
    if sys.platform != "linux":
        pytest.skip("memory is read from Linux' /proc")
    words = [sys.executable, "-c", CODE, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_large_picture(backend):
    if backend == "native":
        needs_native()
    found = measured(backend, 88, 1, 2**20)
    assert found["above"] < BUDGET * 88 * 88


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_four_pictures_take_no_more_than_one(backend):
    if backend == "native":
        needs_native()
    alone, four = measured(backend, 64, 1, 4096), measured(backend, 64, 4, 4096)
    beside = [found["above"] - found["inputs"] - found["outputs"] for found in (alone, four)]
    # The four pass one after another; what the allocator keeps in between is small beside one picture's share.
    assert beside[1] < beside[0] + 0.25 * BUDGET * 64 * 64
