"""int8 layers against float64 on the same integers, and whole towers against the same without rounding."""

import copy
import json
import pickle
import threading

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional as F

import parity_helpers as helpers
from conftest import IMAGES, TINY, random_pixels, relative_error
from moonvit.backends import set_backend
from moonvit.cli.encode import command
from moonvit.encoder import Encoder
from moonvit.errors import MoonvitError, NumericsError
from moonvit.native import cpu
from moonvit.native import int8 as native_int8
from moonvit.native import workspace as native_workspace
from moonvit.ops.quantize import quantize_rows
from moonvit.towers.int8 import Int8Linear, check_quantize, int8_lacks, quantize_model
from moonvit.trace.known import known_tower
from moonvit.trace.record import describe, record
from native import UNIT, needs_native

pytestmark = [
    pytest.mark.skipif(bool(int8_lacks()), reason=f"no int8 here: {int8_lacks()}"),
    pytest.mark.usefixtures("one_thread"),
]

TYPES = [torch.float32, torch.bfloat16]
SHAPES = {
    "count": st.integers(1, 200), "outputs": st.sampled_from([1, 7, 16, 33, 48, 49, 130]),
    "dtype": st.sampled_from(TYPES), "bias": st.booleans(),
}  # fmt: skip
GRIDS = [(1, 6, 10), (1, 2, 2), (2, 4, 4), (1, 20, 18)]
LEAST = 0.998
"""Cosine of a token. A product is off by about 0.008 (twice 255 steps, the largest of 64 numbers 2.5 times their
root mean square), 14 of them by 0.03, which is 0.9995; the worst token is let have twice that angle."""
FAMILIES = ("kimi_k25", "kimi_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(params=["eager", "native"])
def backend(request, monkeypatch):
    if request.param == "native":
        needs_native()
        monkeypatch.setattr(cpu, "cpu_flags", lambda: cpu.NEEDED)  # without matrix units
    return request.param


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def loaded(dtype="float32", backend="eager", quantize="int8"):
    return Encoder.from_pretrained(TINY, dtype=dtype, backend=backend, quantize=quantize)


def layer(inner, outputs, dtype=torch.float32, bias=True, seed=0, backend="eager"):
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(inner, outputs, bias=bias)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / inner**0.5)
    rounded = Int8Linear(linear.to(dtype))
    rounded.backend = backend
    return rounded


def rows(count, inner, dtype=torch.float32, seed=1):
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(seed)).to(dtype)


def simulated(rounded, x):
    """The same integers and scales in float64, with the bias."""
    q_RK, scale_R = quantize_rows(x)
    exact = (q_RK.double() @ rounded.weight.double().t()) * scale_R.double()[:, None]
    exact = exact * rounded.weight_scale.double()
    return exact if rounded.bias is None else exact + rounded.bias.double()


def allowed(dtype):
    """Roundings of the sum, both scales, the bias and the result; in bfloat16 the last one outweighs all."""
    return 5 * UNIT[dtype] if dtype == torch.float32 else 2.1 * UNIT[dtype]


def test_the_rule():
    x = torch.tensor([[254.0, -254, 1, 3, 5, -2], [0, 0, 0, 0, 0, 0], [0.5, -1.27, 0, 0.01, 0.02, 0.036]])
    integers, scales = quantize_rows(x)
    assert scales.tolist() == [2.0, 0.0, float(torch.tensor(1.27) / 127)]
    assert integers[0].tolist() == [127, -127, 0, 2, 2, -1]  # halves go to the even neighbour
    assert integers[1].tolist() == [0] * 6
    assert integers[2].tolist() == [50, -127, 0, 1, 2, 4]
    assert torch.equal(quantize_rows(x.bfloat16())[1], x.bfloat16().float().abs().amax(1) / 127)


def test_the_smallest_numbers_count_as_zeros(backend):
    """A scale below the normal numbers has few bits: 190 of the smallest number would be 190 steps."""
    smallest = 2.0**-149
    x = torch.tensor([[190 * smallest, -smallest, 0, 0]])
    integers, scales = quantize_rows(x)
    assert (integers.tolist(), scales.tolist()) == ([[0] * 4], [0.0])
    large = layer(4, 3, bias=False, backend=backend)
    large.weight_scale.fill_(2.0**100)
    assert large(x).tolist() == [[0.0] * 3]


