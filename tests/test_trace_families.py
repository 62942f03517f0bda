"""Traces of the families beside K3: every stage has a name and a shape, rows lie as the file says."""

import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import parity_helpers as helpers
from moonvit.cli import group
from moonvit.encoder import Encoder
from moonvit.ops.grid import block_order
from moonvit.trace import record, write_trace
from moonvit.trace.stages import has_patch_rows, stage_shape

NAMES = ("kimi_k25", "kimi_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = helpers.PAIRS[name](tmp_path_factory.mktemp("family"))[0]
        return made[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_traced_and_compared(encoders, name, tmp_path):
    """Through the command line; a run agrees with itself in every stage, in either order."""
    model = str(encoders(name).checkpoint.directory)
    picture = tmp_path / "a.png"
    Image.effect_noise((120, 70), 80).save(picture)
    files = [str(tmp_path / f"{order}.safetensors") for order in ("raster", "block")]
    for file, order in zip(files, ("raster", "block"), strict=True):
        arguments = ["trace", str(picture), "--model", model, "-o", file, "--order", order]
        done = CliRunner().invoke(group, [*arguments, "--dtype", "float32"])
        assert done.exit_code == 0, done.output
    stages = set(load_file(files[0])) - {"grid_thws"}
    assert ("proj_norm" in stages) == name.startswith("kimi")
    assert ("deepstack.1" in stages) == (name == "qwen3_vl")
    done = CliRunner().invoke(group, ["compare", *files, "--format", "json"])
    assert done.exit_code == 0, done.output
    assert {stage["name"] for stage in json.loads(done.stdout)["stages"]} == stages
    for verb in (["selftest"], ["diagnose", files[0]]):
        done = CliRunner().invoke(group, [*verb, "--model", model])
        assert f"{verb[0]} knows kimi_k3 only, this is {name}" in str(done.exception or done.output)


@pytest.mark.parametrize("name", NAMES)
def test_rows_lie_as_the_file_says(encoders, name, tmp_path):
    """Row n of every stage of patches is patch n, windows or not; the others are merged rows."""
    encoder = encoders(name)
    batch = encoder.processor(Image.effect_noise((280, 200), 80))
    grid = tuple(batch.grid_thws[0].tolist())
    order = block_order([grid], 2)
    traces = {}
    for kind in ("raster", "block"):
        path = tmp_path / f"{kind}.safetensors"
        table = write_trace(encoder, batch, path, order=kind)
        traces[kind] = load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata()["order"] == kind
    rows = {"N": len(order), "M": len(order) // 4}
    for stage in table:
        raster, block = traces["raster"][stage], traces["block"][stage]
        letters = stage_shape(stage).split(",")
        assert len(raster) == rows[letters[0]], stage
        assert torch.equal(raster[order], block) if has_patch_rows(stage) else torch.equal(raster, block)
    native = traces[encoder.processor.order]
    assert torch.equal(native["pixels"], batch.pixel_values)
    weight = next(
        value for key, value in encoder.model.state_dict().items() if key.endswith("embed.proj.weight")
    )
    for trace in traces.values():  # what was computed from a patch's pixels lies at its place
        computed = trace["pixels"].flatten(1) @ weight.flatten(1).T
        rest = trace["embed"] - computed - trace.get("pos_embed", 0)
        assert float(rest.std(dim=0).max()) < 1e-5
        assert torch.equal(trace["rope_cos"].unique(dim=0), traces["raster"]["rope_cos"].unique(dim=0))
    half = traces["raster"]["rope_sin"].shape[1] // 2
    rope = traces["raster"]["rope_sin"].view(*grid[1:], -1)
    by_row = rope[..., 1::2] if name.startswith("kimi") else rope[..., :half]
    assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_vl"])
def test_positions_are_rounded_after_they_are_added(encoders, name):
    """In bfloat16 too, the resampled table stays in float32 until the sum."""
    encoder = Encoder.from_pretrained(encoders(name).checkpoint.directory, dtype="bfloat16")
    with record(encoder) as seen:
        encoder.embed(encoder.processor(Image.effect_noise((200, 120), 80)))
    assert seen["pos_embed"].dtype == torch.float32
    total = (seen["patch_embed"].float() + seen["pos_embed"]).bfloat16()
    assert torch.equal(seen["embed"], total)
    assert not torch.equal(seen["embed"], seen["patch_embed"] + seen["pos_embed"].bfloat16())
