"""Embeddings of pictures put into embeddings of text.

Two conventions: pads written out before, one for each row of an embedding (`splice`), or one pad a picture
that is grown in place (`grow`). Both give the same tensors.

B rows, T tokens in (S out), D width.
"""

from collections.abc import Collection, Sequence
from operator import index
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moonvit.errors import PromptError
from moonvit.prompt.expand import cut, runs, whole_numbers

IGNORED = -100
"""The label of what no loss is taken of, as PyTorch's cross-entropy has it."""

PadIds = int | Collection[int]


class Grown(NamedTuple):
    """What `grow` gives.

    Attributes:
        inputs_embeds: [B, S, D]; 0 where there is padding.
        attention_mask: int64 [B, S], 1 but for padding.
        position_ids: int64 [B, S], from 0 at the first token; 1 where there is padding, as the reference.
        labels: int64 [B, S], -100 at pictures and padding; None where none were given.
    """

    inputs_embeds: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor | None


def splice(
    inputs_embeds: Tensor, input_ids: Tensor, embeddings: Sequence[Sequence[Tensor]], pad_ids: PadIds
) -> Tensor:
    """`inputs_embeds` with each row's embeddings in place of its pads, one to one and in order.

    Args:
        inputs_embeds: [B, T, D] of type float64, 32, 16 or bfloat16 on any device; what stands at pads is
            not used.
        input_ids: [B, T].
        embeddings: for each row its pictures' [n, D], which are brought to `inputs_embeds`' type and device.
        pad_ids: the pad, or those of pictures and videos.

    Returns:
        [B, T, D], with the gradients of both.

    Raises:
        PromptError: where a run of pads is not as long as its embeddings, and for another width; nothing is
            cut or filled up. The message names the row and both numbers.
    """
    _check(inputs_embeds, input_ids, embeddings)
    pads = _as_set(pad_ids)
    for row, (ids, pictures) in enumerate(zip(input_ids.tolist(), embeddings, strict=True)):
        try:
            cut(runs(ids, pads), [len(picture) for picture in pictures])
        except PromptError as error:
            raise PromptError(f"row {row}: {error.message}") from error
    flat = [picture for pictures in embeddings for picture in pictures]
    if not flat:
        return inputs_embeds
    all_ND = torch.cat([picture.to(inputs_embeds) for picture in flat])
    mask_BT1 = _mask(input_ids, pads).to(inputs_embeds.device)[..., None]
    return inputs_embeds.masked_scatter(mask_BT1, all_ND)


def grow(
    inputs_embeds: Tensor,
    input_ids: Tensor,
    embeddings: Sequence[Sequence[Tensor]],
    pad_ids: PadIds,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    padding_side: Literal["left", "right"] = "right",
) -> Grown:
    """Each pad, of which there is one a picture, replaced by all rows of that picture's embeddings.

    Args:
        inputs_embeds: [B, T, D].
        input_ids: [B, T].
        embeddings: for each row its pictures' [n, D].
        pad_ids: the pad, or those of pictures and videos.
        attention_mask: [B, T], 0 at the padding of shorter rows, left or right; None where there is none.
            Pads under the padding are none.
        labels: [B, T].
        padding_side: where shorter rows are padded in the result.

    Raises:
        PromptError: where a row has more pads than pictures or fewer, for another width, and for a mask
            with a gap. The message names the row and both numbers.
    """
    _check(inputs_embeds, input_ids, embeddings)
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side is {padding_side!r}, expected 'left' or 'right'")
    for name, given in (("attention_mask", attention_mask), ("labels", labels)):
        if given is not None and given.shape != input_ids.shape:
            raise PromptError(f"{name} is {list(given.shape)}, input_ids {list(input_ids.shape)}")
    if labels is not None and labels.dtype not in (torch.int64, torch.int32, torch.int16):
        raise PromptError(f"labels is {labels.dtype}, expected a type of whole numbers that holds {IGNORED}")
    pads = _as_set(pad_ids)
    spans = _spans(attention_mask, input_ids)
    ids = [row[start:stop] for row, (start, stop) in zip(input_ids.tolist(), spans, strict=True)]
    _check_single_pads(ids, embeddings, pads)
    rows: list[Tensor] = []
    sources: list[Tensor] = []
    for row, (start, stop) in enumerate(spans):
        grown_SD, source_S = _grown_row(inputs_embeds[row, start:stop], ids[row], embeddings[row], pads)
        rows.append(grown_SD)
        sources.append(torch.where(source_S < 0, source_S, source_S + start))
    if not rows:
        return _with_masks(inputs_embeds, input_ids, labels)
    out = torch.stack(_padded(rows, padding_side, 0))
    source_BS = torch.stack(_padded([s[:, None] for s in sources], padding_side, -2))[..., 0]
    return _with_masks(out, source_BS.to(input_ids.device), labels)


