"""The patch operations on inputs small enough to check by eye."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from moonvit.ops.attention import segment_attention
from moonvit.ops.grid import as_grids, lengths, raster_positions
from moonvit.ops.merging import merge_cells
from moonvit.ops.patchify import normalized, raster_patches
from moonvit.ops.positions import grid_positions, resample_table, time_table
from moonvit.ops.rotary import rope_angles, rope_table, rotate_pairs
from moonvit.pixels.base import strips


def unit(index: int, d: int = 8) -> torch.Tensor:
    vector = torch.zeros(1, 1, d)
    vector[0, 0, index] = 1
    return vector


def turned(index: int, row: int, column: int) -> torch.Tensor:
    cos, sin = rope_table([(1, row + 1, column + 1)], 8, 10000.0, torch.float32)
    return rotate_pairs(unit(index), cos[-1:], sin[-1:])[0, 0]


def test_first_pair_turns_with_the_column():
    torch.testing.assert_close(turned(0, 0, 1)[:2], torch.tensor([math.cos(1), math.sin(1)]))
    torch.testing.assert_close(turned(0, 1, 0), unit(0)[0, 0])


def test_second_pair_turns_with_the_row():
    torch.testing.assert_close(turned(2, 1, 0)[2:4], torch.tensor([math.cos(1), math.sin(1)]))
    torch.testing.assert_close(turned(2, 0, 1), unit(2)[0, 0])


def test_third_pair_turns_slower():
    angle = 3 * 10000 ** (-4 / 8)
    torch.testing.assert_close(turned(4, 0, 3)[4:6], torch.tensor([math.cos(angle), math.sin(angle)]))


def test_angles_repeat_over_frames():
    cos, _ = rope_table([(3, 2, 4)], 8, 10000.0, torch.float32)
    assert torch.equal(cos[:8], cos[8:16])
    assert torch.equal(cos[:8], cos[16:])


def test_angles_of_a_wide_grid():
    angles = rope_angles(2, 3, 4, 10000.0)
    assert angles.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]


def test_raster_positions():
    rows, columns = raster_positions(2, 3)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert columns.tolist() == [0, 1, 2, 0, 1, 2]


def test_merge_order():
    patches = torch.arange(16.0)[:, None]
    assert merge_cells(patches, (1, 4, 4), 2).tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_merge_wide_and_tall():
    patches = torch.arange(12.0)[:, None]
    assert merge_cells(patches, (1, 2, 6), 2).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert merge_cells(patches, (1, 6, 2), 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_merge_takes_the_mean_over_frames():
    patches = torch.arange(8.0)[:, None]
    assert merge_cells(patches, (2, 2, 2), 2).tolist() == [[2, 3, 4, 5]]


def test_table_of_rows_resampled():
    table = torch.arange(64.0)[:, None, None].expand(64, 64, 1)
    found = resample_table(table, 16, 16, "bilinear", torch.float32).view(16, 16)
    assert found[0].tolist() == [1.5] * 16
    assert found[-1, 0].item() == 61.5


def test_no_antialias():
    table = torch.zeros(64, 64, 1)
    table[32, 32] = 1
    assert resample_table(table, 16, 16, "bilinear", torch.float32).abs().max() == 0


def test_table_of_its_own_size_is_untouched():
    table = torch.randn(6, 4, 3)
    assert torch.equal(resample_table(table, 6, 4, "bilinear", torch.float32), table.flatten(0, 1))
    assert not torch.equal(resample_table(table, 4, 6, "bilinear", torch.float32), table.flatten(0, 1))


def test_edges_are_clamped():
    table = torch.tensor([[1.0, 3.0]])[:, :, None]
    found = resample_table(table, 1, 4, "bilinear", torch.float32)
    assert found.flatten().tolist() == [1.0, 1.5, 2.5, 3.0]


def test_time_rows():
    table = time_table(3, 4, torch.float32)
    assert table[0].tolist() == [0, 0, 1, 1]
    expected = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    torch.testing.assert_close(table[2], torch.tensor(expected))


def test_stills_get_no_time_row():
    table = torch.randn(2, 2, 4)
    assert torch.equal(grid_positions(table, [(1, 2, 2)], "bilinear", torch.float32), table.flatten(0, 1))
    clip = grid_positions(table, [(2, 2, 2)], "bilinear", torch.float32)
    torch.testing.assert_close(clip[0], table[0, 0] + torch.tensor([0.0, 0, 1, 1]))


@pytest.mark.parametrize("lengths", [[5], [3, 3], [4, 7, 7, 2]])
def test_attention_is_per_segment(lengths):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=generator, dtype=torch.float64).unbind()
    found = segment_attention(q, k, v, lengths)
    start = 0
    for length in lengths:
        window = slice(start, start + length)
        scores = torch.einsum("nhd,mhd->hnm", q[window], k[window]) / math.sqrt(8)
        expected = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[window])
        torch.testing.assert_close(found[window], expected, rtol=1e-12, atol=1e-12)
        start += length


def test_patches_of_numbered_pixels():
    """2x2 patches of a 4x5 picture whose red is 10*row + column; what lies beside it is black."""
    picture = np.zeros((4, 5, 3), np.uint8)
    picture[:, :, 0] = 10 * np.arange(4)[:, None] + np.arange(5)
    bands = list(strips(Image.fromarray(picture), 2, 3, 6))
    assert [band.shape for band in bands] == [(2, 3, 6)] * 3
    out = np.concatenate([raster_patches(normalized(b, (0.0,) * 3, (1 / 255,) * 3), 2) for b in bands])
    red = out[:, 0].round().astype(int).tolist()
    assert red[:3] == [[[0, 1], [10, 11]], [[2, 3], [12, 13]], [[4, 0], [14, 0]]]
    assert red[3] == [[20, 21], [30, 31]]
    assert not out[6:].any()
    assert not out[:, 1:].any()


def test_levels_are_normalised_in_float32():
    """Every level by hand: divided, less the mean, divided, each step rounded to float32."""
    strip = np.arange(256, dtype=np.uint8)[None, None].repeat(3, axis=1)
    found = normalized(strip, (0.5, 0.4, 0.3), (0.5, 0.25, 0.3))
    for channel, (mean, std) in enumerate([(0.5, 0.5), (0.4, 0.25), (0.3, 0.3)]):
        expected = [
            (np.float32(x) / np.float32(255) - np.float32(mean)) / np.float32(std) for x in range(256)
        ]
        assert found[0, channel].tolist() == expected


@pytest.mark.parametrize(
    "grid", [[[1, 2, 4]], torch.tensor([[1, 2, 4]]), np.array([[2, 4]]), [(2, 4)]], ids=str
)
def test_grids_in_any_form(grid):
    assert as_grids(grid) == [(1, 2, 4)]
    assert lengths(as_grids(grid)) == [8]


@pytest.mark.parametrize(
    "grid", [[[1, 2]] + [[1]], [[0, 2, 2]], [[1, 2.5, 2]], [1, 2, 4], [[1, 1, 2, 2]]], ids=str
)
def test_grids_that_are_none(grid):
    with pytest.raises((ValueError, TypeError)):
        as_grids(grid)


def test_unequal_pictures_share_one_packed_call(monkeypatch):
    """What CUDA in half precision does, with a stand-in for PyTorch's kernel that checks what it is given."""
    from moonvit.ops import attention

    q, k, v = torch.randn(3, 30, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    lengths = attention.Segments([4, 20, 6])
    expected = attention.segment_attention(q, k, v, lengths)
    calls = []

    def kernel(query, key, value, starts, key_starts, longest, longest_key):
        calls.append(starts)
        assert starts.dtype == key_starts.dtype == torch.int32
        assert longest == longest_key == 20
        sizes = starts.diff().tolist()
        return attention.segment_attention(query, key, value, sizes)

    real = attention.takes_packed
    assert not real(q)
    monkeypatch.setattr(attention, "takes_packed", lambda x: not calls)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
    assert torch.equal(attention.segment_attention(q, k, v, lengths), expected)
    assert calls[0].tolist() == [0, 4, 24, 30]
    assert lengths.offsets(q.device) is calls[0]  # one copy to the device a pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_packed_attention_on_cuda():
    from moonvit.ops.attention import segment_attention

    q, k, v = torch.randn(3, 300, 2, 64, device="cuda").bfloat16().unbind(0)
    found = segment_attention(q, k, v, [100, 50, 150])
    expected = segment_attention(q.float(), k.float(), v.float(), [100, 50, 150])
    assert (found.float() - expected).norm() < 1e-2 * expected.norm()
