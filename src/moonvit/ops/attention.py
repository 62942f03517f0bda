"""Bidirectional attention within each picture of a packed batch."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Segments(tuple[int, ...]):
    """Patches of each picture of a packed batch, with what a device needs to know of them.

    Made once a pass, so that no block waits for a copy to the device.
    """

    def __new__(cls, lengths: Iterable[int]) -> "Segments":
        made = super().__new__(cls, lengths)
        made._offsets = {}
        return made

    _offsets: dict[torch.device, Tensor]

    def offsets(self, device: torch.device) -> Tensor:
        """First patch of each picture, and the end: int32 [pictures + 1] on the device."""
        if device not in self._offsets:
            numbers = torch.tensor([0, *accumulate(self)], dtype=torch.int32, device="cpu")
            self._offsets[device] = numbers.to(device, non_blocking=True)
        return self._offsets[device]


def segment_attention(q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, lengths: Sequence[int]) -> Tensor:
    """Softmax(q·kᵀ/√d)·v within each run of `lengths` patches, [N, H, d].

    Neighbours of equal length share one call; on CUDA in half precision, unequal ones do as well. No mask is
    built, so memory grows with the pictures, not with the square of the batch; the kernels keep the softmax
    in float32 or wider.
    """
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    if len(runs) > 1 and takes_packed(q_NHd):
        segments = lengths if isinstance(lengths, Segments) else Segments(lengths)
        return packed_attention(q_NHd, k_NHd, v_NHd, segments)
    parts = []
    start = 0
    for length, count in runs:
        window = slice(start, start + count * length)
        q, k, v = (x[window].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q_NHd, k_NHd, v_NHd))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        start = window.stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def takes_packed(q_NHd: Tensor) -> bool:
    """Whether PyTorch's variable-length kernel takes such a batch: CUDA, half precision, Ampere or newer."""
    if q_NHd.device.type != "cuda" or torch.compiler.is_compiling() or varlen_kernel() is None:
        return False
    half = q_NHd.dtype in (torch.float16, torch.bfloat16)
    return half and q_NHd.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(q_NHd.device) >= (8, 0)


def packed_attention(q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, segments: Segments) -> Tensor:
    """All pictures in one call of the variable-length kernel."""
    offsets, longest = segments.offsets(q_NHd.device), max(segments)
    kernel = varlen_kernel()
    assert kernel is not None
    mixed: Tensor = kernel(q_NHd, k_NHd, v_NHd, offsets, offsets, longest, longest)
    return mixed


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """`torch.nn.attention.varlen.varlen_attn`, or None before torch 2.10."""
    try:
        return import_module("torch.nn.attention.varlen").varlen_attn  # type: ignore[no-any-return]
    except ImportError:
        return None
