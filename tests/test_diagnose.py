"""Mistakes planted in a copy of the NumPy reference are named from block outputs and `projected` alone."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import save_file

from moonvit.cli import group
from moonvit.encoder import Encoder
from moonvit.pixels.kimi import PixelBatch
from moonvit.trace import record
from moonvit.trace.diagnose import diagnose
from moonvit.trace.dump import Dump
from moonvit.trace.findings import Diagnosis, match
from moonvit.trace.pixelways import CLIP, PixelWays
from moonvit.trace.variants import Machine
from moonvit.trace.weights import Float64Weights
from mutants import (
    BATCH_EDITS,
    CHECKPOINT,
    DATA,
    MUTANTS,
    ONLY_CLIP,
    ONLY_STILL,
    batch_wide,
    build,
    run,
    tiny_weights,
)

Grid = tuple[int, int, int]

STILL, CLIP_GRID = ((1, 4, 6), (1, 6, 4)), (2, 4, 6)
PAIRS = (
    ("rotary-half", "eps-2^-7"),
    ("rotary-swapped", "gelu-erf"),
    ("table-bicubic", "merge-raster"),
    ("table-align_corners", "theta-500000"),
    ("table-antialiased", "qkv-per-head"),
    ("patch-channel-last", "no-final-norm"),
    ("scale-(D/heads)^-0.5", "eps-1e-5"),
    ("rotary-half", "eps-1e-6"),
    ("gelu-erf", "projector-gelu-tanh"),
    ("table-corner", "rope-bfloat16"),
    ("merge-column-major", "projector-gelu-tanh"),
    ("eps-2^-7", "post-norm-before"),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums this small are faster without threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return tiny_weights()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.from_pretrained(CHECKPOINT, dtype="float32")


@pytest.fixture(scope="module")
def float64_weights(encoder: Encoder) -> Float64Weights:
    assert encoder.checkpoint is not None
    return Float64Weights(encoder.checkpoint)


def noise(grid: Grid, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return np.clip(rng.normal(size=(np.prod(grid), 3, 14, 14)) * 0.6, -1, 1).astype(np.float32)


def outputs(stages: dict[str, Any], dtype: Any = np.float32) -> dict[str, Any]:
    """Block outputs and `projected`, as a port would dump them."""
    kept = {n: a for n, a in stages.items() if n == "projected" or (n[:5] == "block" and n.count(".") == 1)}
    return {name: np.ascontiguousarray(array, dtype) for name, array in kept.items()}


def diagnosed(
    dump: dict[str, Any], pixels: Any, grids: Sequence[Grid], encoder: Encoder, weights: Any, where: Path
) -> Diagnosis:
    path = where / "mine.safetensors"
    save_file(dump, path)
    ways = PixelWays(torch.from_numpy(pixels).double(), grids, encoder.processor.config)
    return diagnose(Dump(path), Machine(encoder.config, weights, grids, ways))


def named(found: Diagnosis) -> list[str]:
    assert not found.unexplained
    return sorted(mistake.key for finding in found.findings for mistake in finding.mistakes)


def planted() -> list[tuple[str, Grid]]:
    cases = []
    for key in MUTANTS:
        cases += [(key, grid) for grid in STILL if key not in ONLY_CLIP]
        cases += [(key, CLIP_GRID)] if key not in ONLY_STILL else []
    return cases


@pytest.mark.parametrize(("key", "grid"), planted(), ids=lambda value: str(value).replace(" ", ""))
def test_each_mistake_is_named(key, grid, weights, encoder, float64_weights, tmp_path):
    pixels = noise(grid)
    mutant = build(MUTANTS[key], grid[1] * grid[2])
    dump = outputs(run(mutant, weights, pixels, grid))
    found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
    assert named(found) == [key]
    finding = found.findings[0]
    assert finding.residual < 1e-6
    assert finding.next_best is None or finding.next_best[1] > 10 * finding.residual


@pytest.mark.parametrize("keys", PAIRS, ids=" and ".join)
def test_pairs_are_named(keys, weights, encoder, float64_weights, tmp_path):
    grid = (1, 4, 6)
    pixels = noise(grid, seed=1)
    mutant = build([edit for key in keys for edit in MUTANTS[key]])
    dump = outputs(run(mutant, weights, pixels, grid))
    found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
    assert named(found) == sorted(keys)


@pytest.mark.parametrize("key", ["rotary-half", "table-bicubic", "no-final-norm", "eps-2^-7"])
def test_projected_alone_is_enough(key, weights, encoder, float64_weights, tmp_path):
    grid = (1, 4, 6)
    pixels = noise(grid)
    dump = {"projected": outputs(run(build(MUTANTS[key]), weights, pixels, grid))["projected"]}
    assert named(diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)) == [key]


def test_attention_over_a_whole_batch(weights, encoder, float64_weights, tmp_path):
    grids = [(1, 4, 6), (1, 2, 4)]
    pixels = np.concatenate([noise(grid, seed) for seed, grid in enumerate(grids)])
    mutant = build(BATCH_EDITS)
    batch_wide(mutant)
    dump = outputs(run(mutant, weights, pixels, grids))
    assert named(diagnosed(dump, pixels, grids, encoder, float64_weights, tmp_path)) == ["attention-batch"]


def wrong_pixels(way: str, picture: Image.Image) -> Any:
    """[N, 3, 14, 14] of a picture that needs no resizing, made wrongly, without the processor."""
    rgba = np.asarray(picture.convert("RGBA")).astype(np.float32)
    alpha = rgba[..., 3:] / 255
    if way == "pixels-alpha-dropped":
        rgb = rgba[..., :3]
    elif way == "pixels-alpha-black":
        rgb = np.floor(alpha * rgba[..., :3])
    else:
        y, x = np.mgrid[: picture.height, : picture.width]
        board = np.where((x // 8 + y // 8) % 2 == 0, 255, 180)[..., None].astype(np.float32)
        rgb = np.floor((alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.float32))
    h, w = (-(-side // 28) * 28 for side in (picture.height, picture.width))
    full = np.full((h, w, 3), 128.0 if way == "pixels-pad-gray-128" else 0.0)
    full[: picture.height, : picture.width] = rgb
    mean, std = CLIP if way == "pixels-clip" else ((0.5,) * 3, (0.5,) * 3)
    full = (full / 255 - mean) / std
    full = full[..., ::-1] if way == "pixels-bgr" else full
    cut = full.reshape(h // 14, 14, w // 14, 14, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut.reshape(-1, 3, 14, 14), np.float32)


WAYS = (
    "right",
    "pixels-clip",
    "pixels-bgr",
    "pixels-alpha-dropped",
    "pixels-alpha-black",
    "pixels-pad-gray-128",
)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_pixels_are_named_from_the_picture(way, weights, tmp_path):
    name = DATA / "images/rgba_120x90.png"
    with Image.open(name) as picture:
        pixels = wrong_pixels(way, picture)
    stages = run(build(()), weights, pixels, (1, 8, 10))
    save_file(outputs(stages), tmp_path / "mine.safetensors")
    document, code = cli(tmp_path / "mine.safetensors", str(name))
    keys = [m["key"] for finding in document["findings"] for m in finding["mistakes"]]
    assert keys == ([] if way == "right" else [way])
    assert code == (0 if way == "right" else 1)


def cli(mine: Path, *more: str) -> tuple[Any, int]:
    arguments = ["diagnose", str(mine), "--model", str(CHECKPOINT), "--format", "json", *more]
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    return json.loads(result.stdout), result.exit_code


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_false_alarm_in_fifty_right_runs(dtype, float64_weights, tmp_path):
    encoder = Encoder.from_pretrained(CHECKPOINT, dtype=dtype)
    alarms = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        grid = (int(rng.integers(1, 4)), *(2 * int(side) for side in rng.integers(1, 6, 2)))
        pixels = noise(grid, seed)
        batch = PixelBatch(torch.from_numpy(pixels), torch.tensor([grid]), [(1, 1)])
        with record(encoder, stages=["block.??", "projected"]) as seen:
            encoder.embed(batch)
        dump = {name: value.float().numpy() for name, value in seen.items()}
        found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
        assert found.dtype == dtype
        if not found.good:
            alarms.append((seed, grid, found.findings, found.unexplained))
    assert not alarms


def test_an_unknown_mistake_is_said_to_be_unknown(weights, encoder, float64_weights, tmp_path):
    grid = (1, 4, 6)
    pixels = noise(grid)
    mutant = build(
        [('q_NHd = emit(f"{name}.q", rotate(q_NHd, *cos_sin))', "q_NHd = rotate(q_NHd, *cos_sin) * 1.1")]
    )
    dump = outputs(run(mutant, weights, pixels, grid))
    found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
    assert not found.findings
    assert [lost.stage for lost in found.unexplained] == ["block.00"]
    lost = found.unexplained[0]
    assert lost.best is not None
    assert lost.allowed < lost.best[1] < lost.before


def test_block_order_is_found_out(weights, encoder, float64_weights, tmp_path):
    from moonvit.ops.grid import block_order

    grid = (1, 4, 6)
    pixels = noise(grid)
    dump = outputs(run(build(MUTANTS["rotary-half"]), weights, pixels, grid))
    places = block_order([grid], 2).numpy()
    dump = {n: np.ascontiguousarray(a[places]) if n.startswith("block") else a for n, a in dump.items()}
    found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
    assert found.order == "block"
    assert named(found) == ["rotary-half"]


def test_bfloat16_dumps_show_what_is_larger_than_their_rounding(weights, encoder, float64_weights, tmp_path):
    """Every stage rounded to bfloat16: rotary and merge mistakes are seen, an epsilon of 1e-5 cannot be."""
    grid = (1, 4, 6)
    pixels = noise(grid)
    for key, want in {
        "rotary-half": ["rotary-half"],
        "merge-raster": ["merge-raster"],
        "eps-1e-5": [],
    }.items():
        stages = outputs(run(build(MUTANTS[key]), weights, pixels, grid))
        dump = {n: torch.from_numpy(a).bfloat16().float().numpy() for n, a in stages.items()}
        found = diagnosed(dump, pixels, [grid], encoder, float64_weights, tmp_path)
        assert found.dtype == "bfloat16"
        assert named(found) == want


def test_a_hidden_effect_must_have_its_own_strength() -> None:
    rng = np.random.default_rng(0)
    rounding, effect = rng.normal(size=(2, 4000))
    assert match([(effect + 0.8 * rounding, effect)]) is not None
    assert match([(rounding, effect)]) is None
    assert match([(0.1 * effect + 0.01 * rounding, effect)]) is None
    assert match([(2 * effect, effect)]) is None
    assert match([(effect + 50 * rounding, effect)]) is None
    assert match([(rounding, np.zeros(4000))]) is None
