"""The tower as a module: batches, shapes, types, tables, gradients, refusals."""

import copy
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from conftest import CASES, TINY, random_pixels, relative_error
from moonvit.config import VisionConfig
from moonvit.encoder import Encoder
from moonvit.errors import NumericsError
from moonvit.ops.positions import resample_table, time_table
from moonvit.ops.rotary import rope_table, rotate_pairs
from moonvit.presets import model_config
from moonvit.towers.kimi_k3 import KimiK3Vision


@pytest.mark.parametrize("order", [CASES, CASES[::-1], ("clip", "wide", "wide", "large")], ids=str)
def test_batch_equals_single(encoder, golden, order):
    pixels = torch.cat([golden[f"{case}/pixel_values"] for case in order])
    grids = torch.stack([golden[f"{case}/grid_thw"] for case in order])
    with torch.no_grad():
        found = encoder.model(pixels, grids)
    for case, embedding in zip(order, found, strict=True):
        with torch.no_grad():
            alone = encoder.model(golden[f"{case}/pixel_values"], golden[f"{case}/grid_thw"][None])[0]
        # Products of another height may sum in another order: a few units in the last place.
        assert relative_error(embedding, alone) < 1e-6
        assert relative_error(embedding, golden[f"{case}/projected"]) < 5e-6


