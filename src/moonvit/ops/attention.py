"""Bidirectional attention within each picture of a packed batch."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F


def segment_attention(q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, lengths: Sequence[int]) -> Tensor:
    """Softmax(q·kᵀ/√d)·v within each run of `lengths` patches, [N, H, d].

    Neighbours of equal length share one call. No mask is built, so memory grows with the pictures, not
    with the square of the batch; the kernels keep the softmax in float32 or wider.
    """
    parts = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        window = slice(start, start + count * length)
        q, k, v = (x[window].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q_NHd, k_NHd, v_NHd))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        start = window.stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)