@settings(max_examples=40, deadline=None)
@given(inner=st.sampled_from([1, 4, 8, 30, 36, 588, 1028, 2600]), **SHAPES)
def test_pytorchs_product(count, inner, outputs, dtype, bias):
    rounded, x = layer(inner, outputs, dtype, bias, seed=count), rows(count, inner, dtype)
    found = rounded.by_torch(x)
    assert found.dtype == dtype
    assert relative_error(found, simulated(rounded, x)) < allowed(dtype)


@settings(max_examples=60, deadline=None)
@given(
    inner=st.sampled_from([4, 8, 36, 588, 1028, 2600]),
    then=st.sampled_from(["store", "gelu_tanh", "add"]),
    **SHAPES,
)
def test_native_product(count, inner, outputs, dtype, bias, then):
    needs_native()
    rounded = layer(inner, outputs, dtype, bias, seed=count)
    x = rows(count, inner + 4, dtype)[:, :inner]  # rows lie apart
    buffer = rows(count, outputs + 3, dtype, seed=2)
    out, around = buffer[:, :outputs], buffer[:, outputs:].clone()
    exact = simulated(rounded, x)
    size = float(exact.norm())
    if then == "gelu_tanh":
        exact = F.gelu(exact, approximate="tanh")
    elif then == "add":
        exact = exact + out.double()
    rounded.into(x, out, then)
    # GELU's own exponential and quotient add a few roundings; small results of it come from larger numbers.
    bound = allowed(dtype) * (2 if then == "gelu_tanh" else 1)
    assert (out.double() - exact).norm() <= bound * max(float(exact.norm()), size)
    assert torch.equal(buffer[:, outputs:], around)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_row_is_its_own(dtype, backend, monkeypatch):
    """Bit for bit: alone, in another batch, with other threads, in more parts than the workspace holds."""
    rounded, x = layer(64, 50, dtype, backend=backend), rows(300, 64, dtype)
    whole = rounded(x)
    assert torch.equal(torch.cat([rounded(part) for part in torch.split(x, [1, 7, 92, 200])]), whole)
    assert torch.equal(rounded(x.flip(0)).flip(0), whole)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(rounded(x), whole)
            with monkeypatch.context() as patch:
                patch.setattr(native_int8, "_PACKED", 1)
                patch.setattr(native_workspace, "_local", threading.local())
                assert torch.equal(rounded(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_shapes_and_layouts(backend):
    rounded, x = layer(8, 5, backend=backend), rows(6, 8)
    expected = rounded(x)
    assert torch.equal(rounded(x.t().contiguous().t()), expected)
    assert torch.equal(rounded(torch.stack([x, x], 1)[:, 0]), expected)
    assert torch.equal(rounded(x.view(2, 3, 8)), expected.view(2, 3, 5))
    assert torch.equal(rounded(x[0]), expected[0])
    assert rounded(x[:0]).shape == (0, 5)
    assert rounded(x.view(2, 3, 8)[:, :0]).shape == (2, 0, 5)
    transposed = torch.nn.Linear(8, 5)
    transposed.weight = torch.nn.Parameter(rows(8, 5).t())
    assert Int8Linear(transposed).weight.is_contiguous()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_not_finite_shows(dtype, bias, backend):
    rounded, x = layer(64, 20, dtype, bias, backend=backend), rows(40, 64, dtype)
    plain = rounded(x)
    x[3, 5], x[17, 0], x[30, 63] = float("nan"), float("inf"), -float("inf")
    x[8] = 0
    found = rounded(x)
    bad = [3, 17, 30]
    assert not torch.isfinite(found[bad]).any()
    kept = [row for row in range(40) if row not in (*bad, 8)]
    assert torch.equal(found[kept], plain[kept])
    assert torch.equal(found[8], torch.zeros(20, dtype=dtype) if rounded.bias is None else rounded.bias)
    spoilt = torch.nn.Linear(64, 3)
    spoilt.weight[0, 3], spoilt.weight[1, 4] = float("nan"), float("inf")
    spoilt = Int8Linear(spoilt)
    spoilt.backend = backend
    assert torch.isfinite(spoilt(rows(40, 64))).all(0).tolist() == [False, False, True]


def test_an_overflow_in_the_tower_is_reported(backend):
    encoder = loaded(backend=backend)
    encoder.model.vision_tower.encoder.blocks[0].norm0.weight[3] = float("inf")
    with pytest.raises(NumericsError, match="picture 0 of the batch: NaN or infinity"):
        encoder.encode(IMAGES / "photo_130x80.jpg")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k3(dtype, backend):
    pixels = random_pixels(GRIDS)
    exact = torch.cat(loaded("float64", quantize=None).model(pixels, GRIDS))
    model = loaded(dtype, backend).model
    found = model(pixels, GRIDS)
    assert LEAST < helpers.least_cosine(torch.cat(found), exact) < 0.99999
    alone = [model(p, [grid])[0] for p, grid in zip(pixels.split([60, 4, 32, 360]), GRIDS, strict=True)]
    if backend == "native":  # PyTorch's attention is not the same to the bit for another batch
        assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))
    assert helpers.least_cosine(torch.cat(alone), torch.cat(found)) > 0.9995


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    encoder = helpers.PAIRS[name](tmp_path / "checkpoint")[0]
    rounded = copy.deepcopy(encoder.model)
    quantize_model(rounded)
    assert not any(type(module) is torch.nn.Linear for module in rounded.modules())
    for grids in helpers.stills_of(name)[1:] + helpers.clips_of(name)[1:]:
        pixels = helpers.patches_for(encoder, grids)
        exact = torch.cat(encoder.model(pixels, grids))
        for backend in ("eager", "native"):
            set_backend(rounded, backend)
            assert helpers.least_cosine(torch.cat(rounded(pixels, grids)), exact) > LEAST


