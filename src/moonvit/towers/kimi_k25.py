"""The vision halves of Kimi K2.5, K2.6 and Kimi-VL: MoonViT with a projector that norms before merging.

Parameter names are the checkpoints'. Shape letters: D hidden_size, M merged rows, T text_hidden_size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moonvit.config import VisionConfig
from moonvit.towers.base import (
    MERGED_ROWS,
    Features,
    Tap,
    VisionModel,
    by_rows,
    joined_rows,
    no_tap,
    unwatched,
)
from moonvit.towers.moonvit import VisionTower


class PatchMerger(nn.Module):
    """LayerNorm of each patch, then matrix, exact GELU, matrix over the merged row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.merged_size
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.projector_eps)
        self.linears(nn.Linear(width, width), nn.Linear(width, config.text_hidden_size))

    def linears(self, first: nn.Linear, second: nn.Linear) -> None:
        self.proj = nn.Sequential(first, nn.GELU(), second)

    def matrices(self, merged: Tensor, tap: Tap) -> Tensor:
        hidden = self.proj[1](self.proj[0](merged))
        tap("proj_hidden", hidden)
        out: Tensor = self.proj[2](hidden)
        return out

    def forward(self, merged: Sequence[Tensor], tap: Tap = no_tap) -> list[Tensor]:
        """A list of [M, 4·D] to a list of [M, T], in one product."""
        if not merged:
            return []
        rows = joined_rows(merged)
        projected = (
            by_rows(self.project, rows, at_once=MERGED_ROWS) if unwatched(tap) else self.project(rows, tap)
        )
        return list(torch.split(projected, [len(part) for part in merged]))

    def project(self, rows: Tensor, tap: Tap = no_tap) -> Tensor:
        patches = rows.reshape(len(rows), -1, self.pre_norm.normalized_shape[0])
        normed = self.pre_norm(patches).flatten(1)
        tap("proj_norm", normed)
        projected = self.matrices(normed, tap)
        tap("projected", projected)
        return projected


class LinearPatchMerger(PatchMerger):
    """The same under Kimi-VL's names, `linear_1` and `linear_2`."""

    def linears(self, first: nn.Linear, second: nn.Linear) -> None:
        self.linear_1, self.linear_2 = first, second

    def matrices(self, merged: Tensor, tap: Tap) -> Tensor:
        hidden = F.gelu(self.linear_1(merged))
        tap("proj_hidden", hidden)
        out: Tensor = self.linear_2(hidden)
        return out


class KimiK25Vision(VisionModel):
    """K2.5 and K2.6: `vision_tower.*` and `mm_projector.{pre_norm,proj.0,proj.2}`."""

    config: VisionConfig

    def __init__(self, config: VisionConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.mm_projector = PatchMerger(config) if projector else None

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """As `VisionTower.forward`, then projected."""
        if self.mm_projector is None:
            raise ValueError("this checkpoint has no projector: use .vision_tower for the merged rows")
        return Features(self.mm_projector(self.vision_tower(pixel_values, grid_thws, tap), tap))


class KimiVLVision(VisionModel):
    """Kimi-VL: `vision_tower.*` and `multi_modal_projector.{pre_norm,linear_1,linear_2}`; stills only."""

    config: VisionConfig

    def __init__(self, config: VisionConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.multi_modal_projector = LinearPatchMerger(config) if projector else None

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """As `VisionTower.forward`, then projected."""
        if self.multi_modal_projector is None:
            raise ValueError("this checkpoint has no projector: use .vision_tower for the merged rows")
        return Features(self.multi_modal_projector(self.vision_tower(pixel_values, grid_thws, tap), tap))
