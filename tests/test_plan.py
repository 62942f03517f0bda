"""Sizes and token counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import pixel_config
from moonvit.pixels.plan import plan_image

SIDES = st.one_of(st.integers(1, 60), st.integers(1, 30000))


@pytest.mark.parametrize(
    ("size", "tokens", "grid"),
    [
        ((4000, 3000), 15444, (1, 216, 286)),
        ((448, 449), 272, (1, 34, 32)),
        ((449, 448), 272, (1, 32, 34)),
        ((29, 28), 2, (1, 2, 4)),
        ((1, 1), 1, (1, 2, 2)),
        ((13, 13), 1, (1, 2, 2)),
        ((27, 28), 1, (1, 2, 2)),
        ((1, 20000), 256, (1, 512, 2)),
        ((3585, 3585), 66564 // 4, (1, 258, 258)),
        ((1093, 5), 40, (1, 2, 80)),
    ],
)
def test_known_sizes(size, tokens, grid):
    plan = plan_image(*size, pixel_config())
    assert (plan.tokens, plan.grid) == (tokens, grid)


def test_truncation_not_rounding():
    plan = plan_image(7169, 28, pixel_config())
    assert (plan.new_width, plan.new_height) == (7168, 27)
    plan = plan_image(1, 20000, pixel_config())
    assert (plan.new_width, plan.new_height) == (1, 7168)


def test_budget_comes_from_the_config():
    assert plan_image(4000, 3000, pixel_config(in_patch_limit=16384)).tokens == 4200


@pytest.mark.parametrize("k", range(1, 41))
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_padding(k, off):
    side = 28 * k + off
    plan = plan_image(side, 28, pixel_config())
    assert plan.pad_width == -side % 28
    assert plan.new_width == side


@given(SIDES, SIDES)
def test_plan_is_consistent(width, height):
    plan = plan_image(width, height, pixel_config())
    _, h, w = plan.grid
    assert 1 <= plan.new_width <= min(width, 7168)
    assert 1 <= plan.new_height <= min(height, 7168)
    assert (w * 14, h * 14) == (plan.new_width + plan.pad_width, plan.new_height + plan.pad_height)
    assert 0 <= plan.pad_width < 28
    assert 0 <= plan.pad_height < 28
    assert plan.tokens == h * w // 4
    assert max(h, w) <= 512


@given(SIDES, SIDES, st.integers(1, 20000))
def test_max_tokens_holds_and_only_lowers(width, height, max_tokens):
    config = pixel_config()
    free, bound = plan_image(width, height, config), plan_image(width, height, config, max_tokens)
    assert bound.tokens <= min(max_tokens, free.tokens)
    if free.tokens <= max_tokens:
        assert bound == free


def test_max_tokens_uses_the_room():
    assert plan_image(4000, 3000, pixel_config(), 1000).tokens > 950


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_no_pixels(size):
    with pytest.raises(ValueError, match="at least 1x1"):
        plan_image(*size, pixel_config())


def test_max_tokens_zero():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        plan_image(100, 100, pixel_config(), 0)
