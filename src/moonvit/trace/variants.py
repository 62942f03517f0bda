"""The tower with known mistakes in it, as one plain function of a `Variant`; everything in float64.

A variant says which operations are done in another way than the right one. The right operations are
those of `moonvit.ops`; the wrong ones stand here. Shape letters as in `moonvit.towers.kimi_k3`.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moonvit.config import ROPE_THETA, VisionConfig
from moonvit.ops.attention import segment_attention
from moonvit.ops.grid import Grid, lengths, raster_positions
from moonvit.ops.merging import merge_cells
from moonvit.ops.positions import resample_table, time_table
from moonvit.ops.rotary import rotate_pairs
from moonvit.trace.stages import block_number

Stages = Generator[tuple[str, Tensor], None, Tensor]
Weights = Mapping[str, Tensor]
Pixels = Mapping[str, Tensor]
"""{way of making pixels: normalised [N, 3, patch, patch]}; "right" is always there."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How each step is done; a default is the right way, None stands for the config's own value."""

    pixels: str = "right"
    patch_layout: str = "channel,row,column"
    table: str = "resampled"
    table_transposed: bool = False
    time_rows: str = "clips"
    norm: str = "rms"
    norm_eps: float | None = None
    rotary_pairs: str = "adjacent"
    rotary_axes: str = "column,row"
    rotary_angles: str = "interleaved"
    rotary_sign: int = 1
    theta: float = ROPE_THETA
    scale: float | None = None
    qkv: str = "q|k|v"
    attention: str = "picture"
    gelu: str = "tanh"
    final_norm: bool = True
    merge: str = "cells"
    frames: str = "mean"
    projector_gelu: str = "erf"
    post_norm: str = "after"
    projector_eps: float | None = None
    position_dtype: torch.dtype = torch.float64
    rope_dtype: torch.dtype = torch.float64

    def changed(self, changes: Mapping[str, Any]) -> "Variant":
        return replace(self, **changes)


BEFORE_BLOCKS = frozenset(
    {"pixels", "patch_layout", "table", "table_transposed", "time_rows", "position_dtype"}
)
AFTER_BLOCKS = frozenset({"final_norm", "merge", "frames", "projector_gelu", "post_norm", "projector_eps"})


class DoesNotApplyError(ValueError):
    """The variant means nothing for this picture, such as a table's corner for a larger grid."""


