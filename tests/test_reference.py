"""The NumPy reference against the float64 goldens, against torch, and by hand."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from moonvit import reference as ref

DATA = Path(__file__).parent / "data"
CHECKPOINT = DATA / "k3-tiny"
CASES = ("wide", "tall", "square", "large", "table", "clip")
GOLDEN_STAGES = ("patch_embed", "embed", "final_norm", "merged", "projected")
BLOCK_STAGES = (
    *("norm0", "q_unrotated", "k_unrotated", "q", "k", "v"),
    *("attn_out", "attn_residual", "norm1", "mlp_hidden"),
)
TOLERANCE = 1e-6  # relative L2; the goldens are float64 results stored as float32


@pytest.fixture(scope="module")
def weights() -> Mapping[str, NDArray[Any]]:
    """The tiny checkpoint's vision tensors, bfloat16 widened to float32 (exact)."""
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    vision = {n: f for n, f in index.items() if n.startswith(("vision_tower.", "mm_projector."))}
    files = {f: load_torch(CHECKPOINT / f) for f in set(vision.values())}
    return {n: files[f][n].float().numpy() for n, f in vision.items()}


@pytest.fixture(scope="module")
def golden() -> Mapping[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = load_file(DATA / "golden/k3_tiny.safetensors")
    return tensors


@pytest.fixture(scope="module")
def geometry() -> ref.Geometry:
    vision = json.loads((CHECKPOINT / "config.json").read_text())["vision_config"]
    return ref.Geometry(
        num_heads=vision["vt_num_attention_heads"],
        num_layers=vision["vt_num_hidden_layers"],
        norm_eps=1.1920928955078125e-07,
        projector_eps=vision["projector_ln_eps"],
    )


def grid_of(golden: Mapping[str, NDArray[Any]], case: str) -> ref.Grid:
    t, h, w = golden[f"{case}/grid_thw"].tolist()
    return t, h, w


def run(
    case: str,
    weights: Mapping[str, NDArray[Any]],
    geometry: ref.Geometry,
    golden: Mapping[str, NDArray[Any]],
) -> dict[str, ref.F64]:
    """Every stage of a golden case, in the order given out."""
    seen: dict[str, ref.F64] = {}

    def keep(name: str, array: ref.F64) -> None:
        assert name not in seen
        seen[name] = array

    pixels = golden[f"{case}/pixel_values"]
    out = ref.trace(weights, geometry, pixels, grid_of(golden, case), keep)
    assert out is seen["projected"]
    return seen


def relative_l2(got: NDArray[Any], want: NDArray[Any]) -> float:
    assert got.shape == want.shape
    wide = want.astype(np.float64)
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("case", CASES)
def test_every_golden_stage(case, weights, geometry, golden):  # type: ignore[no-untyped-def]
    seen = run(case, weights, geometry, golden)
    names = {n.split("/", 1)[1] for n in golden if n.startswith(f"{case}/")}
    names -= {"pixel_values", "grid_thw", "rope_angles"}
    assert names == {*GOLDEN_STAGES, "block.00", "block.01", "block.02"}
    errors = {n: relative_l2(seen[n], golden[f"{case}/{n}"]) for n in sorted(names)}
    angles = golden[f"{case}/rope_angles"].astype(np.float64)
    errors["rope_cos"] = relative_l2(seen["rope_cos"], np.cos(angles))
    # A sine of 0 has no relative error of its own: the whole table's norm is the scale.
    errors["rope_sin"] = relative_l2(seen["rope_sin"], np.sin(angles))
    assert max(errors.values()) <= TOLERANCE, errors


def test_stages_names_order_and_shapes(weights, geometry, golden):  # type: ignore[no-untyped-def]
    seen = run("clip", weights, geometry, golden)
    blocks: list[str] = []
    for i in range(3):
        blocks += [f"block.{i:02d}.{stage}" for stage in BLOCK_STAGES] + [f"block.{i:02d}"]
    before = ["pixels", "patch_embed", "pos_embed", "embed", "rope_cos", "rope_sin"]
    after = ["final_norm", "merged", "proj_hidden", "projected"]
    assert list(seen) == before + blocks + after
    assert all(array.dtype == np.float64 for array in seen.values())
    shapes = {
        "pixels": (72, 3, 14, 14),
        "pos_embed": (72, 64),
        "rope_cos": (72, 16),
        "block.01.q": (72, 3, 32),
        "block.01.v": (72, 3, 32),
        "block.01.attn_out": (72, 64),
        "block.01.mlp_hidden": (72, 128),
        "proj_hidden": (6, 256),
    }
    assert {name: seen[name].shape for name in shapes} == shapes


def test_inputs_are_left_alone_and_stages_are_optional(weights, geometry, golden):  # type: ignore[no-untyped-def]
    frozen = {name: array.copy() for name, array in weights.items()}
    pixels = golden["clip/pixel_values"].astype(np.float64)
    before = pixels.copy()
    for array in (pixels, *frozen.values()):
        array.setflags(write=False)
    out = ref.trace(frozen, geometry, pixels, (3, 4, 6))
    np.testing.assert_array_equal(out, run("clip", weights, geometry, golden)["projected"])
    np.testing.assert_array_equal(pixels, before)


def test_a_rotated_query_by_hand() -> None:
    """e0 turns with the column, e2 with the row; their partners are the next channels."""
    angle_NP = ref.rotary_angles((1, 2, 2), 8)
    cos_NP, sin_NP = np.cos(angle_NP), np.sin(angle_NP)
    unit_Hd = np.eye(8)[[0, 2]]  # two heads: e0 and e2
    turned_NHd = ref.rotate(np.broadcast_to(unit_Hd, (4, 2, 8)), cos_NP, sin_NP)
    one = [math.cos(1), math.sin(1)]
    at_column_1, at_row_1 = turned_NHd[1], turned_NHd[2]
    np.testing.assert_allclose(at_column_1[0], [*one, 0, 0, 0, 0, 0, 0], rtol=0, atol=1e-16)
    np.testing.assert_array_equal(at_column_1[1], unit_Hd[1])
    np.testing.assert_array_equal(at_row_1[0], unit_Hd[0])
    np.testing.assert_allclose(at_row_1[1], [0, 0, *one, 0, 0, 0, 0], rtol=0, atol=1e-16)


def test_rotary_angles_repeat_over_frames() -> None:
    still = ref.rotary_angles((1, 3, 5), 16)
    clip = ref.rotary_angles((2, 3, 5), 16)
    np.testing.assert_array_equal(np.concatenate([still, still]), clip)


def test_merge_order_by_hand() -> None:
    """Patch k is the constant k on a 4x4 grid; the first merged row is patches 0, 1, 4, 5."""
    merged_MC = ref.merge_cells(np.arange(16.0)[:, None], (1, 4, 4), (2, 2))
    rows = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    np.testing.assert_array_equal(merged_MC, rows)


def test_merge_takes_the_mean_over_frames() -> None:
    patches = np.concatenate([np.arange(8.0), np.arange(8.0) + 10])[:, None]
    merged_MC = ref.merge_cells(patches, (2, 2, 4), (2, 2))
    np.testing.assert_array_equal(merged_MC, [[5, 6, 9, 10], [7, 8, 11, 12]])


def test_a_ramp_resampled_by_hand() -> None:
    """W[y, x] = y from 64 rows to 16: centres 1.5, 5.5, ...; to 128: edges are clamped."""
    ramp = np.broadcast_to(np.arange(64.0)[:, None, None], (64, 64, 1))
    small = ref.resample(ramp, 16, 16)
    np.testing.assert_array_equal(small[:, 0, 0], 4 * np.arange(16) + 1.5)
    np.testing.assert_array_equal(small, np.broadcast_to(small[:, :1], small.shape))
    big = ref.resample(ramp, 128, 3)[:, 1, 0]
    np.testing.assert_array_equal(big[[0, 1, 2, -2, -1]], [0, 0.25, 0.75, 62.75, 63])


def test_an_impulse_vanishes_without_antialias() -> None:
    table = np.zeros((64, 64, 1))
    table[32, 32] = 1
    assert not ref.resample(table, 16, 16).any()
    assert ref.resample(table, 64, 64) is table


@pytest.mark.parametrize(("h", "w"), [(2, 6), (6, 2), (64, 32), (70, 64), (8, 120), (1, 1), (100, 90)])
def test_resampling_equals_torch(h: int, w: int) -> None:
    table = np.random.default_rng(0).normal(size=(64, 64, 5))
    channels_first = torch.from_numpy(table).permute(2, 0, 1)[None]
    want = F.interpolate(channels_first, size=(h, w), mode="bilinear", align_corners=False)
    got = ref.resample(table, h, w)
    np.testing.assert_allclose(got, want[0].permute(1, 2, 0).numpy(), rtol=0, atol=1e-13)


def test_time_rows_only_in_clips() -> None:
    table = np.zeros((4, 4, 6))
    assert not ref.positions(table, (1, 2, 2)).any()
    rows = ref.positions(table, (2, 2, 2))
    np.testing.assert_array_equal(rows[:4], np.broadcast_to([0, 0, 0, 1, 1, 1], (4, 6)))
    angles = [1, 10000 ** (-1 / 3), 10000 ** (-2 / 3)]
    want = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    np.testing.assert_allclose(rows[4:], np.broadcast_to(want, (4, 6)), rtol=0, atol=1e-15)


def test_attention_equals_torch_and_ignores_the_chunk() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 37, 3, 8)) * 3
    tq, tk, tv = (torch.from_numpy(x).transpose(0, 1) for x in (q, k, v))
    want = F.scaled_dot_product_attention(tq, tk, tv).transpose(0, 1).reshape(37, 24)
    for chunk in (1, 8, 37, 256):
        got = ref.attention(q, k, v, chunk)
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-13)


