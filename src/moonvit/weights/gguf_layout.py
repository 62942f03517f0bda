"""Released tensors from their parts in a mmproj file, and back."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from moonvit.weights.gguf_names import PARTS, Layout
from moonvit.weights.names import replaced

TABLE_NAME = "vision_tower.patch_embed.pos_emb.weight"


def rows_by_axis(x: Tensor, heads: int) -> Tensor:
    """Rows of each head from alternating rotary pairs (column, row, column, …) to all column pairs first.

    The two members of a pair stay neighbours: head rows 0 1 2 3 4 5 6 7 come as 0 1 4 5 2 3 6 7. It is what
    `KimiK25Model.permute` of llama.cpp's converter does to queries and keys, weights and biases, and what
    `build_rope_2d` in `clip.cpp` turns: columns in the first half of a head, rows in the second.
    """
    pairs = x.reshape(heads, -1, 2, 2, *x.shape[1:])
    return pairs.transpose(1, 2).reshape(x.shape)


def rows_by_pair(x: Tensor, heads: int) -> Tensor:
    """The inverse of `rows_by_axis`."""
    axes = x.reshape(heads, 2, -1, 2, *x.shape[1:])
    return axes.transpose(1, 2).reshape(x.shape)


def split_name(name: str) -> tuple[str, str]:
    """The released name and which part of it this is, "" for the whole."""
    base, _, kind = name.rpartition(".")
    before, _, part = base.rpartition(".")
    if part in PARTS.get(leaf(before), ()):
        return f"{before}.{kind}", part
    return name, ""


def parts_of(name: str) -> tuple[str, ...]:
    """The parts that a released tensor may lie in; none for most."""
    return PARTS.get(leaf(name.rpartition(".")[0]), ())


def leaf(name: str) -> str:
    """The last word of a name."""
    return name.rpartition(".")[2]


def joined_shape(name: str, shapes: Sequence[tuple[int, ...]], layout: Layout) -> tuple[int, ...] | None:
    """The released tensor's shape from those of its parts; None where they do not go together."""
    first = shapes[0]
    if len(shapes) == 1:
        flat = layout.flat_table and name == TABLE_NAME and len(first) == 2
        side = math.isqrt(first[0])
        return (side, side, first[1]) if flat and side**2 == first[0] else first
    if len(set(shapes)) != 1:
        return None
    if _is_stacked(name):
        return (*first[:2], len(shapes), *first[2:]) if len(first) == 4 else None
    return (len(shapes) * first[0], *first[1:])


def joined(name: str, tensors: Sequence[Tensor], layout: Layout, heads: int) -> Tensor:
    """The released tensor from those of the file."""
    first = tensors[0]
    if len(tensors) > 1:
        kind = max_dtype(tensor.dtype for tensor in tensors)
        tensors = [tensor.to(kind) for tensor in tensors]
        return torch.stack(tensors, 2) if _is_stacked(name) else torch.cat(tensors)
    if turned(name, layout):
        q, k, v = first.chunk(3)
        return torch.cat([rows_by_pair(q, heads), rows_by_pair(k, heads), v])
    shape = joined_shape(name, [tuple(first.shape)], layout)
    assert shape is not None
    return first.reshape(shape)


def turned(name: str, layout: Layout) -> bool:
    """Whether the rows of queries and keys are in another order than released."""
    return layout.by_axis and leaf(name.rpartition(".")[0]) == "wqkv"


def max_dtype(kinds: Iterable[torch.dtype]) -> torch.dtype:
    """The smallest type that holds all of them exactly."""
    return reduce(torch.promote_types, kinds)


def pieces(
    name: str, tensor: Tensor, layout: Layout, heads: int, layers: Sequence[int]
) -> list[tuple[str, Tensor]]:
    """What a released tensor becomes in the file: names and tensors; the inverse of `joined`."""
    whole = {released: stored for stored, released in layout.names.items() if not _is_part(released)}
    parts = {released: stored for stored, released in layout.names.items() if _is_part(released)}
    name = by_layer(name, layers)
    before, _, kind = name.rpartition(".")
    names = [found for part in parts_of(name) if (found := replaced(f"{before}.{part}.{kind}", parts))]
    if names:
        split = tensor.unbind(2) if _is_stacked(name) else tensor.chunk(3)
        return list(zip(names, split, strict=True))
    found = replaced(name, whole)
    assert found is not None, name
    if turned(name, layout):
        q, k, v = tensor.chunk(3)
        tensor = torch.cat([rows_by_axis(q, heads), rows_by_axis(k, heads), v])
    elif layout.flat_table and name == TABLE_NAME:
        tensor = tensor.flatten(0, 1)
    return [(found, tensor)]


def _is_part(released: str) -> bool:
    words = released.split(".")
    return any(word in parts for parts in PARTS.values() for word in words)


def _is_stacked(name: str) -> bool:
    """Whether parts lie along a dimension of their own, the frames of the patch matrix."""
    return leaf(name.rpartition(".")[0]) == "proj"


_DEEPSTACK = "visual.deepstack_merger_list."


def by_layer(name: str, layers: Sequence[int]) -> str:
    """DeepStack's place in the list as the number of its layer."""
    if not name.startswith(_DEEPSTACK):
        return name
    place, _, rest = name.removeprefix(_DEEPSTACK).partition(".")
    return f"{_DEEPSTACK}{layers[int(place)]}.{rest}"


def by_place(name: str, layers: Sequence[int]) -> str | None:
    """DeepStack's layer as its place in the list; None for a layer that is not in it."""
    if not name.startswith(_DEEPSTACK):
        return name
    layer, _, rest = name.removeprefix(_DEEPSTACK).partition(".")
    numbers = [str(number) for number in layers]
    return f"{_DEEPSTACK}{numbers.index(layer)}.{rest}" if layer in numbers else None
