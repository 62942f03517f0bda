"""What the tests of native kernels share: whether they can run here, and float64 results to hold them to."""

import pytest
import torch
from torch.nn import functional as F

from moonvit.native.library import load

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
"""About what one rounding costs on average; at worst, twice that."""


def needs_native() -> None:
    loaded = load()
    if loaded.library is None:
        pytest.skip(f"no native kernels here: {loaded.reason}")


def exact_attention(q, k, v, lengths, dtype=torch.float64):
    """Softmax attention of each picture by itself, [N, H, d], in `dtype`."""
    parts = []
    for q_LHd, k_LHd, v_LHd in zip(*(torch.split(x.to(dtype), lengths) for x in (q, k, v)), strict=True):
        mixed = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q_LHd, k_LHd, v_LHd)))
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)
