"""Traces: goldens, files, statistics, orders, selections; and the cost of nothing when off."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import CASES, IMAGES, TINY
from moonvit.cli import group
from moonvit.encoder import Encoder
from moonvit.errors import ImageError, MoonvitError
from moonvit.ops.grid import block_order, raster_order
from moonvit.pixels.kimi import PixelBatch
from moonvit.towers.kimi_k3 import no_tap
from moonvit.trace import record, statistics, write_trace
from moonvit.trace.patterns import draw, parse_size
from moonvit.trace.selftest import selftest
from moonvit.trace.stages import Selection, parse_layers, stage_names


def golden_batch(golden, case):
    return PixelBatch(golden[f"{case}/pixel_values"], golden[f"{case}/grid_thw"][None], [(1, 1)])


def run(*arguments):
    return CliRunner().invoke(group, [str(a) for a in arguments], catch_exceptions=False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-7)])
def test_traces_equal_the_goldens(case, dtype, tolerance, golden, tmp_path):
    encoder = Encoder.from_pretrained(TINY, dtype=dtype)
    write_trace(encoder, golden_batch(golden, case), tmp_path / "t.safetensors")
    trace = load_file(tmp_path / "t.safetensors")
    names = [name for name in trace if f"{case}/{name}" in golden]
    assert set(names) == {
        *("patch_embed", "embed", "block.00", "block.01", "block.02", "final_norm", "merged", "projected")
    }
    for name in names:
        got, want = trace[name].double(), golden[f"{case}/{name}"].double()
        assert float((got - want).norm() / want.norm()) <= tolerance, name
    angles = golden[f"{case}/rope_angles"].double()
    torch.testing.assert_close(trace["rope_cos"].double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(trace["rope_sin"].double(), angles.sin(), rtol=0, atol=1e-6)


def test_every_stage_is_there_in_order_with_statistics(encoder, golden, tmp_path):
    path = tmp_path / "t.safetensors"
    table = write_trace(encoder, golden_batch(golden, "clip"), path)
    assert list(table) == stage_names(3)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {*stage_names(3), "grid_thws"}
        value = file.get_tensor("block.01.mlp_hidden").double()
        assert file.get_tensor("grid_thws").tolist() == [[3, 4, 6]]
    assert json.loads(metadata["statistics"]) == table
    row = table["block.01.mlp_hidden"]
    assert row["mean"] == pytest.approx(float(value.mean()), rel=1e-12)
    assert row["std"] == pytest.approx(float(value.std(correction=0)), rel=1e-12)
    assert row["rms"] == pytest.approx(float(value.square().mean().sqrt()), rel=1e-12)
    assert (row["min"], row["max"]) == (float(value.min()), float(value.max()))
    assert metadata["norm_eps"] == "1.1920928955078125e-07"
    assert (metadata["dtype"], metadata["order"]) == ("float32", "raster")


def test_statistics_do_not_depend_on_the_chunk():
    value = torch.linspace(-3, 5, 1001).reshape(7, 143)
    assert statistics(value, at_once=10) == pytest.approx(statistics(value), rel=1e-13)


def test_block_order_of_a_numbered_4x4_grid():
    order = block_order([(1, 4, 4)], 2)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert order[raster_order([(1, 4, 4)], 2)].tolist() == list(range(16))


def test_block_order_of_a_batch_with_a_clip():
    grids = [(2, 2, 4), (1, 4, 2)]
    order = block_order(grids, 2)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, *range(16, 24)]
    values = torch.rand(24, 3)
    assert torch.equal(values[order][raster_order(grids, 2)], values)
    with pytest.raises(ValueError, match="3x2"):
        block_order([(1, 3, 2)], 2)


def test_a_trace_in_block_order_is_the_raster_one_permuted(encoder, golden, tmp_path):
    batch = golden_batch(golden, "wide")
    for order in ("raster", "block"):
        write_trace(encoder, batch, tmp_path / f"{order}.safetensors", order=order)
    raster, block = (load_file(tmp_path / f"{order}.safetensors") for order in ("raster", "block"))
    grid = tuple(golden["wide/grid_thw"].tolist())
    places = block_order([grid], 2)
    for name in ("pixels", "rope_cos", "block.01.q", "final_norm"):
        assert torch.equal(block[name], raster[name][places])
        assert not torch.equal(block[name], raster[name])
    # In block order the merger is a plain reshape.
    assert torch.equal(block["final_norm"].reshape(raster["merged"].shape), raster["merged"])
    assert torch.equal(block["projected"], raster["projected"])


def test_record_sees_one_batch_and_leaves_no_trace(encoder, golden):
    batch = golden_batch(golden, "wide")
    plain = encoder.embed(batch)[0]
    with record(encoder, stages=["block.*.q", "projected"], layers=[0, 2]) as seen:
        assert torch.equal(encoder.embed(batch)[0], plain)
        with pytest.raises(ValueError, match="second"):
            encoder.embed(batch)
    assert list(seen) == ["block.00.q", "block.02.q", "projected"]
    assert torch.equal(seen["projected"], plain)
    assert encoder.tap is no_tap


def test_record_is_undone_by_an_error(encoder):
    with pytest.raises(RuntimeError), record(encoder):
        raise RuntimeError
    assert encoder.tap is no_tap


def test_selections():
    assert parse_layers("0,5-7, 26") == [0, 5, 6, 7, 26]
    selection = Selection(["block.??", "merged"], [1])
    assert [name for name in stage_names(3) if name in selection] == ["block.01", "merged"]
    for text in ("x", "3-1", "", "1,,2"):
        with pytest.raises(MoonvitError, match="layers"):
            parse_layers(text)
    with pytest.raises(MoonvitError, match="no stage fits 'blok"):
        Selection(["blok.*"]).check(3)
    with pytest.raises(MoonvitError, match="no block 3"):
        Selection(layers=[3]).check(3)


def test_patterns_by_hand():
    assert draw("gray", 2, 1).tolist() == [[[128] * 3] * 2]
    board = draw("checkerboard", 20, 9)[:, :, 0]
    assert board[0].tolist() == [255] * 8 + [0] * 8 + [255] * 4
    assert board[8, 0] == 0
    assert draw("ramp", 300, 40)[30, 270].tolist() == [270 % 256, 30, 300 % 256]
    assert draw("ramp", 300, 40, frame=1)[30, 270].tolist() == [286 % 256, 62, 300 % 256]
    assert parse_size("448x300") == (448, 300)
    assert parse_size("56") == (56, 56)
    for text in ("0x4", "4x", "axb", "1x2x3", "-1x4"):
        with pytest.raises(ImageError, match="size is"):
            parse_size(text)


def test_the_command_on_a_picture_a_clip_and_a_pattern(tmp_path):
    path, picture = tmp_path / "t.safetensors", IMAGES / "rgba_120x90.png"
    base = ("trace", "--model", TINY, "-o", path)
    result = run(*base, picture, "--stages", "block.??,projected", "--layers", "0-1", "--format", "json")
    document = json.loads(result.stdout)
    assert list(document["stages"]) == ["block.00", "block.01", "projected"]
    assert document["grid_thws"] == [[1, 8, 10]]
    encoder = Encoder.from_pretrained(TINY, dtype="float32")
    np.testing.assert_array_equal(load_file(path)["projected"], encoder.encode(str(picture)))
    assert run(*base, picture, picture, "--clip", "--format", "quiet").exit_code == 0
    assert load_file(path)["grid_thws"].tolist() == [[2, 8, 10]]
    assert run(*base, "--pattern", "ramp", "--frames", 3, "--dtype", "float64").exit_code == 0
    trace = load_file(path)
    assert trace["grid_thws"].tolist() == [[3, 4, 6]]
    assert trace["projected"].dtype == torch.float64
    for wrong in ((), (picture, "--pattern", "ramp"), ("--pattern", "plaid")):
        assert run(*base, *wrong).exit_code == 2


def test_epsilon_is_recorded_and_used(tmp_path):
    values = []
    for number, eps in enumerate(("1.1920928955078125e-07", "0.0078125")):
        path = tmp_path / f"{number}.safetensors"
        run("trace", "--pattern", "ramp", "--model", TINY, "-o", path, "--norm-eps", eps)
        with safe_open(path, "pt") as file:
            assert file.metadata()["norm_eps"] == eps
            values.append(file.get_tensor("block.00.norm0"))
    assert float((values[0] - values[1]).norm() / values[0].norm()) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_selftest_passes(dtype):
    checks = list(selftest(Encoder.from_pretrained(TINY, dtype=dtype)))
    assert len(checks) == 3 * len(stage_names(3))
    assert [check for check in checks if not check.good] == []


def test_selftest_fails_for_a_wrong_tower(monkeypatch):
    from moonvit.towers import attend

    monkeypatch.setitem(attend.ROTATE, "pairs", lambda x, cos, sin: x)
    result = run("selftest", "--model", TINY)
    assert result.exit_code == 1
    assert "first block.00.q of ramp" in result.stdout


def test_selftest_command():
    result = run("selftest", "--model", TINY, "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["good"] is True
    assert "PASS" in run("selftest", "--model", TINY).stdout


def test_the_reference_stays_short():
    import moonvit.reference

    assert len(Path(moonvit.reference.__file__).read_text().splitlines()) <= 200
