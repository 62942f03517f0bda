"""The same model by every backend: what is equal, what falls back, what is said."""

import copy
import logging
import pickle
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import parity_helpers as helpers
from conftest import TINY, random_pixels, relative_error
from moonvit.backends import choose
from moonvit.encoder import Encoder
from moonvit.errors import MoonvitError
from moonvit.native import cpu
from moonvit.native import library as native_library
from moonvit.native.library import Loaded
from moonvit.towers import compiled
from moonvit.towers.fused import fits_blocks
from moonvit.trace.record import record
from native import needs_native

GRIDS = [(1, 6, 10), (1, 2, 2), (2, 4, 4), (1, 20, 18)]
FAMILIES = ("kimi_k25", "kimi_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def loaded(dtype="float32", backend="native"):
    return Encoder.from_pretrained(TINY, dtype=dtype, backend=backend)


def result(model, pixels, grids):
    with torch.no_grad():
        return torch.cat(model(pixels, grids))


def check_as_exact_as_eager(encoder, dtype, batches):
    precise = copy.deepcopy(encoder.model).double()
    model = encoder.optimize("native").model.to(dtype)
    for grids in batches:
        pixels = helpers.patches_for(encoder, grids)
        exact = result(precise, pixels, grids)
        native = result(model, pixels, grids)
        eager = result(encoder.optimize("eager").model, pixels, grids)
        encoder.optimize("native")
        assert relative_error(native, exact) < 1.5 * relative_error(eager, exact), grids


@pytest.fixture(scope="module")
def exact():
    return result(loaded("float64", "eager").model, random_pixels(GRIDS), GRIDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_is_as_exact_as_eager(dtype, exact):
    needs_native()
    encoder = loaded(dtype)
    assert encoder.backend == "native"
    native = result(encoder.model, random_pixels(GRIDS), GRIDS)
    eager = result(encoder.optimize("eager").model, random_pixels(GRIDS), GRIDS)
    assert not torch.equal(native, eager)  # it did run
    assert relative_error(native, exact) < 1.5 * relative_error(eager, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_native_in_every_family(name, dtype, tmp_path):
    needs_native()
    encoder = helpers.PAIRS[name](tmp_path / "checkpoint")[0]
    check_as_exact_as_eager(encoder, getattr(torch, dtype), helpers.stills_of(name) + helpers.clips_of(name))


def test_native_where_torch_has_matrix_units(monkeypatch, exact):
    """With AMX, PyTorch's own attention goes into the fused blocks; here it runs without AMX."""
    needs_native()
    encoder = loaded("bfloat16")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: cpu.NEEDED | cpu.MATRIX_UNITS)
    found = result(encoder.model, random_pixels(GRIDS), GRIDS)
    eager = result(encoder.optimize("eager").model, random_pixels(GRIDS), GRIDS)
    assert not torch.equal(found, eager)
    assert relative_error(found, exact) < 1.5 * relative_error(eager, exact)


def test_biases_where_torch_has_matrix_units(monkeypatch, tmp_path):
    """Every product of a family with biases, behind whatever comes after it."""
    needs_native()
    encoder = helpers.PAIRS["kimi_k25"](tmp_path / "checkpoint")[0]
    monkeypatch.setattr(cpu, "cpu_flags", lambda: cpu.NEEDED | cpu.MATRIX_UNITS)
    check_as_exact_as_eager(encoder, torch.bfloat16, helpers.stills_of("kimi_k25"))


def test_input_is_left_alone():
    needs_native()
    stack = loaded().model.vision_tower.encoder
    x = torch.randn(24, 64)
    before = x.clone()
    with torch.no_grad():
        stack(x, [(1, 4, 6)])
    assert torch.equal(x, before)


def test_gradients_and_stages_are_pytorchs():
    needs_native()
    pixels, grids = random_pixels(GRIDS), GRIDS
    native, eager = loaded(), loaded(backend="eager")
    gradients = []
    for encoder in (native, eager):
        sum(rows.square().sum() for rows in encoder.model(pixels, grids)).backward()
        gradients.append(encoder.model.vision_tower.encoder.blocks[0].wqkv.weight.grad)
    assert torch.equal(*gradients)
    seen = []
    for encoder in (native, eager):
        with record(encoder) as stages, torch.no_grad():
            encoder.model.run(pixels, grids, tap=encoder.tap)
        seen.append(stages)
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items())


def test_changed_layers_are_called():
    """A hook, an adapter or another type of layer in a block is not passed over."""
    needs_native()
    encoder = loaded()
    pixels = random_pixels(GRIDS)
    plain = result(encoder.model, pixels, GRIDS)
    block = encoder.model.vision_tower.encoder.blocks[1]
    called = []
    handle = block.mlp.fc0.register_forward_hook(lambda *_: called.append(1))
    assert relative_error(result(encoder.model, pixels, GRIDS), plain) < 1e-5
    assert called
    handle.remove()

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    block.wo.__class__ = Twice
    assert relative_error(result(encoder.model, pixels, GRIDS), plain) > 1e-2


def _other_forward(stack):
    layer = stack.blocks[1].mlp.fc0
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)


