"""MoonViT-V2 with its projector: the vision half of Kimi K3 and K3.1.

Shape letters: D hidden_size, M merged rows, T text_hidden_size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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

__all__ = ["KimiK3Vision", "Projector", "Tap", "VisionTower", "no_tap"]


class Projector(nn.Module):
    """Merged rows into the text width: matrix, exact GELU, matrix, RMS norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.merged_size
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.GELU(),
            nn.Linear(width, config.text_hidden_size, bias=False),
        )
        self.post_norm = nn.RMSNorm(config.text_hidden_size, eps=config.projector_eps)

    def forward(self, merged: Tensor | Sequence[Tensor], tap: Tap = no_tap) -> Tensor | list[Tensor]:
        """[M, 4·D] to [M, T]; a list of such gives a list, in one product."""
        if isinstance(merged, Tensor):
            return self._project(merged, tap)
        if not merged:
            return []
        rows = [len(part) for part in merged]
        return list(torch.split(self._project(joined_rows(merged), tap), rows))

    def _project(self, merged: Tensor, tap: Tap) -> Tensor:
        return by_rows(self._rows, merged, at_once=MERGED_ROWS) if unwatched(tap) else self._rows(merged, tap)

    def _rows(self, merged: Tensor, tap: Tap = no_tap) -> Tensor:
        hidden = self.proj[1](self.proj[0](merged))
        tap("proj_hidden", hidden)
        out: Tensor = self.post_norm(self.proj[2](hidden))
        tap("projected", out)
        return out


class KimiK3Vision(VisionModel):
    """Tower and projector under the checkpoint's names, `vision_tower.*` and `mm_projector.*`.

    Without `projector`, `mm_projector` is None and only `vision_tower` can be called.
    """

    config: VisionConfig

    def __init__(self, config: VisionConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config) if projector else None

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """As `VisionTower.forward`, then projected."""
        if self.mm_projector is None:
            raise ValueError("this checkpoint has no projector: use .vision_tower for the merged rows")
        merged = self.vision_tower(pixel_values, grid_thws, tap)
        return Features(list(self.mm_projector(merged, tap)))