@dataclass
class Machine:
    """A tower that runs any variant from any stage that is enough to go on from.

    `weights` give float64 tensors by checkpoint name. Embeddings and rotary tables are kept, so that
    variants which share them do not compute them twice.
    """

    config: VisionConfig
    weights: Weights
    grids: Sequence[Grid]
    pixels: Pixels
    _kept: dict[Any, Any] = field(default_factory=dict)

    def stages(self, v: Variant, start: str | None, x: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of every stage after `start`, whose value is `x`; from the pixels if None."""
        number = block_number(start) if start else None
        if start in (None, "pixels"):
            x = yield from self._embed(v, x)
        first = 0 if number is None else number + 1
        assert start is None or x is not None
        if start in (None, "pixels", "embed") or number is not None:
            assert x is not None
            rope = self._rope(v)
            yield from (("rope_cos", rope[0]), ("rope_sin", rope[1])) if number is None else ()
            for i in range(first, self.config.num_layers):
                x = yield from self._block(v, i, x, rope)
            x = self._final_norm(v, x)
            yield "final_norm", x
            start = "final_norm"
        assert x is not None
        yield from self._after(v, start or "", x)

    def _embed(self, v: Variant, x: Tensor | None) -> Stages:
        if x is None:
            if v.pixels not in self.pixels:
                raise DoesNotApplyError(v.pixels)
            x = self.pixels[v.pixels]
            yield "pixels", x
        key = ("patches", id(x), v.patch_layout)
        if key not in self._kept:
            axes = {"channel,row,column": (0, 1, 2, 3), "row,column,channel": (0, 2, 3, 1)}
            axes["channel,column,row"] = (0, 1, 3, 2)
            flat = x.permute(axes[v.patch_layout]).flatten(1)
            kernel = self.weights["vision_tower.patch_embed.proj.weight"].flatten(1)
            self._kept[key] = (F.linear(flat, kernel), x)  # x is kept so that its id stays its own
        patches, positions = self._kept[key][0], self._positions(v)
        yield "patch_embed", patches
        yield "pos_embed", positions
        x = patches + positions
        yield "embed", x
        return x

    def _positions(self, v: Variant) -> Tensor:
        key = ("positions", v.table, v.table_transposed, v.time_rows, v.position_dtype)
        if key not in self._kept:
            self._kept[key] = self._resampled(v)
        positions: Tensor = self._kept[key]
        return positions

    def _resampled(self, v: Variant) -> Tensor:
        table = self.weights["vision_tower.patch_embed.pos_emb.weight"]
        table = table.transpose(0, 1) if v.table_transposed else table
        parts = []
        for t, h, w in self.grids:
            plane = resampled(table, h, w, v.table, self.config.interpolation).to(v.position_dtype)
            times = time_table(max(t, 1), plane.shape[-1], torch.float64).to(v.position_dtype)
            if v.time_rows == "never" or (v.time_rows == "clips" and t == 1):
                times = torch.zeros_like(times)
            plane, times = plane.to(torch.float64), times.to(torch.float64)
            parts.append((plane[None] + times[:, None]).flatten(0, 1))
        return torch.cat(parts)

    def _rope(self, v: Variant) -> tuple[Tensor, Tensor]:
        key = ("rope", v.rotary_axes, v.rotary_angles, v.rotary_sign, v.theta, v.rope_dtype)
        if key not in self._kept:
            frames = [rotary_angles(v, h, w, self.config.head_dim).repeat(t, 1) for t, h, w in self.grids]
            angles = torch.cat(frames)
            cos, sin = angles.cos().to(v.rope_dtype), v.rotary_sign * angles.sin().to(v.rope_dtype)
            self._kept[key] = cos.to(torch.float64), sin.to(torch.float64)
        cos_sin: tuple[Tensor, Tensor] = self._kept[key]
        return cos_sin

    def _norm(self, v: Variant, x: Tensor, name: str) -> Tensor:
        eps = self.config.norm_eps if v.norm_eps is None else v.norm_eps
        x = x - x.mean(-1, keepdim=True) if v.norm == "layer" else x
        return rms(x, eps) * self.weights[name]

    def _block(self, v: Variant, i: int, x: Tensor, rope: tuple[Tensor, Tensor]) -> Stages:
        name, here = f"block.{i:02}", f"vision_tower.encoder.blocks.{i}"
        normed = self._norm(v, x, f"{here}.norm0.weight")
        yield f"{name}.norm0", normed
        q, k, value = split_qkv(v, F.linear(normed, self.weights[f"{here}.wqkv.weight"]), self.config)
        yield f"{name}.q_unrotated", q
        yield f"{name}.k_unrotated", k
        q, k = rotate(v, q, rope), rotate(v, k, rope)
        yield f"{name}.q", q
        yield f"{name}.k", k
        yield f"{name}.v", value
        attended = attention(v, q, k, value, self.grids).flatten(1)
        attended = F.linear(attended, self.weights[f"{here}.wo.weight"])
        yield f"{name}.attn_out", attended
        x = x + attended
        yield f"{name}.attn_residual", x
        normed = self._norm(v, x, f"{here}.norm1.weight")
        yield f"{name}.norm1", normed
        hidden = gelu(v.gelu, F.linear(normed, self.weights[f"{here}.mlp.fc0.weight"]))
        yield f"{name}.mlp_hidden", hidden
        x = x + F.linear(hidden, self.weights[f"{here}.mlp.fc1.weight"])
        yield name, x
        return x

    def _final_norm(self, v: Variant, x: Tensor) -> Tensor:
        return self._norm(v, x, "vision_tower.encoder.final_layernorm.weight") if v.final_norm else x

    def _after(self, v: Variant, start: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        eps = self.config.projector_eps if v.projector_eps is None else v.projector_eps
        if start == "final_norm":
            parts = torch.split(x, lengths(self.grids))
            x = torch.cat([merged(v, part, g) for part, g in zip(parts, self.grids, strict=True)])
            yield "merged", x
        if start != "proj_hidden":
            x = rms(x, eps) if v.post_norm.startswith("before") else x
            x = gelu(v.projector_gelu, F.linear(x, self.weights["mm_projector.proj.0.weight"]))
            yield "proj_hidden", x
        x = F.linear(x, self.weights["mm_projector.proj.2.weight"])
        x = rms(x, eps) if v.post_norm == "after" else x
        scaled = v.post_norm in ("after", "before, weight after")
        yield "projected", x * self.weights["mm_projector.post_norm.weight"] if scaled else x


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gelu(kind: str, x: Tensor) -> Tensor:
    if kind == "quick":
        return x * torch.sigmoid(1.702 * x)
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")


def resampled(table_yxD: Tensor, h: int, w: int, how: str, mode: str) -> Tensor:
    """The table at h×w in one of the ways of `Variant.table`, [h·w, D]."""
    if how == "resampled":
        return resample_table(table_yxD, h, w, mode, torch.float64)
    if how == "corner":
        if h > table_yxD.shape[0] or w > table_yxD.shape[1]:
            raise DoesNotApplyError(how)
        return table_yxD[:h, :w].flatten(0, 1)
    ways: dict[str, dict[str, Any]] = {
        "bilinear": {"mode": "bilinear", "align_corners": False},
        "bicubic": {"mode": "bicubic", "align_corners": False},
        "antialiased": {"mode": "bilinear", "align_corners": False, "antialias": True},
        "bicubic antialiased": {"mode": "bicubic", "align_corners": False, "antialias": True},
        "align_corners": {"mode": "bilinear", "align_corners": True},
        "bicubic align_corners": {"mode": "bicubic", "align_corners": True},
        "nearest": {"mode": "nearest"},
    }
    planes = table_yxD.permute(2, 0, 1)[None]
    if table_yxD.shape[:2] != (h, w):
        planes = F.interpolate(planes, size=(h, w), **ways[how])
    return planes[0].permute(1, 2, 0).flatten(0, 1)


def rotary_angles(v: Variant, h: int, w: int, d: int) -> Tensor:
    """Angles of one frame, [h·w, d/2]."""
    rows, columns = raster_positions(h, w)
    step = 2 if v.rotary_angles == "half steps" else 4
    f_k = v.theta ** -(torch.arange(d // 4, dtype=torch.float64) * step / d)
    if v.rotary_angles == "bfloat16 frequencies":
        f_k = f_k.to(torch.bfloat16).to(torch.float64)
    first, second = columns[:, None] * f_k, rows[:, None] * f_k
    if v.rotary_axes == "row,column":
        first, second = second, first
    if v.rotary_angles == "halves":
        return torch.cat([first, second], dim=-1)
    return torch.stack([first, second], dim=-1).flatten(1)


def rotate(v: Variant, x_NHd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    if v.rotary_pairs == "adjacent":
        return rotate_pairs(x_NHd, *rope)
    cos, sin = rope[0][:, None], rope[1][:, None]
    a, b = x_NHd.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def split_qkv(v: Variant, x_NK: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor, Tensor]:
    heads, d = config.num_heads, config.head_dim
    if v.qkv == "per head":
        q, k, value = x_NK.view(-1, heads, 3, d).unbind(2)
    elif v.qkv == "per channel":
        q, k, value = x_NK.view(-1, heads, d, 3).unbind(3)
    else:
        q, k, value = x_NK.view(-1, 3, heads, d).unbind(1)
    return q, k, value


def attention(v: Variant, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, grids: Sequence[Grid]) -> Tensor:
    if v.scale is not None:
        q_NHd = q_NHd * (v.scale * q_NHd.shape[-1] ** 0.5)
    sizes = lengths(grids)
    if v.attention == "batch":
        sizes = [sum(sizes)]
    elif v.attention == "frame":
        sizes = [h * w for t, h, w in grids for _ in range(t)]
    elif v.attention == "causal":
        parts = []
        for q, k, x in zip(*(torch.split(y, sizes) for y in (q_NHd, k_NHd, v_NHd)), strict=True):
            q, k, x = (y.transpose(0, 1)[None] for y in (q, k, x))
            parts.append(F.scaled_dot_product_attention(q, k, x, is_causal=True)[0].transpose(0, 1))
        return torch.cat(parts)
    return segment_attention(q_NHd, k_NHd, v_NHd, sizes)


def merged(v: Variant, x_LD: Tensor, grid: Grid) -> Tensor:
    t, h, w = grid
    if v.frames != "mean" and t > 1:
        frames = x_LD.view(t, h * w, -1)
        x_LD, grid = (frames[0] if v.frames == "first" else frames.sum(0)), (1, h, w)
    if v.merge == "cells":
        return merge_cells(x_LD, grid, 2)
    plane = x_LD.reshape(*grid, -1).mean(0)
    if v.merge == "raster":
        return plane.reshape(h * w // 4, -1)
    cells = plane.reshape(h // 2, 2, w // 2, 2, -1)
    axes = {"column by column": (0, 2, 3, 1, 4), "cells column by column": (2, 0, 1, 3, 4)}
    axes["channels interleaved"] = (0, 2, 4, 1, 3)
    return cells.permute(axes[v.merge]).reshape(h * w // 4, -1)
