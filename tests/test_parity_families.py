"""Every family against its reference, float32 and bfloat16, over checkpoints that the real loader reads."""

import pytest
import torch

import parity_helpers as helpers
from moonvit.encoder import Encoder

BUDGET = 1e-5
BF16_BUDGET = 3e-2
"""Relative error of bfloat16 against float32 of the same weights: 2^-9 a rounding, three layers deep."""

PAIRS = {"kimi_k25": helpers.kimi_k25_pair, "kimi_vl": helpers.kimi_vl_pair}
CLIPS = {"kimi_k25": helpers.KIMI_CLIPS, "kimi_vl": []}
STILLS = {"kimi_k25": helpers.KIMI_BATCHES, "kimi_vl": helpers.KIMI_BATCHES}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = PAIRS[family](tmp_path_factory.mktemp(family))
        return made[family]

    return get


def cases():
    return [(family, grids) for family in PAIRS for grids in STILLS[family] + CLIPS[family]]


@pytest.mark.parametrize(("family", "grids"), cases(), ids=str)
def test_float32(pairs, family, grids):
    ours, reference = pairs(family)
    pixels = helpers.patches_for(ours, grids)
    with torch.no_grad():
        expected, found = reference(pixels, grids), ours.model(pixels, grids)
    assert len(found) == len(expected) == len(grids)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert helpers.relative_error(mine, theirs) < BUDGET
        assert helpers.least_cosine(mine, theirs) > 1 - 1e-9


@pytest.mark.parametrize("family", PAIRS)
def test_bfloat16(pairs, family):
    ours, _ = pairs(family)
    half = Encoder.from_pretrained(ours.checkpoint.directory, dtype="bfloat16")
    grids = STILLS[family][-1]
    pixels = helpers.patches_for(ours, grids)
    with torch.no_grad():
        expected, found = ours.model(pixels, grids), half.model(pixels, grids)
    for mine, theirs in zip(found, expected, strict=True):
        assert helpers.relative_error(mine, theirs) < BF16_BUDGET


@pytest.mark.parametrize("family", PAIRS)
def test_the_family_is_named(pairs, family):
    assert pairs(family)[0].family == family
