"""Qwen3-VL's tower: a learned position table besides the rotary one, and DeepStack features."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moonvit.configs.qwen import QwenConfig
from moonvit.ops.attention import Segments
from moonvit.ops.grid import Grid, block_order, frame_lengths
from moonvit.ops.merging import merge_blocks
from moonvit.ops.positions import resample_table
from moonvit.towers.base import Features, Tap, VisionModel, no_tap, table_dtype
from moonvit.towers.qwen import ACTIVATIONS, QwenTower


class FeedForward(nn.Module):
    """linear_fc2(act(linear_fc1(x)))."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[config.activation]
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(self.act(self.linear_fc1(x_ND)))
        return out


class PatchMerger(nn.Module):
    """Matrix, exact GELU, matrix over merged rows; the norm is of patches or, for DeepStack, of rows."""

    def __init__(self, config: QwenConfig, norm_rows: bool) -> None:
        super().__init__()
        width = config.merged_size
        self.size, self.norm_rows = config.merge_size, norm_rows
        self.norm = nn.LayerNorm(width if norm_rows else config.hidden_size, eps=config.norm_eps)
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, config.text_hidden_size)

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.norm_rows:
            rows = self.norm(merge_blocks(x_ND, self.size))
        else:
            rows = merge_blocks(self.norm(x_ND), self.size)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(rows)))
        return out


class Tower(QwenTower):
    """Patches in merge-block order in, embeddings and DeepStack features out."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config, nn.LayerNorm, FeedForward, patch_bias=True)
        self.pos_embed = nn.Embedding(config.table_side**2, config.hidden_size)
        self.merger = PatchMerger(config, norm_rows=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_rows=True) for _ in config.deepstack_layers
        )

    def positions(self, grids: Sequence[Grid]) -> Tensor:
        """The table resampled corner to corner for each frame, in merge-block order [N, D]."""
        weight, side = self.pos_embed.weight, self.config.table_side
        table_hwD = weight.view(side, side, -1)
        planes = {}
        for _, h, w in grids:
            plane = resample_table(table_hwD, h, w, "bilinear", table_dtype(weight), align_corners=True)
            planes[h, w] = plane[block_order([(1, h, w)], self.config.merge_size).to(plane.device)]
        return torch.cat([planes[h, w].repeat(t, 1) for t, h, w in grids])

    def forward(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        x_ND, grids = self.embed(pixel_values, grid_thws, tap)
        if not grids:
            return Features([])
        positions_ND = self.positions(grids)
        tap("pos_embed", positions_ND)
        x_ND = (x_ND + positions_ND).to(x_ND.dtype)
        frames, wanted = Segments(frame_lengths(grids)), self.config.deepstack_layers
        stacked: list[list[Tensor]] = []
        rope = self.rope(grids, x_ND)
        for number, after_ND in enumerate(self.layers(x_ND, rope, lambda _: frames, tap)):
            if number in wanted:
                rows = self.deepstack_merger_list[wanted.index(number)](after_ND)
                tap(f"deepstack.{len(stacked)}", rows)
                stacked.append(self.split(rows, grids))
        projected = self.merger(after_ND)
        tap("projected", projected)
        return Features(self.split(projected, grids), stacked)


class Qwen3VLVision(VisionModel):
    """`visual.*`; pixels [N, 3·2·patch²] in merge-block order."""

    config: QwenConfig

    def __init__(self, config: QwenConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.visual = Tower(config)

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """For each picture or clip [t·h·w/merge_size², text_hidden_size], and so for each DeepStack layer."""
        features: Features = self.visual(pixel_values, grid_thws, tap)
        return features
