"""The patch operations of the other families on a 4x4 picture of numbered patches."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from moonvit.configs.qwen import QwenPixels
from moonvit.ops.attention import segment_attention
from moonvit.ops.grid import block_order, block_positions, frame_lengths, raster_order
from moonvit.ops.merging import merge_blocks, merge_cells
from moonvit.ops.patchify import block_patches, raster_patches
from moonvit.ops.positions import resample_table, time_table
from moonvit.ops.rotary import half_table, rope_angles, rotate_halves
from moonvit.ops.windows import reorder_blocks, window_order
from moonvit.pixels.qwen import QwenProcessor

FOUR = [(1, 4, 4)]
BLOCKS = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_block_order():
    assert block_order(FOUR, 2).tolist() == BLOCKS
    assert block_order([(2, 2, 4)], 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_raster_order_undoes_it():
    grids = [(1, 4, 6), (3, 2, 8)]
    patches = torch.arange(24 + 48)
    assert torch.equal(patches[block_order(grids, 2)][raster_order(grids, 2)], patches)


def test_orders_that_do_not_fit():
    with pytest.raises(ValueError, match="3x4 patches cannot be cut into 2x2 cells"):
        block_order([(1, 3, 4)], 2)


def test_positions_follow_the_patches():
    rows, columns = block_positions(4, 4, 2)
    assert (4 * rows + columns).tolist() == BLOCKS
    assert rows.tolist()[:8] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_merging_blocks_is_merging_cells():
    patches = torch.randn(24, 3)
    order = block_order([(1, 4, 6)], 2)
    assert torch.equal(merge_blocks(patches[order], 2), merge_cells(patches, (1, 4, 6), 2))
    assert merge_blocks(torch.arange(16.0)[block_order(FOUR, 2)][:, None], 2)[0].tolist() == [0, 1, 4, 5]


def numbered_strip(width: int, lines: int = 4) -> np.ndarray:
    """Lines whose red is 10·row + column, as a strip [lines, 3, width]."""
    strip = np.zeros((lines, 3, width), np.float32)
    strip[:, 0] = 10 * np.arange(lines)[:, None] + np.arange(width)
    return strip


def test_patches_of_numbered_pixels_in_block_order():
    """The upper two lines of a 4x4 picture, patches of one pixel: cell by cell, row by row within."""
    found = block_patches(numbered_strip(4)[:2], patch=1, size=2)
    assert found.shape == (2, 2, 2, 3, 1, 1)
    assert found[:, :, :, 0].flatten().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_pairs_of_frames_and_an_odd_rest():
    """Three frames of level 1, 2, 3: the pairs are (1, 2) and (3, 3); a still stands for both."""
    config = QwenPixels(
        patch_size=1, merge_size=2, temporal_patch_size=2, min_pixels=4, max_pixels=4, resample=3,
        rescale_factor=1.0, mean=(0.0,) * 3, std=(1.0,) * 3,
    )  # fmt: skip
    processor = QwenProcessor(config)
    frames = [Image.new("RGB", (2, 2), (level,) * 3) for level in (1, 2, 3)]
    clip = processor.pack([processor.clip(frames, (2, 2))])
    assert clip.grid_thws.tolist() == [[2, 2, 2]]
    found = clip.pixel_values.reshape(2, 4, 3, 2)
    assert found[0, 0].tolist() == [[1, 2]] * 3
    assert found[1, 3].tolist() == [[3, 3]] * 3
    assert processor(frames[1]).pixel_values.tolist() == [[2] * 6] * 4


def test_windows_of_numbered_cells():
    """3x3 cells in windows of 2x2: the last row and column are cut off."""
    order, lengths = window_order([(1, 6, 6)], 2, 2)
    assert order.tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert lengths == [16, 8, 8, 4]


def test_windows_stay_in_their_frame_and_picture():
    order, lengths = window_order([(2, 2, 4), (1, 4, 2)], 2, 2)
    assert order.tolist() == [0, 1, 2, 3, 4, 5]
    assert lengths == [8, 8, 8]


def test_blocks_are_moved_whole():
    rows = torch.arange(8)[:, None]
    assert reorder_blocks(rows, torch.tensor([1, 0]), 4).flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


def test_half_split_turns():
    """Head size 8: pair i is features i and i + 4; pairs 0, 1 turn by the row, 2, 3 by the column."""
    cos, sin = half_table([(1, 2, 2)], 8, 10000.0, torch.float32, 2)
    x = torch.zeros(4, 1, 8)
    x[:, 0, 0] = 1
    found = rotate_halves(x, cos, sin)[:, 0]
    torch.testing.assert_close(found[1], x[1, 0])  # row 0, column 1
    torch.testing.assert_close(found[2, [0, 4]], torch.tensor([math.cos(1), math.sin(1)]))  # row 1
    x = torch.zeros(4, 1, 8)
    x[:, 0, 2] = 1
    found = rotate_halves(x, cos, sin)[:, 0]
    torch.testing.assert_close(found[1, [2, 6]], torch.tensor([math.cos(1), math.sin(1)]))
    torch.testing.assert_close(found[2], x[2, 0])


def test_aligned_corners():
    table = torch.arange(3.0)[None, :, None].expand(3, 3, 1)
    found = resample_table(table, 2, 5, "bilinear", torch.float32, align_corners=True)
    assert found.view(2, 5)[0].tolist() == [0, 0.5, 1, 1.5, 2]


def test_frames_are_segments():
    assert frame_lengths([(2, 2, 4), (1, 2, 2)]) == [8, 8, 4]


def numbered() -> torch.Tensor:
    """The 4x4 picture whose patches are numbered 0 to 15, row by row, [4, 4, 1]."""
    return torch.arange(16.0).view(4, 4, 1)


def resampled(mode: str, side: int, align_corners: bool = False) -> list[list[float]]:
    found = resample_table(numbered(), side, side, mode, torch.float32, align_corners)
    return found.view(side, side).tolist()


def test_four_by_four_bilinear():
    """Each new point lies in the middle of four patches: (0+1+4+5)/4 = 2.5."""
    assert resampled("bilinear", 2) == [[2.5, 4.5], [10.5, 12.5]]


def test_four_by_four_bicubic():
    """Taps -3/32, 19/32, 19/32, -3/32 on 0 0 1 2 give 13/32, on 1 2 3 3 they give 83/32; rows count 4."""
    first, second = 13 / 32, 83 / 32
    expected = [[4 * y + x for x in (first, second)] for y in (first, second)]
    torch.testing.assert_close(torch.tensor(resampled("bicubic", 2)), torch.tensor(expected))


def test_four_by_four_corner_to_corner():
    assert resampled("bilinear", 2, align_corners=True) == [[0, 3], [12, 15]]
    assert resampled("bilinear", 3, align_corners=True)[1] == [6, 7.5, 9]


def test_four_by_four_in_windows_of_two_by_two():
    """A patch is a cell here, so windows of two cells are merge blocks."""
    order, lengths = window_order(FOUR, 1, 2)
    assert order.tolist() == BLOCKS
    assert lengths == [4] * 4
    assert window_order(FOUR, 2, 1)[0].tolist() == [0, 1, 2, 3]


def test_four_by_four_rotary_angles():
    """Head size 4 has one frequency, 1: the angles are column and row (Kimi), row and column (Qwen)."""
    pairs = rope_angles(4, 4, 4, 10000.0)
    assert pairs.tolist() == [[n % 4, n // 4] for n in range(16)]
    cos, sin = half_table(FOUR, 4, 10000.0, torch.float64, 2)
    expected = torch.tensor([[n // 4, n % 4] for n in BLOCKS], dtype=torch.float64)
    assert torch.equal(cos, expected.cos())
    assert torch.equal(sin, expected.sin())


def test_clips_repeat_the_half_split_table():
    cos, _ = half_table([(2, 4, 4), (1, 2, 2)], 8, 10000.0, torch.float32, 2)
    assert cos.shape == (36, 4)
    assert torch.equal(cos[:16], cos[16:32])


def test_four_by_four_attention_takes_means():
    """With equal keys a patch gets the mean of its segment: rows 0 and 1, row 2, row 3."""
    zeros = torch.zeros(16, 1, 1)
    found = segment_attention(zeros, zeros, torch.arange(16.0).view(16, 1, 1), [8, 4, 4]).flatten()
    torch.testing.assert_close(found, torch.tensor([3.5] * 8 + [9.5] * 4 + [13.5] * 4))


def test_four_by_four_pixels_into_patches_of_two():
    """Raster and block order of the same four patches of 2x2 pixels; blocks of one cell keep the order."""
    strip = numbered_strip(4)
    numbers = [[0, 1, 10, 11], [2, 3, 12, 13], [20, 21, 30, 31], [22, 23, 32, 33]]
    raster = np.concatenate([raster_patches(strip[:2], 2), raster_patches(strip[2:], 2)])
    assert raster[:, 0].reshape(4, 4).tolist() == numbers
    assert block_patches(strip, patch=2, size=2)[:, :, :, 0].reshape(4, 4).tolist() == numbers
    single = [
        block_patches(half, patch=2, size=1)[:, 0, 0, 0].reshape(2, 4) for half in (strip[:2], strip[2:])
    ]
    assert np.concatenate(single).tolist() == numbers


def test_temporal_rows_by_eye():
    """Width 4: sines then cosines of f and f/100."""
    table = time_table(2, 4, torch.float64)
    expected = [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]
    torch.testing.assert_close(table[1], torch.tensor(expected, dtype=torch.float64))
