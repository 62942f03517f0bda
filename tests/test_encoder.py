"""The Encoder's promises: one in, one out; order kept; types; bounds."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import IMAGES, TINY, relative_error
from moonvit.encoder import Encoder
from moonvit.errors import ImageError, MoonvitError
from moonvit.pixels.decode import Limits

PICTURES = [
    IMAGES / name for name in ("rgb_300x200.png", "rgb_1x1.png", "rgba_120x90.png", "rgb_300x200.png")
]
TOKENS = [88, 1, 20, 88]


def test_one_in_one_out(encoder):
    found = encoder.encode(PICTURES[0])
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (np.float32, (88, 48))
    assert np.array_equal(found, encoder.encode([PICTURES[0]])[0])


def test_list_in_list_out(encoder):
    assert [len(e) for e in encoder.encode(PICTURES)] == TOKENS
    assert [len(e) for e in encoder.encode(tuple(PICTURES))] == TOKENS
    assert encoder.encode([]) == []


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_batch_size_changes_nothing(encoder, batch_size):
    for found, picture in zip(encoder.encode(PICTURES, batch_size=batch_size), PICTURES, strict=True):
        assert relative_error(torch.from_numpy(found), torch.from_numpy(encoder.encode(picture))) < 1e-6


def test_tensors_keep_the_models_type():
    encoder = Encoder.from_pretrained(TINY)
    found = encoder.encode(PICTURES, convert_to_tensor=True)
    assert {e.dtype for e in found} == {torch.bfloat16}
    assert not any(e.requires_grad or e.is_inference() for e in found)
    arrays = encoder.encode(PICTURES)
    assert {e.dtype for e in arrays} == {np.dtype(np.float32)}
    assert np.array_equal(arrays[1], found[1].float().numpy())


def test_embeddings_can_train_what_lies_behind(encoder):
    head = torch.nn.Linear(48, 2)
    head(encoder.encode(PICTURES[0], convert_to_tensor=True)).sum().backward()
    assert head.weight.grad is not None


def test_normalized(encoder):
    found = Encoder.from_pretrained(TINY).encode(PICTURES[0], normalize_embeddings=True)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


def test_processor_makes_a_batch(encoder):
    batch = encoder.processor(PICTURES)
    assert batch.pixel_values.shape == (4 * sum(TOKENS), 3, 14, 14)
    assert batch.pixel_values.dtype == torch.float32
    assert batch.grid_thws.dtype == torch.int64
    assert batch.sizes == [(300, 200), (1, 1), (120, 90), (300, 200)]
    assert len(batch) == 4
    empty = encoder.processor([])
    assert (empty.pixel_values.shape, empty.grid_thws.shape) == ((0, 3, 14, 14), (0, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_model_takes_float32_pixels_whatever_its_type(dtype):
    encoder = Encoder.from_pretrained(TINY, dtype=dtype)
    batch = encoder.processor(PICTURES[2])
    assert encoder.model(batch.pixel_values, batch.grid_thws)[0].dtype == getattr(torch, dtype)


def test_count_tokens(encoder):
    assert [encoder.count_tokens(p) for p in PICTURES] == TOKENS
    assert encoder.count_tokens(Image.new("RGB", (4000, 3000))) == 15444
    assert encoder.count_tokens(Image.new("RGB", (4000, 3000)), max_tokens=100) <= 100


def test_max_tokens(encoder):
    assert len(encoder.encode(PICTURES[0], max_tokens=10)) <= 10
    assert encoder.count_tokens(PICTURES[0], max_tokens=10) == len(encoder.encode(PICTURES[0], max_tokens=10))


def test_bad_picture_is_named(encoder):
    with pytest.raises(ImageError, match=r"nowhere\.png: no such file"):
        encoder.encode([PICTURES[0], "nowhere.png"])


def test_limits_reach_the_processor():
    encoder = Encoder.from_pretrained(TINY, limits=Limits(max_pixels=100))
    with pytest.raises(ImageError, match="the limit is 100"):
        encoder.encode(PICTURES[0])


@pytest.mark.parametrize("dtype", ["int8", "float", torch.int32])
def test_unknown_dtype(dtype):
    with pytest.raises(MoonvitError, match="expected one of bfloat16"):
        Encoder.from_pretrained(TINY, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16", "bf16"])
def test_dtype_spellings(dtype):
    assert Encoder.from_pretrained(TINY, dtype=dtype).dtype == torch.bfloat16


def test_pictures_are_prepared_as_they_are_needed(encoder, monkeypatch):
    """Memory is bounded: only the present group and the next are decoded, and the picture that ends it."""
    alive: list[int] = []
    prepare, embed = encoder.processor.prepare, encoder.embed
    pending = 0

    def counted(*args, **kwargs):
        nonlocal pending
        pending += 1
        alive.append(pending)
        return prepare(*args, **kwargs)

    def emptied(batch):
        nonlocal pending
        pending -= len(batch)
        return embed(batch)

    monkeypatch.setattr(encoder.processor, "prepare", counted)
    monkeypatch.setattr(encoder, "embed", emptied)
    encoder.encode([PICTURES[1]] * 20, batch_size=4)
    assert max(alive) <= 4 + 4 + 1


def test_fingerprint_needs_a_checkpoint(encoder):
    bare = Encoder(copy.deepcopy(encoder.model), encoder.processor)
    assert encoder.fingerprint.startswith("sha256:")
    with pytest.raises(ValueError, match="not loaded from a checkpoint"):
        bare.fingerprint  # noqa: B018
