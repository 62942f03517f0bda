"""Kimi K3's vision tower, merger and projector in plain NumPy, all in float64.

Shape letters, carried by the tensors' names (``q_NHd`` is [N, H, d]; a 1 is a size of one):
    t h w  frames, rows, columns of patches    y x  rows and columns of the position table
    N  patches, t*h*w    r  a chunk of them    K  numbers in a patch, 3*14*14    H  heads
    D  tower's width     d  a head's width     P  pairs in a head, d/2    F  MLP's width
    M  merged rows, (h/2)*(w/2)    C  their width, 4*D    E  text model's width
Patches lie in raster order: patch (frame, row, column) is number (frame*h + row)*w + column.
Matrices are stored [out, in] and have no bias, so every linear layer is ``x @ W.T``.
``trace`` runs it all. No code is shared with the fast tower, so that each can check the other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Array = NDArray[Any]
Weights = Mapping[str, Array]
Stages = Callable[[str, F64], None] | None
Grid = tuple[int, int, int]
Load = Callable[[str], F64]
Emit = Callable[[str, F64], F64]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the shapes of the weights do not tell; K3's values are in the comments."""

    num_heads: int  # 12
    num_layers: int  # 27
    norm_eps: float  # 1.1920928955078125e-07: float32's, as torch's RMSNorm takes if given none
    projector_eps: float  # 1e-5
    merge: tuple[int, int] = (2, 2)
    interpolation: str = "bilinear"


def gelu_tanh(x: F64) -> F64:
    """GELU by the tanh formula: the tower's."""
    tanh: F64 = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1 + tanh)


def gelu_erf(x: F64) -> F64:
    """Exact GELU, by the error function: the projector's."""
    erf = np.fromiter(map(math.erf, (x / math.sqrt(2)).ravel().tolist()), np.float64, x.size)
    return 0.5 * x * (1 + erf.reshape(x.shape))


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """Each row over its root mean square, times the weight; no mean is taken off."""
    rms: F64 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / rms * weight


def neighbours(size: int, wanted: int) -> tuple[NDArray[np.intp], NDArray[np.intp], F64]:
    """For each of ``wanted`` points: the two table entries around it, and the second's share.

    Half-pixel centres: point i sits at (i + 0.5)*size/wanted - 0.5, clamped to the table.
    It is always two entries, however far the table shrinks, for there is no antialias.
    """
    at = np.clip((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0, size - 1)
    low = np.floor(at).astype(np.intp)
    return low, np.minimum(low + 1, size - 1), at - low


def resample(table_yxD: F64, h: int, w: int) -> F64:
    """The position table brought to [h, w, D], bilinearly; untouched if it has that size."""
    if table_yxD.shape[:2] == (h, w):
        return table_yxD
    up_h, down_h, share_h = neighbours(table_yxD.shape[0], h)
    left_w, right_w, share_w = neighbours(table_yxD.shape[1], w)
    rows_hxD = table_yxD[up_h] + share_h[:, None, None] * (table_yxD[down_h] - table_yxD[up_h])
    return rows_hxD[:, left_w] + share_w[:, None] * (rows_hxD[:, right_w] - rows_hxD[:, left_w])


def positions(table_yxD: F64, grid_thw: Grid) -> F64:
    """[N, D], added to the patches: the table on the grid and, in clips, the frame's time row.

    Time row f is [sin | cos] of f*10000^(-i/(D/2)) for i < D/2; it is not in the checkpoint.
    A still image (t = 1) gets none, not even row 0, whose cosines are 1.
    """
    t, h, w = grid_thw
    grid_thwD = np.repeat(resample(table_yxD, h, w)[None], t, axis=0)
    if t > 1:
        half = grid_thwD.shape[-1] // 2
        angle = np.arange(t)[:, None] * 10000.0 ** (-np.arange(half) / half)
        grid_thwD += np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, None, None]
    return grid_thwD.reshape(t * h * w, -1)