def _check_single_pads(
    ids: Sequence[Sequence[int]], embeddings: Sequence[Sequence[Tensor]], pads: Collection[int]
) -> None:
    for row, pictures in enumerate(embeddings):
        found = sum(token in pads for token in ids[row])
        if found != len(pictures):
            raise PromptError(f"row {row}: {found} pads, but {len(pictures)} embeddings")
        if any(len(picture) == 0 for picture in pictures):
            raise PromptError(f"row {row}: an embedding without rows")


def _padded(rows: Sequence[Tensor], side: str, value: int) -> list[Tensor]:
    """Rows [S, D] of unequal length made equally long."""
    long = max(len(row) for row in rows)
    found: list[Tensor] = []
    for row in rows:
        missing = long - len(row)
        before = missing if side == "left" else 0
        found.append(torch.nn.functional.pad(row, (0, 0, before, missing - before), value=value))
    return found


def _grown_row(
    own_TD: Tensor, ids: Sequence[int], pictures: Sequence[Tensor], pads: Collection[int]
) -> tuple[Tensor, Tensor]:
    """The row [S, D], and for each of its places the number of its token, -1 at pictures."""
    parts: list[Tensor] = []
    sources: list[Tensor] = []
    begin = 0
    left = iter(pictures)
    for place, token in enumerate(ids):
        if token in pads:
            picture = next(left).to(own_TD)
            parts += [own_TD[begin:place], picture]
            sources += [torch.arange(begin, place), torch.full((len(picture),), -1)]
            begin = place + 1
    parts.append(own_TD[begin:])
    sources.append(torch.arange(begin, len(ids)))
    return torch.cat(parts), torch.cat(sources)


def _with_masks(inputs_embeds: Tensor, source_BS: Tensor, labels: Tensor | None) -> Grown:
    """Masks, positions and labels from where each place came from: a token, -1 a picture, -2 padding."""
    attention_mask = (source_BS != -2).long()
    position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    if labels is not None:
        taken = labels.gather(1, source_BS.clamp(min=0).to(labels.device))
        labels = taken.masked_fill((source_BS < 0).to(labels.device), IGNORED)
    return Grown(inputs_embeds, attention_mask, position_ids, labels)


def _spans(attention_mask: Tensor | None, input_ids: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of what is no padding, for each row."""
    rows, width = input_ids.shape
    if attention_mask is None:
        return [(0, width)] * rows
    spans: list[tuple[int, int]] = []
    for row, mask in enumerate((attention_mask != 0).tolist()):
        start = mask.index(True) if True in mask else 0
        stop = start + sum(mask)
        if not all(mask[start:stop]):
            raise PromptError(f"row {row}: attention_mask has a gap, expected padding at one end")
        spans.append((start, stop))
    return spans


def _check(inputs_embeds: Tensor, input_ids: Tensor, embeddings: Sequence[Sequence[Tensor]]) -> None:
    if inputs_embeds.ndim != 3 or input_ids.shape != inputs_embeds.shape[:2]:
        raise PromptError(
            f"inputs_embeds is {list(inputs_embeds.shape)} and input_ids {list(input_ids.shape)}, "
            "expected [B, T, D] and [B, T]"
        )
    if isinstance(embeddings, Tensor) or len(embeddings) != len(input_ids):
        raise PromptError(f"{len(input_ids)} rows of ids, but {len(embeddings)} lists of embeddings")
    if not inputs_embeds.is_floating_point():
        raise PromptError(f"inputs_embeds is {inputs_embeds.dtype}, expected a floating type")
    width = inputs_embeds.shape[2]
    for row, pictures in enumerate(embeddings):
        for number, picture in enumerate(pictures):
            if not isinstance(picture, Tensor):
                raise PromptError(
                    f"row {row}: embedding {number} is a {type(picture).__name__}, expected a tensor",
                    "encode with convert_to_tensor=True",
                )
            if picture.ndim != 2 or picture.shape[1] != width:
                raise PromptError(
                    f"row {row}: embedding {number} is {list(picture.shape)}, the text's width is {width}"
                )
            if not picture.is_floating_point():
                raise PromptError(
                    f"row {row}: embedding {number} is {picture.dtype}, expected a floating type"
                )


def _as_set(pad_ids: PadIds) -> frozenset[int]:
    """Plain numbers, from tensors and arrays too."""
    try:
        return frozenset((index(pad_ids),))  # type: ignore[arg-type]
    except TypeError:
        return frozenset(whole_numbers(pad_ids, "pad_ids"))  # type: ignore[arg-type]


def _mask(input_ids: Tensor, pads: Collection[int]) -> Tensor:
    """Bool [B, T], where the pads are."""
    return torch.isin(input_ids, torch.tensor(sorted(pads), device=input_ids.device))