def test_fused_blocks_do_what_the_layers_do():
    """Stage by stage, layer by layer, and all at once: the same but for roundings of what lies between."""
    needs_native()
    encoder = loaded(backend="native")
    pixels = random_pixels(GRIDS)
    fused = torch.cat(encoder.model(pixels, GRIDS))
    with record(encoder) as stages:
        encoder.model.run(pixels, GRIDS, tap=encoder.tap)
    # A number near a half may go to the other integer; then the result is off by a part of a step.
    assert helpers.least_cosine(stages["projected"], fused) > 0.9995
    assert describe(encoder, "raster")["quantize"] == "int8"


def test_blocks_of_other_sizes_share_no_buffer():
    needs_native()
    encoder = loaded(quantize=None)
    wider = encoder.model.vision_tower.encoder.blocks[1].mlp
    wider.fc0 = torch.nn.Linear(wider.fc0.in_features, 8 * wider.fc0.out_features)
    wider.fc1 = torch.nn.Linear(wider.fc0.out_features, wider.fc1.out_features)
    quantize_model(encoder.model)
    pixels = random_pixels(GRIDS)
    eager, native = (torch.cat(encoder.optimize(name).model(pixels, GRIDS)) for name in ("eager", "native"))
    assert helpers.least_cosine(native, eager) > 0.9995  # as above, numbers near a half


def test_the_kernel_refuses_shapes_that_do_not_fit():
    needs_native()
    rounded = layer(64, 48, backend="native")
    for x, out in (
        (rows(5, 60), torch.empty(5, 48)),
        (rows(5, 64), torch.empty(5, 47)),
        (rows(5, 64), torch.empty(4, 48)),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            rounded.into(x, out)


def test_matrix_units_take_pytorchs_product(monkeypatch):
    rounded, x = layer(64, 50, torch.bfloat16, backend="native"), rows(9, 64, torch.bfloat16)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: cpu.NEEDED)
    assert rounded.is_native()
    monkeypatch.setattr(cpu, "cpu_flags", lambda: cpu.NEEDED | cpu.MATRIX_UNITS)
    assert not rounded.is_native()
    assert torch.equal(rounded(x), rounded.by_torch(x))


