"""Two-dimensional rotary positions on adjacent pairs of features.

For f_k = theta^(-4k/d), pair 2k turns by column·f_k and pair 2k+1 by row·f_k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonvit.ops.grid import Grid, raster_positions


def rope_angles(h: int, w: int, head_dim: int, theta: float) -> Tensor:
    """Angles of one frame in raster order, float64 [h·w, head_dim/2] on the CPU."""
    rows, columns = raster_positions(h, w)
    exponents = torch.arange(0, head_dim, 4, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    by_column = columns[:, None] * frequencies
    by_row = rows[:, None] * frequencies
    return torch.stack([by_column, by_row], dim=-1).flatten(1)


def rope_table(
    grids: Sequence[Grid], head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for a packed batch, each [N, head_dim/2] of `dtype` on the CPU.

    Angles and functions are computed in float64 and rounded once. The frames of a clip share theirs.
    """
    frames = {(h, w): rope_angles(h, w, head_dim, theta) for _, h, w in grids}
    angles_NP = torch.cat([frames[h, w].repeat(t, 1) for t, h, w in grids])
    return angles_NP.cos().to(dtype), angles_NP.sin().to(dtype)


def rotate_pairs(x_NHd: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """Turn each adjacent pair (x[2i], x[2i+1]) by its angle, in the table's dtype; returns x's dtype."""
    even, odd = x_NHd.to(cos_NP.dtype).reshape(*x_NHd.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos_NP[:, None], sin_NP[:, None]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x_NHd.dtype)
