"""The native attention on tensors."""

import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from moonvit.native.library import Call, Plane, kernels
from moonvit.native.workspace import KEPT, workspace

KINDS = {torch.float32: 0, torch.bfloat16: 1}
ROTATIONS = {None: 0, "pairs": 1, "halves": 2}
MAX_HEAD_DIM = 256


def fits(q_NHd: Tensor) -> bool:
    """Whether the kernel takes such tensors: on the CPU, float32 or bfloat16, heads a multiple of 8."""
    d = q_NHd.shape[-1]
    plain = type(q_NHd) is Tensor and q_NHd.device.type == "cpu" and q_NHd.dtype in KINDS
    return plain and d % 8 == 0 and d <= MAX_HEAD_DIM and len(q_NHd) > 0


def attention(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    lengths: Sequence[int],
    rope: tuple[Tensor, Tensor] | None = None,
    rotation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`segment_attention` after `rotate_pairs` or `rotate_halves` of q and k, [N, H, d].

    The softmax and all sums are float32; with bfloat16, rotated q and k and the probabilities are rounded to
    it. Each picture's result is its own, bit for bit, whatever else is in the batch and however many threads
    there are. Strided views are taken as they are, as long as a head's numbers are neighbours.

    Args:
        q_NHd: what `fits`.
        k_NHd: the same.
        v_NHd: the same.
        lengths: patches of each picture.
        rope: float32 cosines and sines [N, d/2], for a rotation.
        rotation: "pairs", "halves" or None.
        out: where to write, [N, H, d] with neighbouring heads; may be q itself.
    """
    n, heads, d = q_NHd.shape
    if out is None:
        out = torch.empty(n, heads, d, dtype=q_NHd.dtype)
    q_NHd, k_NHd, v_NHd = (x if x.stride(2) == 1 else x.contiguous() for x in (q_NHd, k_NHd, v_NHd))
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    if int(starts[-1]) != n or not k_NHd.shape == v_NHd.shape == out.shape == q_NHd.shape:
        raise ValueError(f"lengths sum to {int(starts[-1])}, and q, k, v or out is not {(n, heads, d)}")
    if out.stride()[1:] != (d, 1):
        raise ValueError("the heads of out must be neighbours")
    tables = [x.contiguous() for x in rope] if rope and rotation else []
    work = workspace("keys", _work_bytes(lengths, heads, d, q_NHd.element_size()))
    call = Call(
        q=_plane(q_NHd), k=_plane(k_NHd), v=_plane(v_NHd),
        out=out.data_ptr(), out_row=out.stride(0),
        starts=starts.data_ptr(), segments=len(lengths), heads=heads, head_dim=d,
        cosine=tables[0].data_ptr() if tables else None,
        sine=tables[1].data_ptr() if tables else None,
        zeros=_ZEROS.data_ptr(), work=work.ctypes.data, work_words=work.size,
        scale=1 / math.sqrt(d), kind=KINDS[q_NHd.dtype], rotation=ROTATIONS[rotation if tables else None],
        threads=torch.get_num_threads(),
    )  # fmt: skip
    if failed := kernels().moonvit_attention(ctypes.byref(call)):
        raise RuntimeError(f"the native attention refused its input ({failed})")
    return out


_ZEROS = torch.zeros(MAX_HEAD_DIM)


def _plane(x_NHd: Tensor) -> Plane:
    return Plane(data=x_NHd.data_ptr(), row=x_NHd.stride(0), head=x_NHd.stride(1))


def _work_bytes(lengths: Sequence[int], heads: int, d: int, size: int) -> int:
    """Room for the packed keys and values of all heads, or of one of the longest picture if that is much."""
    padded = [-(-length // 8) * 8 for length in lengths]
    row = 2 * d * size
    return max(max(padded) * row, min(sum(padded) * heads * row, KEPT))