def rotary_angles(grid_thw: Grid, d: int) -> F64:
    """[N, P]: the angles, in radians, by which the channel pairs of each patch's q and k turn.

    For k < d/4 and f_k = 10000^(-4k/d), pair 2k turns by column*f_k and pair 2k+1 by row*f_k,
    in whole patches, alike in all frames. A tower in bfloat16 keeps their tables in float32.
    """
    t, h, w = grid_thw
    f_k = 10000.0 ** (-4 * np.arange(d // 4) / d)
    row_N1, column_N1 = np.divmod(np.tile(np.arange(h * w), t)[:, None], w)
    return np.stack([column_N1 * f_k, row_N1 * f_k], axis=-1).reshape(t * h * w, d // 2)


def rotate(x_NHd: F64, cos_NP: F64, sin_NP: F64) -> F64:
    """Turn each pair of adjacent channels, (2j, 2j+1) and not (j, j + d/2), in all heads alike."""
    a_NHP, b_NHP = x_NHd[..., 0::2], x_NHd[..., 1::2]
    cos_N1P, sin_N1P = cos_NP[:, None], sin_NP[:, None]
    turned = [a_NHP * cos_N1P - b_NHP * sin_N1P, a_NHP * sin_N1P + b_NHP * cos_N1P]
    return np.stack(turned, axis=-1).reshape(x_NHd.shape)


def attention(q_NHd: F64, k_NHd: F64, v_NHd: F64, chunk: int = 256) -> F64:
    """softmax(q k^T / sqrt(d)) v in each head, the heads side by side: [N, H*d].

    Every patch sees all patches of its image or clip, in all frames, and nothing else.
    """
    N, H, d = q_NHd.shape
    out_NHd = np.empty_like(q_NHd)
    for head in range(H):
        for start in range(0, N, chunk):  # a chunk of rows at a time: never N*N scores at once
            rows = slice(start, start + chunk)
            score_rN = q_NHd[rows, head] @ k_NHd[:, head].T / math.sqrt(d)
            exp_rN = np.exp(score_rN - score_rN.max(axis=1, keepdims=True))
            out_NHd[rows, head] = exp_rN / exp_rN.sum(axis=1, keepdims=True) @ v_NHd[:, head]
    return out_NHd.reshape(N, H * d)


def merge_cells(x_ND: F64, grid_thw: Grid, merge: tuple[int, int]) -> F64:
    """[M, C]: the mean over frames, then each cell's patches laid end to end as one row.

    In a 2x2 cell the order is (0,0), (0,1), (1,0), (1,1); cells are row-major like patches.
    """
    (_, h, w), (mh, mw) = grid_thw, merge
    x_hwD = x_ND.reshape(*grid_thw, -1).mean(axis=0)
    corners = [x_hwD[row::mh, column::mw] for row in range(mh) for column in range(mw)]
    return np.concatenate(corners, axis=-1).reshape(h // mh * (w // mw), -1)


def block(i: int, x_ND: F64, cos_sin: tuple[F64, F64], g: Geometry, load: Load, emit: Emit) -> F64:
    """Pre-norm block i: x += wo attn(norm0 x), then x += fc1 gelu_tanh(fc0 norm1 x)."""
    name, here = f"block.{i:02d}", f"vision_tower.encoder.blocks.{i}"
    norm_ND = emit(f"{name}.norm0", rms_norm(x_ND, load(f"{here}.norm0.weight"), g.norm_eps))
    # The rows of wqkv are q, k, v, each by head: a head has rows/(3*H) channels, not D/H.
    qkv_N3Hd = (norm_ND @ load(f"{here}.wqkv.weight").T).reshape(len(x_ND), 3, g.num_heads, -1)
    q_NHd = emit(f"{name}.q_unrotated", qkv_N3Hd[:, 0])
    k_NHd = emit(f"{name}.k_unrotated", qkv_N3Hd[:, 1])
    q_NHd = emit(f"{name}.q", rotate(q_NHd, *cos_sin))
    k_NHd = emit(f"{name}.k", rotate(k_NHd, *cos_sin))
    v_NHd = emit(f"{name}.v", qkv_N3Hd[:, 2])
    attn_ND = attention(q_NHd, k_NHd, v_NHd) @ load(f"{here}.wo.weight").T
    x_ND = emit(f"{name}.attn_residual", x_ND + emit(f"{name}.attn_out", attn_ND))
    norm_ND = emit(f"{name}.norm1", rms_norm(x_ND, load(f"{here}.norm1.weight"), g.norm_eps))
    hidden_NF = emit(f"{name}.mlp_hidden", gelu_tanh(norm_ND @ load(f"{here}.mlp.fc0.weight").T))
    return emit(name, x_ND + hidden_NF @ load(f"{here}.mlp.fc1.weight").T)


def trace(
    weights: Weights, config: Geometry, pixel_values: Array, grid_thw: Grid, stages: Stages = None
) -> F64:
    """Run one image or clip: normalised pixel_values [N, 3, 14, 14] give projected [M, E].

    ``weights``, by checkpoint name and of any float type, become float64 only as they are used.
    ``stages(name, array)``, if given, receives every stage as soon as it is known.
    """

    def load(name: str) -> F64:
        return np.asarray(weights[name], dtype=np.float64)

    def emit(name: str, array: F64) -> F64:
        if stages is not None:
            stages(name, array)
        return array

    N, (t, h, w) = len(pixel_values), grid_thw
    if min(t, h, w) < 1 or t * h * w != N or h % config.merge[0] or w % config.merge[1]:
        raise ValueError(f"{N} patches do not fill {grid_thw=} in cells of {config.merge}")
    if config.interpolation != "bilinear":
        raise ValueError(f"interpolation must be 'bilinear', not {config.interpolation!r}")
    # A patch flattens as (channel, row, column); the convolution is then a plain matrix.
    pixels = emit("pixels", np.asarray(pixel_values, dtype=np.float64))
    kernel_DK = load("vision_tower.patch_embed.proj.weight").reshape(-1, pixels[0].size)
    patch_ND = emit("patch_embed", pixels.reshape(N, -1) @ kernel_DK.T)
    table_yxD = load("vision_tower.patch_embed.pos_emb.weight")
    x_ND = emit("embed", patch_ND + emit("pos_embed", positions(table_yxD, grid_thw)))
    qkv_rows = len(weights["vision_tower.encoder.blocks.0.wqkv.weight"])
    angle_NP = rotary_angles(grid_thw, qkv_rows // (3 * config.num_heads))
    cos_sin = emit("rope_cos", np.cos(angle_NP)), emit("rope_sin", np.sin(angle_NP))
    for i in range(config.num_layers):
        x_ND = block(i, x_ND, cos_sin, config, load, emit)
    final_D = load("vision_tower.encoder.final_layernorm.weight")
    x_ND = emit("final_norm", rms_norm(x_ND, final_D, config.norm_eps))
    x_MC = emit("merged", merge_cells(x_ND, grid_thw, config.merge))
    hidden_MC = emit("proj_hidden", gelu_erf(x_MC @ load("mm_projector.proj.0.weight").T))
    out_ME = hidden_MC @ load("mm_projector.proj.2.weight").T
    post_E = load("mm_projector.post_norm.weight")
    return emit("projected", rms_norm(out_ME, post_E, config.projector_eps))
