"""Numbers rounded to eight-bit integers, each row by a scale of its own."""

import torch
from torch import Tensor

LARGEST = 127
_NORMAL = torch.finfo(torch.float32).smallest_normal


def quantize_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N], x ≈ scale·integer.

    The scale of a row is its largest magnitude / 127, the integers are x / scale rounded with halves to even,
    both in float32. A row of zeros, or of numbers so small that its scale would not be a normal one, has
    scale 0 and integers 0. Symmetric: -128 does not occur. The scale of a row that holds NaN is NaN, with
    infinity it is infinite: every product with it shows.
    """
    scale_N = torch.linalg.vector_norm(x_NK, torch.inf, 1).float() / LARGEST
    scale_N = torch.where(scale_N < _NORMAL, 0.0, scale_N)
    divisor_N = torch.where(scale_N == 0, 1.0, scale_N)
    return (x_NK / divisor_N[:, None]).round_().to(torch.int8), scale_N
