"""Rotary attention, natively where that is asked for and possible, else in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonvit.native.attention import attention, fits
from moonvit.native.cpu import has_matrix_units
from moonvit.native.library import load
from moonvit.ops.attention import segment_attention
from moonvit.ops.rotary import rotate_halves, rotate_pairs
from moonvit.towers.base import ROWS, Tap, unwatched

Rope = tuple[Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]

ROTATE = {"pairs": rotate_pairs, "halves": rotate_halves}


def runs_native(backend: str, tap: Tap) -> bool:
    """Whether a pass may leave PyTorch: native asked for and there, no gradients, nobody watching stages."""
    return backend == "native" and unwatched(tap) and load().library is not None


def torch_is_faster(dtype: torch.dtype) -> bool:
    """Whether PyTorch's own attention is taken: in bfloat16 it uses matrix units, which the kernel does not.

    Reckoned from published rates, not measured: there was no such processor.
    """
    return dtype == torch.bfloat16 and has_matrix_units()


def rotated(x_NHd: Tensor, rope: Rope, rotation: str, tap: Tap) -> Tensor:
    """One of q and k turned; a large one in place and in parts, where nobody can see it."""
    rotate = ROTATE[rotation]
    if len(x_NHd) <= ROWS or not unwatched(tap):
        return rotate(x_NHd, *rope)
    for x, cos, sin in zip(*(torch.split(y, ROWS) for y in (x_NHd, *rope)), strict=True):
        x.copy_(rotate(x, cos, sin))
    return x_NHd


def rotary_attention(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, rope: Rope, lengths: Sequence[int],
    tap: Tap, *, rotation: str, backend: str,
) -> Tensor:  # fmt: skip
    """Attention within runs of `lengths` patches, q and k turned before, [N, H, d].

    `rotation` is "pairs" or "halves", as in `moonvit.ops.rotary`. Without gradients and taps, q and k may be
    overwritten: at the largest pictures, fresh ones would be the greatest part of all memory.
    """
    if runs_native(backend, tap) and fits(q_NHd) and not torch_is_faster(q_NHd.dtype):
        return attention(q_NHd, k_NHd, v_NHd, lengths, rope, rotation)
    q_NHd, k_NHd = rotated(q_NHd, rope, rotation, tap), rotated(k_NHd, rope, rotation, tap)
    tap("q", q_NHd)
    tap("k", k_NHd)
    tap("v", v_NHd)
    return segment_attention(q_NHd, k_NHd, v_NHd, lengths)
