"""Native kernels against float64, over shapes that do not fit their blocks."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from conftest import relative_error
from moonvit.native import product as native_product
from moonvit.native import workspace as native_workspace
from moonvit.native.attention import attention, fits
from moonvit.native.elementwise import gelu_tanh_, norm, turn_pairs_
from moonvit.native.product import product
from moonvit.ops.rotary import half_table, rope_table, rotate_halves, rotate_pairs
from native import UNIT, exact_attention, needs_native

TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _needed():
    needs_native()


def made(seed, n, heads, d, dtype, scale=1.0):
    """q, k and v as views of one buffer, the way a tower has them."""
    qkv = torch.randn(n, 3, heads, d, generator=torch.Generator().manual_seed(seed)) * scale
    return qkv.to(dtype).unbind(1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    d=st.sampled_from([8, 24, 64, 72, 80, 128, 256]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_attention_is_as_exact_as_its_type(lengths, heads, d, dtype, seed):
    q, k, v = made(seed, sum(lengths), heads, d, dtype)
    found = attention(q, k, v, lengths)
    # Roundings of the probabilities and the result; in float32 also those of two sums of d and of L products.
    allowed = 2 * UNIT[dtype] if dtype == torch.bfloat16 else 16 * UNIT[dtype]
    assert relative_error(found, exact_attention(q, k, v, lengths)) < allowed


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("d", "length"), [(128, 1000), (72, 777), (64, 129), (80, 48)])
def test_attention_against_pytorch(dtype, d, length):
    """No less exact than PyTorch's own kernel in the same type, but for the float32 sums of longer runs."""
    q, k, v = made(5, length, 2, d, dtype)
    exact = exact_attention(q, k, v, [length])
    theirs = relative_error(exact_attention(q, k, v, [length], dtype), exact)
    assert relative_error(attention(q, k, v, [length]), exact) < 1.5 * theirs + UNIT[torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
def test_extreme_scores(dtype):
    """Scores up to 1e4 and beyond: a softmax that is all but one-hot, and no infinity on the way."""
    q, k, v = made(1, 200, 2, 64, dtype, scale=100.0)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 8
    assert scores.abs().max() > 1e4
    found = attention(q, k, v, [200])
    assert torch.isfinite(found).all()
    # A float32 score of 1e4 is good to 1e-3 absolute, and so is the probability made of it.
    assert relative_error(found, exact_attention(q, k, v, [200])) < 4e-3
    low = attention(q, -100 * q, v, [200])
    assert torch.isfinite(low).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_scores_that_rise_and_fall(dtype):
    """The running maximum grows with each block of keys, or never after the first key."""
    n, d = 500, 64
    rising = torch.linspace(-80, 80, n)[:, None, None].expand(n, 1, d).to(dtype)
    q = torch.ones(n, 1, d, dtype=dtype)
    v = torch.randn(n, 1, d, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (rising, rising.flip(0)):
        found, exact = attention(q, k, v, [n]), exact_attention(q, k, v, [n])
        assert relative_error(found, exact) < (4e-3 if dtype == torch.bfloat16 else 1e-4)


def test_not_a_number_comes_through():
    q, k, v = made(2, 60, 1, 64, torch.float32)
    q = q.clone()
    q[17, 0, 3] = float("nan")
    found = attention(q, k, v, [60])
    assert torch.isnan(found[17]).all()
    assert torch.isfinite(found[:17]).all()
    assert torch.isfinite(found[18:]).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_picture_does_not_see_its_batch(dtype):
    """Bit for bit: alone, among others, in another order, with another number of threads, twice."""
    lengths = [130, 1, 49, 300]
    q, k, v = made(3, sum(lengths), 3, 72, dtype)
    whole = attention(q, k, v, lengths)
    parts = [torch.split(x, lengths) for x in (q, k, v)]
    alone = [attention(*(x[i] for x in parts), [length]) for i, length in enumerate(lengths)]
    assert torch.equal(whole, torch.cat(alone))
    turned = attention(*(torch.cat(x[::-1]) for x in parts), lengths[::-1])
    assert torch.equal(turned, torch.cat(alone[::-1]))
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(attention(q, k, v, lengths), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TYPES)
def test_layouts(dtype):
    """Contiguous, strided and transposed memory, and a result written over q."""
    q, k, v = made(4, 150, 2, 64, dtype)
    expected = attention(q, k, v, [150])
    assert torch.equal(attention(q.contiguous(), k.contiguous(), v.contiguous(), [150]), expected)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(attention(*heads_first, [150]), expected)
    columns = [x.permute(0, 2, 1).contiguous().permute(0, 2, 1) for x in (q, k, v)]
    assert torch.equal(attention(*columns, [150]), expected)
    buffer = torch.stack([q, k, v], dim=1)
    q, k, v = buffer.unbind(1)
    assert torch.equal(attention(q, k, v, [150], out=q), expected)
    assert torch.equal(buffer[:, 0], expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotation", ["pairs", "halves"])
@pytest.mark.parametrize("d", [64, 72, 128])
def test_rotation(dtype, rotation, d):
    grids = [(1, 8, 10), (2, 4, 6)]
    lengths = [80, 48]
    q, k, v = made(6, 128, 2, d, dtype)
    if rotation == "pairs":
        rope, rotate = rope_table(grids, d, 10000.0, torch.float32), rotate_pairs
    else:
        rope, rotate = half_table(grids, d, 10000.0, torch.float32, 2), rotate_halves
    found = attention(q, k, v, lengths, rope, rotation)
    exact = exact_attention(rotate(q, *rope), rotate(k, *rope), v, lengths)
    assert relative_error(found, exact) < (2 * UNIT[dtype] if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 37, 1024, 1152])
def test_norms(dtype, width):
    generator = torch.Generator().manual_seed(width)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((50, width), width, width)
    )
    x = x * 3 + 1
    shape = (width,)
    rms = norm(x, weight, None, 1e-6, False, torch.empty_like(x))
    assert relative_error(rms, F.rms_norm(x.double(), shape, weight.double(), 1e-6)) < UNIT[dtype]
    layer = norm(x, weight, bias, 1e-5, True, torch.empty_like(x))
    exact = F.layer_norm(x.double(), shape, weight.double(), bias.double(), 1e-5)
    assert relative_error(layer, exact) < UNIT[dtype]
    assert torch.equal(norm(x, weight, None, 1e-6, False, x), rms)


@pytest.mark.parametrize("dtype", TYPES)
def test_gelu(dtype):
    x = torch.linspace(-12, 12, 10_007).to(dtype)
    exact = F.gelu(x.double(), approximate="tanh")
    theirs = relative_error(F.gelu(x, approximate="tanh"), exact)
    assert relative_error(gelu_tanh_(x.clone()), exact) < 1.2 * theirs
    edges = torch.tensor([float("inf"), float("nan"), -300.0, 300.0, 0.0], dtype=dtype)
    expected = torch.tensor([float("inf"), float("nan"), 0.0, 300.0, 0.0], dtype=dtype)
    torch.testing.assert_close(gelu_tanh_(edges), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [8, 24, 72, 128])
def test_turning_in_place(dtype, d):
    rope = rope_table([(1, 6, 10)], d, 10000.0, torch.float32)
    q, _, _ = made(7, 60, 3, d, dtype)
    expected = rotate_pairs(q, *rope).double()
    error = relative_error(turn_pairs_(q, *rope), expected)  # in place, through the view
    # The kernel fuses a product and a sum; one number in many then rounds to its neighbour.
    assert error < (1e-3 if dtype == torch.bfloat16 else 1e-7)


def test_what_fits():
    assert fits(torch.zeros(4, 2, 72))
    assert not fits(torch.zeros(4, 2, 12))
    assert not fits(torch.zeros(4, 2, 264))
    assert not fits(torch.zeros(4, 2, 64, dtype=torch.float64))
    assert not fits(torch.zeros(4, 2, 64, dtype=torch.float16))
    assert not fits(torch.zeros(4, 2, 64, device="meta"))
    assert not fits(torch.zeros(0, 2, 64))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 200),
    inner=st.sampled_from([2, 8, 30, 588, 1030, 2600]),
    outputs=st.sampled_from([1, 7, 16, 33, 48, 49, 130]),
    dtype=st.sampled_from(TYPES),
    bias=st.booleans(),
    then=st.sampled_from(["store", "gelu_tanh", "add"]),
)
def test_products(rows, inner, outputs, dtype, bias, then):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner + 4, generator=generator).to(dtype)[:, :inner]  # rows lie apart
    weight = (torch.randn(outputs, inner, generator=generator) / inner**0.5).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    buffer = torch.randn(rows, outputs + 3, generator=generator).to(dtype)
    out, around = buffer[:, :outputs], buffer[:, outputs:].clone()
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    if then == "gelu_tanh":
        exact = F.gelu(exact, approximate="tanh")
    elif then == "add":
        exact = exact + out.double()
    product(x, weight, offset, out, then)
    # One rounding of the result, at worst twice what it is on average; in float32 also those of sums of up to 256 products and of their sums.
    allowed = 2.1 * UNIT[dtype] if dtype == torch.bfloat16 else 16 * UNIT[dtype]
    assert (out.double() - exact).norm() <= allowed * max(float(exact.norm()), outputs**0.5)
    assert torch.equal(buffer[:, outputs:], around)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_of_more_rows_than_the_workspace(dtype, monkeypatch):
    """The same rows in parts: bit for bit, with any number of threads."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((300, 64), (50, 64)))
    whole = product(x, weight, None, torch.empty(300, 50, dtype=dtype))
    monkeypatch.setattr(native_product, "_PACKED", 1)
    monkeypatch.setattr(native_workspace, "_local", threading.local())
    assert torch.equal(product(x, weight, None, torch.empty(300, 50, dtype=dtype)), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(x, weight, None, torch.empty(300, 50, dtype=dtype)), whole)
    finally:
        torch.set_num_threads(threads)


def test_shapes_that_do_not_fit_are_refused():
    """The kernels believe what they are told: a wrong size would be memory overwritten."""
    x, weight = torch.zeros(4, 8), torch.zeros(6, 8)
    for out in (torch.zeros(4, 5), torch.zeros(3, 6)):
        with pytest.raises(ValueError, match="do not fit together"):
            product(x, weight, None, out)
    with pytest.raises(ValueError, match="do not fit together"):
        product(x, torch.zeros(6, 10), None, torch.zeros(4, 6))
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="lengths sum to 5"):
        attention(q, q, q, [5])
    with pytest.raises(ValueError, match=r"is not \(4, 2, 8\)"):
        attention(q, q[:3], q, [4])
    with pytest.raises(RuntimeError, match="refused"):
        attention(torch.zeros(4, 2, 12), torch.zeros(4, 2, 12), torch.zeros(4, 2, 12), [4])


@pytest.mark.parametrize("dtype", TYPES)
def test_heads_that_do_not_fit_the_workspace_together(dtype, monkeypatch):
    """A head at a time in the room of the longest: bit for bit."""
    lengths = [130, 1, 300]
    q, k, v = made(8, sum(lengths), 3, 64, dtype)
    whole = attention(q, k, v, lengths)
    monkeypatch.setattr("moonvit.native.attention.KEPT", 1)
    monkeypatch.setattr(native_workspace, "_local", threading.local())
    assert torch.equal(attention(q, k, v, lengths), whole)
