"""Which token comes next, and tokens into text as they come."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonvit.engine.sampling import Sampler, Sampling, kept
from moonvit.engine.streaming import UNFINISHED, TextStream
from moonvit.errors import MoonvitError, NumericsError

# Which token comes next


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_kept_tokens_are_those_of_transformers(temperature, top_k, top_p):
    pytest.importorskip("transformers")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_V = torch.randn(100, generator=torch.Generator().manual_seed(3))
    expected = TemperatureLogitsWarper(temperature)(None, logits_V[None])
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    found = kept(logits_V, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(found, expected[0])


def test_choices_follow_the_probabilities():
    logits_V = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(temperature=1.0, seed=5))
    counts = torch.bincount(torch.tensor([sampler.choose(logits_V) for _ in range(3000)]), minlength=3)
    assert torch.allclose(counts / 3000, logits_V.softmax(0), atol=0.03)
    assert Sampler(Sampling()).choose(logits_V) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1},
     {"max_new_tokens": 0}, {"stop": ("",)}, {"temperature": "hot"}, {"top_k": 1.5}, {"max_new_tokens": 1.5},
     {"max_new_tokens": True}, {"stop": (1,)}, {"stop": 1}, {"seed": -1}, {"seed": 2**63}, {"seed": "x"}],
)  # fmt: skip
def test_sampling_refuses(wrong):
    with pytest.raises(MoonvitError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("temperature", [1e-44, 1e-320])
def test_almost_cold_is_cold(temperature):
    """Logits over such a temperature overflow; the likeliest are left."""
    logits_V = torch.tensor([-5.0, 3.0, 2.9])
    assert Sampler(Sampling(temperature=temperature, seed=1)).choose(logits_V) == 1
    assert Sampler(Sampling(temperature=temperature, top_p=0.5, top_k=2, seed=1)).choose(logits_V) == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_overflow_is_said(wrong):
    logits_V = torch.tensor([0.0, wrong], dtype=torch.float16)
    with pytest.raises(NumericsError, match="in float16 .*use bfloat16"):
        Sampler(Sampling()).choose(logits_V)


# Tokens into text


def as_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@given(data=st.binary(max_size=40))
def test_streamed_bytes_are_the_whole_text(data):
    stream = TextStream(as_bytes)
    pieces = [stream.push(byte) for byte in data]
    assert "".join(pieces) + stream.finish() == as_bytes(data)


@given(text=st.text(max_size=12))
def test_no_half_characters(text):
    stream = TextStream(as_bytes)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text.removesuffix(UNFINISHED) or UNFINISHED in text
    assert UNFINISHED in text or not any(UNFINISHED in piece for piece in pieces)


@given(text=st.text("ab", max_size=14), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_stop(text, stop):
    stream = TextStream(as_bytes, stop)
    out = ""
    for byte in text.encode():
        out += stream.push(byte)
        if stream.stopped:
            break
    out += stream.finish()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    if ends:  # the stop that is whole first; of two at once, the longer
        first = min(ends)
        starts = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == first]
        assert out == text[: min(starts)]
    else:
        assert out == text
