"""Every family against its reference, float32 and bfloat16, over checkpoints that the real loader reads."""

import pytest
import torch

import parity_helpers as helpers

BUDGET = 1e-5
BF16_BUDGET = 2e-2
"""Relative error of bfloat16 against float32 of the same weights: 2^-9 a rounding, three layers deep."""

PAIRS = helpers.PAIRS


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = PAIRS[family](tmp_path_factory.mktemp("family"))
        return made[family]

    return get


def cases():
    return [
        (family, grids) for family in PAIRS for grids in helpers.stills_of(family) + helpers.clips_of(family)
    ]


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
    worst, least = helpers.bfloat16_figures(pairs(family)[0], helpers.stills_of(family)[-1:])
    assert worst < BF16_BUDGET
    assert least > 1 - BF16_BUDGET**2


@pytest.mark.parametrize("family", PAIRS)
def test_the_family_is_named(pairs, family):
    assert pairs(family)[0].family == family.partition(" ")[0]


@pytest.mark.parametrize("grids", helpers.QWEN_BATCHES + helpers.QWEN_CLIPS, ids=str)
def test_deepstack(pairs, grids):
    """Each listed layer's features, in the order of the list."""
    ours, reference = pairs("qwen3_vl")
    pixels = helpers.patches_for(ours, grids)
    with torch.no_grad():
        expected = reference.visual(pixels, grid_thw=torch.tensor(grids)).deepstack_features
        found = ours.model.run(pixels, grids)
    assert len(found.deepstack) == len(expected) == 2
    for mine, theirs in zip(found.deepstack, expected, strict=True):
        assert [len(rows) for rows in mine] == [len(rows) for rows in found.embeddings]
        assert helpers.relative_error(torch.cat(mine), theirs) < BUDGET


@pytest.mark.parametrize("layers", [(2, 0), (1, 3)])
def test_deepstack_comes_from_the_first_layer_up(tmp_path, layers):
    """Whatever the order of the list, which says whose projector a layer has."""
    ours, reference = helpers.qwen3_vl_pair(tmp_path, layers)
    grids = helpers.QWEN_BATCHES[0]
    pixels = helpers.patches_for(ours, grids)
    with torch.no_grad():
        expected = reference.visual(pixels, grid_thw=torch.tensor(grids)).deepstack_features
        found = ours.model.run(pixels, grids).deepstack
    for mine, theirs in zip(found, expected, strict=True):
        assert helpers.relative_error(torch.cat(mine), theirs) < BUDGET


def test_both_layouts_hold_the_same_weights(pairs):
    """Joined, un-permuted q, k, v and biases are bit-equal to what transformers writes in the raw layout."""
    native, raw = (pairs(f"kimi_k25 ({kind})")[0].model for kind in ("transformers", "transformers, raw"))
    for (name, mine), theirs in zip(native.state_dict().items(), raw.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
