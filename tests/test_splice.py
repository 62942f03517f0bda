"""Embeddings put into text: both conventions, the same tensors, nothing cut or filled up."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonvit.errors import PromptError
from moonvit.splice import IGNORED, grow, splice

PAD, VIDEO_PAD, FILLER = 7, 8, 0
D = 5


def rows_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator) for n in lengths]


def table(vocab: int = 16) -> torch.Tensor:
    return torch.randn(vocab, D, generator=torch.Generator().manual_seed(1))


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] and mask [B, T] of rows of unequal length."""
    long = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill, ones = [FILLER] * (long - len(row)), [1] * len(row)
        ids.append(fill + row if side == "left" else row + fill)
        mask.append([0] * len(fill) + ones if side == "left" else ones + [0] * len(fill))
    return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)


def test_splice_by_hand():
    ids = torch.tensor([[1, 7, 7, 2, 7, 3], [7, 4, 8, 8, 5, 6]])
    text = table()[ids]
    a, b, c, d = rows_of(2, 1, 1, 2)
    spliced = splice(text, ids, [[a, b], [c, d]], {PAD, VIDEO_PAD})
    expected = text.clone()
    expected[0, 1:3], expected[0, 4], expected[1, 0], expected[1, 2:4] = a, b[0], c[0], d
    assert torch.equal(spliced, expected)
    assert torch.equal(text, table()[ids])  # the text's own are left alone


def test_pads_of_two_kinds_side_by_side_are_two_slots():
    ids = torch.tensor([[7, 7, 8, 8, 8, 7]])
    a, b, c = rows_of(2, 3, 1)
    assert torch.equal(splice(table()[ids], ids, [[a, b, c]], (PAD, VIDEO_PAD))[0], torch.cat([a, b, c]))
    with pytest.raises(PromptError, match="row 0: slot 0 has 2 pads, its embeddings 3 rows"):
        splice(table()[ids], ids, [[b, a, c]], (PAD, VIDEO_PAD))