def test_activations_and_norm_equal_torch() -> None:
    x = np.linspace(-9, 9, 4001).reshape(-1, 1)
    t = torch.from_numpy(x)
    np.testing.assert_allclose(ref.gelu_erf(x), F.gelu(t).numpy(), rtol=0, atol=2e-15)
    tanh = F.gelu(t, approximate="tanh").numpy()
    np.testing.assert_allclose(ref.gelu_tanh(x), tanh, rtol=0, atol=2e-15)
    np.testing.assert_allclose(
        ref.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.5),
        [[3 / math.sqrt(13), 8 / math.sqrt(13)]],
        rtol=1e-15,
    )


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 3), (1, 3, 4), (2, 2, 6), (1, -2, -6)])
def test_a_grid_that_does_not_fit_is_refused(grid, weights, geometry):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(f"grid_thw={grid}")):
        ref.trace(weights, geometry, np.zeros((12, 3, 14, 14)), grid)


def test_another_interpolation_is_refused(weights, geometry):  # type: ignore[no-untyped-def]
    bicubic = dataclasses.replace(geometry, interpolation="bicubic")
    with pytest.raises(ValueError, match="not 'bicubic'"):
        ref.trace(weights, bicubic, np.zeros((4, 3, 14, 14)), (1, 2, 2))
