"""Rotary attention, natively where that is asked for and possible, else in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonvit.native.attention import attention, fits
from moonvit.native.cpu import has_matrix_units
from moonvit.native.library import load
from moonvit.ops.attention import segment_attention
from moonvit.ops.rotary import rotate_halves, rotate_pairs
from moonvit.towers.base import Tap, no_tap

Rope = tuple[Tensor, Tensor]

_ROTATE = {"pairs": rotate_pairs, "halves": rotate_halves}


def runs_native(backend: str, tap: Tap) -> bool:
    """Whether a pass may leave PyTorch: native asked for and there, no gradients, nobody watching stages."""
    return (
        backend == "native"
        and tap is no_tap
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and load().library is not None
    )


def torch_is_faster(dtype: torch.dtype) -> bool:
    """Whether PyTorch's own attention is taken: in bfloat16 it uses matrix units, which the kernel does not.

    Reckoned from published rates, not measured: there was no such processor.
    """
    return dtype == torch.bfloat16 and has_matrix_units()


def rotary_attention(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, rope: Rope, lengths: Sequence[int],
    tap: Tap, *, rotation: str, backend: str,
) -> Tensor:  # fmt: skip
    """Attention within runs of `lengths` patches, q and k turned before, [N, H, d].

    `rotation` is "pairs" or "halves", as in `moonvit.ops.rotary`.
    """
    if runs_native(backend, tap) and fits(q_NHd) and not torch_is_faster(q_NHd.dtype):
        return attention(q_NHd, k_NHd, v_NHd, lengths, rope, rotation)
    rotate = _ROTATE[rotation]
    q_NHd, k_NHd = rotate(q_NHd, *rope), rotate(k_NHd, *rope)
    tap("q", q_NHd)
    tap("k", k_NHd)
    tap("v", v_NHd)
    return segment_attention(q_NHd, k_NHd, v_NHd, lengths)