def _wider_hidden(stack):
    mlp = stack.blocks[1].mlp
    mlp.fc0 = torch.nn.Linear(mlp.fc0.in_features, 8 * mlp.fc0.out_features)
    mlp.fc1 = torch.nn.Linear(mlp.fc0.out_features, mlp.fc1.out_features)


def _no_blocks(stack):
    stack.blocks = stack.blocks[:0]


def _norm_without_weight(stack):
    stack.blocks[0].norm0 = torch.nn.RMSNorm(64, eps=1e-6, elementwise_affine=False)


def _norm_without_epsilon(stack):
    stack.blocks[0].norm0 = torch.nn.RMSNorm(64)


@pytest.mark.parametrize(
    "change", [_other_forward, _wider_hidden, _no_blocks, _norm_without_weight, _norm_without_epsilon]
)
def test_what_the_fused_blocks_do_not_know_is_pytorchs(change):
    needs_native()
    encoder = loaded()
    pixels = random_pixels(GRIDS)
    plain = result(encoder.model, pixels, GRIDS)
    change(encoder.model.vision_tower.encoder)
    native = result(encoder.model, pixels, GRIDS)
    assert relative_error(native, plain) > 1e-7
    assert relative_error(native, result(encoder.optimize("eager").model, pixels, GRIDS)) < 1e-5


def test_the_model_can_be_copied_kept_and_converted():
    needs_native()
    encoder = loaded()
    pixels = random_pixels(GRIDS)
    plain = result(encoder.model, pixels, GRIDS)
    assert torch.equal(result(copy.deepcopy(encoder.model), pixels, GRIDS), plain)
    assert torch.equal(result(pickle.loads(pickle.dumps(encoder.model)), pixels, GRIDS), plain)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert relative_error(result(encoder.model.to(dtype), pixels, GRIDS), plain) < 0.05
    assert encoder.model.state_dict().keys() == loaded(backend="eager").model.state_dict().keys()
    meta = copy.deepcopy(encoder.model).to("meta")
    assert result(meta, pixels.to("meta"), GRIDS).shape == plain.shape


def test_autocast_is_pytorchs():
    needs_native()
    encoder = loaded()
    with torch.autocast("cpu", torch.bfloat16):
        native = result(encoder.model, random_pixels(GRIDS), GRIDS)
        eager = result(encoder.optimize("eager").model, random_pixels(GRIDS), GRIDS)
    assert native.dtype == eager.dtype
    assert relative_error(native, eager) < 0.02


def test_fused_blocks_leave_autocast_and_everybodys_hooks_to_pytorch():
    needs_native()
    stack, x = loaded().model.vision_tower.encoder, torch.randn(24, 64)
    called = []
    with torch.no_grad():
        assert fits_blocks(stack, x)
        with torch.autocast("cpu", torch.bfloat16):
            assert not fits_blocks(stack, x)
        for register in (register_module_forward_hook, register_module_forward_pre_hook):
            handle = register(lambda *_: called.append(1))
            try:
                assert not fits_blocks(stack, x)
                stack(x, [(1, 4, 6)])
            finally:
                handle.remove()
        assert fits_blocks(stack, x)
    assert len(called) > 2 * len(stack.blocks)