@pytest.mark.parametrize("grid", [(1, 2, 6), (1, 6, 2), (1, 8, 120), (1, 6, 10), (1, 14, 14), (4, 2, 6)])
def test_grids_of_all_shapes(encoder, grid):
    found = encoder.model(random_pixels([grid]), [grid])
    assert found[0].shape == (grid[1] * grid[2] // 4, 48)


def test_parts_work_alone(encoder):
    grids = [(1, 2, 4), (2, 2, 2)]
    pixels = random_pixels(grids)
    merged = encoder.model.vision_tower(pixels, grids)
    assert [tuple(m.shape) for m in merged] == [(2, 256), (1, 256)]
    whole = encoder.model(pixels, grids)
    for ours, theirs in zip(encoder.model.mm_projector(merged), whole, strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(encoder.model.mm_projector(merged[0]), whole[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["grid_thws", "image_grid_thw", "image_grid_hws"])
def test_grid_by_its_usual_names(encoder, name):
    grid = [[2, 4]] if name == "image_grid_hws" else [[1, 2, 4]]
    pixels = random_pixels([(1, 2, 4)])
    assert torch.equal(encoder.model(pixels, **{name: grid})[0], encoder.model(pixels, [(1, 2, 4)])[0])


def test_nothing_in_nothing_out(encoder):
    assert encoder.model(torch.empty(0, 3, 14, 14), torch.empty(0, 3, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("pixels", "grids", "message"),
    [
        (torch.zeros(8, 3, 14, 14), [(1, 2, 6)], "8 patches, but grid_thws asks for 12"),
        (torch.zeros(8, 3, 16, 16), [(1, 2, 4)], r"expected shape \[N, 3, 14, 14\]"),
        (torch.zeros(8, 588), [(1, 2, 4)], "expected shape"),
        (torch.zeros(8, 3, 14, 14, dtype=torch.uint8), [(1, 2, 4)], "floating-point"),
        (torch.zeros(9, 3, 14, 14), [(1, 3, 3)], "multiples of 2"),
        (torch.zeros(20, 3, 14, 14), [(5, 2, 2)], "at most 4 frames"),
        (torch.zeros(1028, 3, 14, 14), [(1, 2, 514)], "at most 512"),
        (torch.zeros(8, 3, 14, 14), None, "grid_thws is missing"),
    ],
)
def test_shapes_that_do_not_fit(encoder, pixels, grids, message):
    with pytest.raises(ValueError, match=message):
        encoder.model(pixels, grids)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pixels_that_are_not_finite(encoder, value):
    pixels = torch.zeros(8, 3, 14, 14)
    pixels[5, 1, 2, 3] = value
    with pytest.raises(NumericsError, match="first in patch 5"):
        encoder.model(pixels, [(1, 2, 4)])


def test_gradients_reach_every_parameter(encoder):
    model = copy.deepcopy(encoder.model)
    pixels = random_pixels([(2, 4, 6), (1, 2, 2)]).requires_grad_()
    sum(out.square().sum() for out in model(pixels, [(2, 4, 6), (1, 2, 2)])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert pixels.grad is not None


def test_gradient_is_right():
    """Against finite differences in float64, on the position table and one block's matrices."""
    config = VisionConfig.from_dict(model_config("tiny"))
    torch.manual_seed(0)
    model = KimiK3Vision(config).double()
    pixels = random_pixels([(1, 2, 4)]).double()
    for name in ("vision_tower.patch_embed.pos_emb.weight", "vision_tower.encoder.blocks.1.wqkv.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        loss = model(pixels, [(1, 2, 4)])[0].sin().sum()
        (gradient,) = torch.autograd.grad(loss, parameter)
        with torch.no_grad():
            values = []
            for step in (1e-5, -1e-5):
                parameter += step * direction
                values.append(model(pixels, [(1, 2, 4)])[0].sin().sum())
                parameter -= step * direction
        assert (gradient * direction).sum().item() == pytest.approx(
            (values[0] - values[1]).item() / 2e-5, rel=1e-5, abs=1e-7
        )


def captured_tables(model: KimiK3Vision) -> list[torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model(random_pixels([(3, 4, 6)]), [(3, 4, 6)], tap=lambda n, v: found.__setitem__(n, v))
    return [found["rope_cos"], found["rope_sin"]]


@pytest.mark.parametrize("how", ["bfloat16", "half", "autocast", "inference", "meta"])
def test_tables_survive(encoder, how):
    fresh = rope_table([(3, 4, 6)], 32, 10000.0, torch.float32)
    model = copy.deepcopy(encoder.model)
    if how == "bfloat16":
        model = model.to(torch.bfloat16)
        captured_tables(model)
        model = model.float()
    elif how == "half":
        model = model.half()
        captured_tables(model)
        model = model.float()
    elif how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured_tables(model)
    elif how == "inference":
        with torch.inference_mode():
            captured_tables(model)
        model(random_pixels([(3, 4, 6)]), [(3, 4, 6)])[0].sum().backward()
    else:
        with torch.device("meta"):
            shadow = KimiK3Vision(encoder.config)
            shadow(torch.empty(72, 3, 14, 14), [(3, 4, 6)])
            assert time_table(3, 64, torch.float32).device.type == "cpu"
    for ours, theirs in zip(captured_tables(model), fresh, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    assert not dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_position_tables_are_not_rounded(encoder, dtype):
    """The position sum is made in float32 even where the weights are 16-bit: its table stays float32."""
    found: dict[str, torch.Tensor] = {}
    model = copy.deepcopy(encoder.model).to(dtype)
    with torch.no_grad():
        model(random_pixels([(2, 4, 6)]), [(2, 4, 6)], tap=lambda n, v: found.__setitem__(n, v))
    assert found["pos_embed"].dtype == torch.float32
    again = found["pos_embed"].to(dtype).float()
    assert not torch.equal(again, found["pos_embed"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_sums_and_turns_in_float32(encoder, dtype):
    """Of a still picture: the sum with the resampled table, and the rotation, are each rounded once."""
    found: dict[str, torch.Tensor] = {}
    model = copy.deepcopy(encoder.model).to(dtype)
    grid = [(1, 4, 6)]
    with torch.no_grad():
        model(random_pixels(grid), grid, tap=lambda n, v: found.__setitem__(n, v))
    table = model.vision_tower.patch_embed.pos_emb.weight
    positions = resample_table(table.detach(), 4, 6, "bilinear", torch.float32)
    assert not torch.equal(positions, positions.to(dtype).float())
    assert torch.equal(found["pos_embed"], positions)
    assert torch.equal(found["embed"], (found["patch_embed"].float() + positions).to(dtype))
    tables = rope_table(grid, 32, 10000.0, torch.float32)
    exact = rotate_pairs(found["block.00.q_unrotated"].float(), *tables)
    assert torch.equal(found["block.00.q"], exact.to(dtype))


def test_interpolation_and_biases_of_the_config_are_used():
    """Both change the result of the same weights; a bias is a parameter of its own."""
    config = VisionConfig.from_dict(model_config("tiny"))
    torch.manual_seed(0)
    model = KimiK3Vision(config)
    torch.nn.init.normal_(model.vision_tower.patch_embed.pos_emb.weight)
    cubic = KimiK3Vision(replace(config, interpolation="bicubic"))
    cubic.load_state_dict(model.state_dict())
    pixels = random_pixels([(1, 4, 6)])
    assert not torch.allclose(model(pixels, [(1, 4, 6)])[0], cubic(pixels, [(1, 4, 6)])[0], atol=1e-4)
    for flag, names in {
        "attn_bias": ("wqkv.bias", "wo.bias"),
        "linear_bias": ("mlp.fc0.bias", "mlp.fc1.bias"),
        "patch_bias": ("patch_embed.proj.bias",),
    }.items():
        more = KimiK3Vision(replace(config, **{flag: True})).state_dict().keys() - model.state_dict().keys()
        assert {name for name in more if not name.endswith(names)} == set()
        assert more


def test_autocast_is_close(encoder, golden):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder.model(golden["large/pixel_values"], golden["large/grid_thw"][None])[0]
    assert relative_error(found, golden["large/projected"]) < 2e-2


def test_compiled_equals_eager(encoder, golden):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(encoder.model))
    for case in ("wide", "large", "clip"):
        with torch.no_grad():
            found = compiled(golden[f"{case}/pixel_values"], golden[f"{case}/grid_thw"][None])[0]
        assert relative_error(found, golden[f"{case}/projected"]) < 5e-6


def test_float16_overflow_is_said():
    encoder = Encoder.from_pretrained(TINY, dtype="float16")
    with torch.no_grad():
        encoder.model.vision_tower.encoder.blocks[1].mlp.fc1.weight.mul_(3e4)
        encoder.model.vision_tower.encoder.blocks[1].mlp.fc0.weight.mul_(100)
    batch = encoder.processor(torch.rand(56, 56, 3), layout="HWC")
    for run in (encoder.embed, lambda b: encoder.model(b.pixel_values, b.grid_thws)):
        with pytest.raises(NumericsError, match=r"in float16 \(it overflowed: use bfloat16"):
            run(batch)


def test_norm_eps_reaches_the_norms():
    loose = Encoder.from_pretrained(TINY, dtype="float32", norm_eps=2.0**-7)
    assert loose.config.norm_eps == 2.0**-7
    tower = loose.model.vision_tower
    assert {e for b in tower.encoder.blocks for e in (b.norm0.eps, b.norm1.eps)} == {2.0**-7}
    assert tower.encoder.final_layernorm.eps == 2.0**-7
    assert loose.model.mm_projector.post_norm.eps == 1e-5


def test_rms_norm_is_computed_in_float32():
    """A bf16 norm equals the float32 one rounded once, and eps is the one given."""
    norm = torch.nn.RMSNorm(64, eps=2.0**-7).to(torch.bfloat16)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 2.0**-7)
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


MEMORY = """
import resource, torch
from moonvit.config import VisionConfig
from moonvit.presets import model_config
from moonvit.towers.kimi_k3 import KimiK3Vision
model = KimiK3Vision(VisionConfig.from_dict(model_config("tiny"))).eval()
def run(grids):
    with torch.no_grad():
        model(torch.zeros(sum(t*h*w for t, h, w in grids), 3, 14, 14), grids)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
run([(1, 16, 16)])
BODY
"""


def run_memory(body: str) -> list[int]:
    code = MEMORY.replace("BODY", body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(n) for n in done.stdout.split()]


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_SELF"), reason="no resource usage on this system")
def test_no_mask_over_the_batch():
    """Four 1792x1792 pictures: one 65,536-square mask of bytes would be 4 GiB, one picture's 268 MB."""
    before, after = run_memory("a = peak(); run([(1, 128, 128)] * 4); print(a, peak())")
    assert after - before < 1500


def test_memory_is_flat_over_sizes():
    """300 distinct sizes leave nothing behind once the largest has run."""
    body = (
        "sizes = [(1, 2 + 2 * (i % 20), 2 + 2 * (i // 20)) for i in range(300)]\n"
        "[run([s]) for s in sizes[-40:]]; a = peak()\n"
        "[run([s]) for s in sizes]; print(a, peak())"
    )
    before, after = run_memory(body)
    assert after - before < 60
