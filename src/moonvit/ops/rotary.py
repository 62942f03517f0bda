"""Two-dimensional rotary positions.

On adjacent pairs of features (Kimi): for f_k = theta^(-4k/d), pair 2k turns by column·f_k and pair 2k+1
by row·f_k. Half-split (Qwen): pair i is features i and i + d/2; the first d/4 pairs turn by row·f_i, the
others by column·f_i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moonvit.ops.grid import Grid, block_positions, raster_positions


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
    """Turn each adjacent pair (x[2i], x[2i+1]) by its angle, in the table's dtype; returns x's dtype.

    A pair turned is one complex product, which runs through memory in order; compilers and devices that do
    without complex numbers get the same sums written out.
    """
    pairs = x_NHd.to(cos_NP.dtype).reshape(*x_NHd.shape[:-1], -1, 2)
    if x_NHd.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        turns = torch.complex(cos_NP, sin_NP)[:, None]
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    else:
        even, odd = pairs.unbind(-1)
        cos, sin = cos_NP[:, None], sin_NP[:, None]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x_NHd.dtype)


def half_table(
    grids: Sequence[Grid], head_dim: int, theta: float, dtype: torch.dtype, size: int
) -> tuple[Tensor, Tensor]:
    """Half-split cosines and sines in merge-block order, each [N, head_dim/2] of `dtype` on the CPU.

    `size` patches make a side of a cell. Computed as `rope_table`.
    """
    exponents = torch.arange(0, head_dim, 4, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    frames = {}
    for _, h, w in grids:
        rows, columns = block_positions(h, w, size)
        frames[h, w] = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=1)
    angles_NP = torch.cat([frames[h, w].repeat(t, 1) for t, h, w in grids])
    return angles_NP.cos().to(dtype), angles_NP.sin().to(dtype)


def rotate_halves(x_NHd: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its angle, in the table's dtype; returns x's dtype."""
    first, second = x_NHd.to(cos_NP.dtype).chunk(2, dim=-1)
    cos, sin = cos_NP[:, None], sin_NP[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_NHd.dtype)