def test_what_auto_means(monkeypatch):
    monkeypatch.setattr("moonvit.backends.load", lambda: Loaded(None, "no C++ compiler found"))
    monkeypatch.delenv("MOONVIT_BACKEND", raising=False)
    device = torch.device("cpu")
    assert choose("auto", device, torch.bfloat16) == "eager"
    monkeypatch.setattr("moonvit.backends.load", lambda: Loaded(object(), ""))
    assert choose("auto", device, torch.bfloat16) == "native"
    assert choose("auto", device, torch.float32) == "native"
    assert choose("auto", device, torch.float16) == "eager"
    assert choose("auto", device, torch.float64) == "eager"
    assert choose("auto", torch.device("meta"), torch.float32) == "eager"
    monkeypatch.setenv("MOONVIT_BACKEND", "eager")
    assert choose("auto", device, torch.bfloat16) == "eager"
    assert choose("native", device, torch.bfloat16) == "native"


def test_a_missing_compiler_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr("moonvit.backends.load", lambda: Loaded(None, "no C++ compiler found (this test)"))
    monkeypatch.setattr("moonvit.backends.lacking", lambda: "")
    monkeypatch.delenv("MOONVIT_BACKEND", raising=False)
    for _ in range(2):
        assert loaded(backend="auto").backend == "eager"
    assert [r.message for r in caplog.records] == [
        "this processor could run much faster, but native kernels are missing: no C++ compiler found (this test)"
    ]


def test_a_wrong_name_is_refused(monkeypatch):
    with pytest.raises(MoonvitError, match="backend is 'fast', expected one of auto, eager"):
        loaded(backend="fast")
    monkeypatch.setenv("MOONVIT_BACKEND", "fast")
    with pytest.raises(MoonvitError, match="MOONVIT_BACKEND is 'fast'"):
        loaded(backend="auto")


def test_without_a_library_the_result_is_eager(monkeypatch, caplog):
    monkeypatch.setattr(native_library, "_loaded", None)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset())
    with caplog.at_level(logging.INFO, "moonvit"):
        encoder = loaded(backend="native")
    assert encoder.backend == "eager"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "backend native is not to be had" in caplog.text
    assert "the processor has no avx512_bf16" in caplog.text
    pixels = random_pixels(GRIDS)
    expected = result(loaded(backend="eager").model, pixels, GRIDS)
    assert torch.equal(result(encoder.model, pixels, GRIDS), expected)
    for module in encoder.model.modules():  # a model that was kept on another machine
        if hasattr(module, "backend"):
            module.backend = "native"
    assert torch.equal(result(encoder.model, pixels, GRIDS), expected)


@pytest.fixture
def fresh_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "_failed", [])


def test_compiled_equals_eager_over_sizes(fresh_compiler):
    """Four batches of other sizes and numbers compile what one does, and at most once more."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++, which is not installed")
    encoder = loaded(backend="compiled")
    before = counters["stats"]["unique_graphs"]
    for grids in ([(1, 4, 6)], [(1, 6, 6), (1, 4, 4)], [(1, 8, 10)], [(2, 2, 2), (1, 12, 12)]):
        pixels = random_pixels(grids)
        found = result(encoder.optimize("compiled").model, pixels, grids)
        expected = result(encoder.optimize("eager").model, pixels, grids)
        assert relative_error(found, expected) < 2e-6
    assert not compiled._failed
    assert 2 <= counters["stats"]["unique_graphs"] - before <= 4


def test_a_compiler_that_does_not_work(fresh_compiler, monkeypatch, caplog):
    class BrokenError(Exception):
        __module__ = "torch._inductor.exc"

    def fails(*_):
        raise BrokenError("\nno C++ compiler\nand more")

    monkeypatch.setattr(compiled, "_compiled", lambda half: fails)
    pixels = random_pixels(GRIDS)
    found = result(loaded(backend="compiled").model, pixels, GRIDS)
    assert torch.equal(found, result(loaded(backend="eager").model, pixels, GRIDS))
    assert [r.message for r in caplog.records] == [
        "backend compiled does not work here, eager is used: no C++ compiler"
    ]


def test_other_errors_are_not_swallowed(fresh_compiler, monkeypatch):
    def fails(*_):
        raise ValueError("of the caller's making")

    monkeypatch.setattr(compiled, "_compiled", lambda half: fails)
    with pytest.raises(ValueError, match="of the caller's making"):
        result(loaded(backend="compiled").model, random_pixels(GRIDS), GRIDS)