def test_state_dict_copies_and_pickles(backend):
    encoder = loaded("bfloat16", backend)
    model, pixels = encoder.model, random_pixels(GRIDS)
    expected = torch.cat(model(pixels, GRIDS))
    plain, state = loaded("bfloat16", quantize=None).model, model.state_dict()
    linear = [name for name, m in plain.named_modules() if type(m) is torch.nn.Linear]
    assert len(linear) == 4 * len(plain.vision_tower.encoder.blocks) + 2
    assert state.keys() - plain.state_dict().keys() == {f"{name}.weight_scale" for name in linear}
    assert plain.state_dict().keys() <= state.keys()
    assert {state[f"{name}.weight"].dtype for name in linear} == {torch.int8}
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(torch.cat(again(pixels, GRIDS)), expected)
    other = loaded("bfloat16", backend).model
    for module in other.modules():
        if isinstance(module, Int8Linear):
            module.weight.zero_()
            module.weight_sums.zero_()
    assert not torch.equal(torch.cat(other(pixels, GRIDS)), expected)  # and PyTorch's packed weights are made
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert torch.equal(torch.cat(other(pixels, GRIDS)), expected)
    with pytest.raises(RuntimeError, match=r"wqkv\.weight is torch\.bfloat16, expected the int8"):
        other.load_state_dict(plain.state_dict(), strict=False)


def test_what_cannot_be_had(monkeypatch):
    device = torch.device("cpu")
    for arguments, said in (
        (("int4", device, torch.float32), "quantize is 'int4', expected None or 'int8'"),
        (("int8", torch.device("meta"), torch.float32), "quantize 'int8' is for the CPU, the device is meta"),
        (("int8", device, torch.float16), "goes with bfloat16 and float32, dtype is float16"),
    ):
        with pytest.raises(MoonvitError, match=said) as caught:
            check_quantize(*arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(MoonvitError, match="dtype is float64"):
        loaded("float64")
    encoder = loaded()
    with pytest.raises(MoonvitError, match="backend compiled does not take quantize 'int8'"):
        encoder.optimize("compiled")
    assert encoder.backend == "eager"
    with pytest.raises(MoonvitError, match="selftest needs the checkpoint's own weights"):
        known_tower(encoder, "selftest")
    monkeypatch.setenv("MOONVIT_BACKEND", "compiled")
    with pytest.raises(MoonvitError, match="choose native or eager"):
        loaded(backend="auto")
    monkeypatch.setattr("moonvit.towers.int8.cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(MoonvitError, match="cannot be had here: the processor has no avx512_vnni"):
        loaded()
    with pytest.raises(MoonvitError, match="an int8 model cannot run here: the processor has no"):
        encoder.model(random_pixels(GRIDS), GRIDS)


def test_what_a_rounded_model_does_not_do(backend, monkeypatch):
    encoder, pixels = loaded(backend=backend), random_pixels(GRIDS)
    with torch.enable_grad(), pytest.raises(MoonvitError, match="an int8 model has no gradients"):
        encoder.model(pixels, GRIDS)
    keeps = "keeps the type that it was loaded in"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MoonvitError, match=keeps):
        layer(8, 5)(torch.mm(rows(4, 8), rows(8, 8)))
    with pytest.raises(MoonvitError, match=keeps):
        layer(8, 5, torch.bfloat16, backend=backend)(rows(4, 8))
    with pytest.raises(MoonvitError, match=keeps):
        encoder.model.to(torch.bfloat16).vision_tower(pixels, GRIDS)
    with pytest.raises(MoonvitError, match="runs on the CPU, not on meta"):
        encoder.model.to("meta")(pixels.to("meta"), GRIDS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(MoonvitError, match="cannot be compiled"):
        layer(8, 5, backend=backend)(rows(4, 8))


def test_the_command_line_says_so(tmp_path):
    output = tmp_path / "out.safetensors"
    arguments = ["--model", str(TINY), "-o", str(output), "--format", "json"]
    for asked, quantize in ((["--quantize", "int8"], "int8"), ([], None)):
        done = CliRunner().invoke(command, [str(IMAGES / "photo_130x80.jpg"), *arguments, *asked])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["quantize"] == quantize
        with safe_open(output, "pt") as file:
            assert file.metadata()["quantize"] == (quantize or "none")
    assert loaded(quantize=None).quantize is None