def test_grow_by_hand():
    ids = torch.tensor([[0, 1, 7, 2], [7, 3, 7, 4]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    labels = torch.tensor([[-100, 11, 17, 12], [27, 23, 28, 24]])
    text = table()[ids]
    a, b, c = rows_of(2, 1, 3)
    grown = grow(text, ids, [[a], [b, c]], PAD, mask, labels)
    zero = torch.zeros(1, D)
    assert torch.equal(grown.inputs_embeds[0], torch.cat([text[0, 1:2], a, text[0, 3:], zero, zero]))
    assert torch.equal(grown.inputs_embeds[1], torch.cat([b, text[1, 1:2], c, text[1, 3:]]))
    assert grown.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert grown.position_ids.tolist() == [[0, 1, 2, 3, 1, 1], [0, 1, 2, 3, 4, 5]]
    assert grown.labels.tolist() == [[11, -100, -100, 12, -100, -100], [-100, 23, -100, -100, -100, 24]]
    left = grow(text, ids, [[a], [b, c]], PAD, mask, labels, padding_side="left")
    assert left.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert left.position_ids.tolist() == [[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert left.labels[0].tolist() == [-100, -100, 11, -100, -100, 12]
    assert torch.equal(left.inputs_embeds[0, 2:], grown.inputs_embeds[0, :4])


def test_masks_are_the_references():
    """As transformers' Llava merged them: positions by cumulative sum, 1 under padding."""
    ids, mask = padded([[1, 7], [2, 3, 7, 4]], "left")
    grown = grow(table()[ids], ids, [rows_of(3), rows_of(2)], PAD, mask, padding_side="left")
    expected = (grown.attention_mask.cumsum(-1) - 1).masked_fill_(grown.attention_mask == 0, 1)
    assert torch.equal(grown.position_ids, expected)
    assert grown.labels is None


rows_strategy = st.lists(
    st.lists(
        st.one_of(st.integers(1, 6), st.tuples(st.sampled_from([PAD, VIDEO_PAD]), st.integers(1, 4))),
        max_size=8,
    ),
    min_size=1,
    max_size=4,
)  # a token, or a pad and the rows of its embedding


@settings(max_examples=200, deadline=None)
@given(
    rows_strategy, st.sampled_from(["left", "right"]), st.sampled_from(["left", "right"]), st.integers(0, 99)
)
def test_written_out_and_grown_are_the_same(rows, side_in, side_out, seed):
    """Pads separated by a token, as every family writes them; rows of any length, padded on either side."""
    embeddings, short, long = [], [], []
    for number, row in enumerate(rows):
        lengths = [item[1] for item in row if isinstance(item, tuple)]
        embeddings.append(rows_of(*lengths, seed=seed + number))
        short.append(
            [token for item in row for token in ([item[0], 9] if isinstance(item, tuple) else [item])]
        )
        long.append(
            [
                token
                for item in row
                for token in ([item[0]] * item[1] + [9] if isinstance(item, tuple) else [item])
            ]
        )
    ids, mask = padded(short, side_in)
    long_ids, long_mask = padded(long, side_out)
    labels = torch.where(mask.bool(), ids + 100, IGNORED)
    pads = (PAD, VIDEO_PAD)
    grown = grow(table()[ids], ids, embeddings, pads, mask, labels, padding_side=side_out)
    spliced = splice(table()[long_ids] * long_mask[..., None], long_ids, embeddings, pads)
    assert torch.equal(grown.inputs_embeds, spliced)
    assert torch.equal(grown.attention_mask, long_mask)
    is_text = long_mask.bool() & ~torch.isin(long_ids, torch.tensor(pads))
    assert torch.equal(grown.labels, torch.where(is_text, long_ids + 100, IGNORED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_the_texts(dtype):
    ids = torch.tensor([[1, 7, 7, 2]])
    (a,) = rows_of(2)
    spliced = splice(table()[ids].to(dtype), ids, [[a]], PAD)
    assert spliced.dtype == dtype
    assert torch.equal(spliced[0, 1:3], a.to(dtype))
    single = torch.tensor([[1, 7, 2]])
    grown = grow(table()[single].to(dtype), single, [[a]], PAD)
    assert torch.equal(grown.inputs_embeds, spliced)


def test_on_another_device():
    ids = torch.tensor([[1, 7, 7, 2]])
    text = table()[ids].to("meta")
    assert splice(text, ids, [rows_of(2)], PAD).device.type == "meta"
    single = torch.tensor([[1, 7, 2]])
    grown = grow(table()[single].to("meta"), single, [rows_of(2)], PAD)
    assert grown.inputs_embeds.device.type == "meta"
    assert grown.inputs_embeds.shape == (1, 4, D)
    assert grown.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_gradients_reach_text_and_pictures():
    ids, single = torch.tensor([[1, 7, 7, 2]]), torch.tensor([[1, 7, 2]])
    weight = torch.arange(1.0, 5.0)[:, None]
    for build in (
        lambda text, a: splice(text[ids], ids, [[a]], PAD),
        lambda text, a: grow(text[single], single, [[a]], PAD).inputs_embeds,
    ):
        text, a = table().requires_grad_(), rows_of(2)[0].requires_grad_()
        (build(text, a)[0] * weight).sum().backward()
        assert torch.equal(a.grad, torch.tensor([[2.0], [3.0]]).expand(2, D))
        assert text.grad[1].eq(1).all()
        assert text.grad[2].eq(4).all()
        assert text.grad[7].eq(0).all()  # what stood at the pads is not used


def test_without_pictures():
    ids = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(splice(table()[ids], ids, [[], []], PAD), table()[ids])
    grown = grow(table()[ids], ids, [[], []], PAD)
    assert torch.equal(grown.inputs_embeds, table()[ids])
    assert grown.position_ids.tolist() == [[0, 1], [0, 1]]
    nothing = grow(torch.zeros(2, 0, D), torch.zeros(2, 0, dtype=torch.long), [[], []], PAD)
    assert nothing.inputs_embeds.shape == (2, 0, D)


def test_pads_under_padding_are_none():
    ids, mask = torch.tensor([[7, 7, 1, 7]]), torch.tensor([[0, 0, 1, 1]])
    grown = grow(table()[ids], ids, [rows_of(2)], PAD, mask)
    assert grown.attention_mask.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("row", "lengths", "message"),
    [
        ([7, 7, 1, 2], (2, 2), "row 1: 1 slots, but embeddings for 2"),
        ([7, 7, 1, 7], (2,), "row 1: 3 pads, but embeddings of 2 rows"),
        ([1, 1, 1, 2], (2,), "row 1: 0 slots, but embeddings for 1"),
        ([7, 7, 7, 2], (2,), "row 1: 3 pads, but embeddings of 2 rows"),
        ([7, 1, 1, 2], (2,), "row 1: slot 0 has 1 pads, its embeddings 2 rows"),
        ([7, 7, 1, 7], (1, 2), "row 1: slot 1 has 1 pads, its embeddings 2 rows"),
        ([7, 1, 7, 7], (2, 1), "row 1: slot 0 has 1 pads, its embeddings 2 rows"),
        ([7, 1, 1, 2], (), "row 1: 1 pads, but embeddings of 0 rows"),
    ],
)
def test_splice_refuses_wrong_counts(row, lengths, message):
    ids = torch.tensor([[1, 7, 2, 3], row])
    with pytest.raises(PromptError, match=message):
        splice(table()[ids], ids, [rows_of(1), rows_of(*lengths)], PAD)


@pytest.mark.parametrize(
    ("row", "lengths", "message"),
    [
        ([7, 1, 2], (2, 2), "row 1: 1 pads, but 2 embeddings"),
        ([7, 7, 2], (2,), "row 1: 2 pads, but 1 embeddings"),
        ([1, 1, 2], (2,), "row 1: 0 pads, but 1 embeddings"),
        ([7, 1, 2], (), "row 1: 1 pads, but 0 embeddings"),
        ([7, 1, 2], (0,), "row 1: an embedding without rows"),
    ],
)
def test_grow_refuses_wrong_counts(row, lengths, message):
    ids = torch.tensor([[1, 7, 2], row])
    with pytest.raises(PromptError, match=message):
        grow(table()[ids], ids, [rows_of(4), rows_of(*lengths)], PAD)


@pytest.mark.parametrize("put", [splice, grow])
def test_what_does_not_fit_together(put):
    ids = torch.tensor([[1, 7, 2]])
    text = table()[ids]
    with pytest.raises(PromptError, match=r"row 0: embedding 0 is \[1, 6\], the text's width is 5"):
        put(text, ids, [[torch.zeros(1, 6)]], PAD)
    with pytest.raises(PromptError, match=r"row 0: embedding 0 is \[5\], the text's width is 5"):
        put(text, ids, [[torch.zeros(5)]], PAD)
    with pytest.raises(PromptError, match="1 rows of ids, but 2 lists of embeddings"):
        put(text, ids, [rows_of(1), []], PAD)
    with pytest.raises(PromptError, match=r"expected \[B, T, D\] and \[B, T\]"):
        put(text[0], ids[0], [rows_of(1)], PAD)
    with pytest.raises(PromptError, match=r"expected \[B, T, D\] and \[B, T\]"):
        put(text, ids[:, :2], [rows_of(1)], PAD)


@pytest.mark.parametrize("put", [splice, grow])
def test_what_is_no_embedding(put):
    ids = torch.tensor([[1, 7, 2]])
    text = table()[ids]
    for wrong, message in (
        (torch.ones(1, D).long(), "row 0: embedding 0 is torch.int64, expected a floating type"),
        (torch.ones(1, D).cfloat(), "row 0: embedding 0 is torch.complex64"),
        (
            torch.ones(1, D).numpy(),
            r"embedding 0 is a ndarray, expected a tensor \(encode with convert_to_tensor",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            put(text, ids, [[wrong]], PAD)
    with pytest.raises(PromptError, match="inputs_embeds is torch.int64, expected a floating type"):
        put(text.long(), ids, [rows_of(1)], PAD)


@pytest.mark.parametrize("put", [splice, grow])
@pytest.mark.parametrize(
    "wrap", [torch.tensor, np.int64, lambda pad: [pad], lambda pad: torch.tensor([pad, 8])]
)
def test_pad_ids_of_any_kind(put, wrap):
    ids = torch.tensor([[1, 7, 2]])
    found, expected = (put(table()[ids], ids, [rows_of(1)], pad) for pad in (wrap(PAD), PAD))
    rows = [one if isinstance(one, torch.Tensor) else one.inputs_embeds for one in (found, expected)]
    assert torch.equal(*rows)
    with pytest.raises(PromptError, match="pad_ids are not whole numbers"):
        put(table()[ids], ids, [rows_of(1)], ["7"])


def test_what_grow_refuses():
    ids = torch.tensor([[1, 7, 2]])
    text = table()[ids]
    with pytest.raises(PromptError, match="row 0: attention_mask has a gap"):
        grow(text, ids, [rows_of(1)], PAD, torch.tensor([[1, 0, 1]]))
    with pytest.raises(PromptError, match=r"labels is \[1, 2\], input_ids \[1, 3\]"):
        grow(text, ids, [rows_of(1)], PAD, labels=ids[:, :2])
    for labels in (ids.to(torch.uint8), ids.float(), ids.bool()):  # which cannot hold -100
        with pytest.raises(PromptError, match="labels is torch.*, expected a type of whole numbers"):
            grow(text, ids, [rows_of(1)], PAD, labels=labels)
    with pytest.raises(ValueError, match="padding_side is 'both'"):
        grow(text, ids, [rows_of(1)], PAD, padding_side="both")
