"""Qwen2.5-VL's tower: RMS norms, SwiGLU, windows of merged cells but for a few layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moonvit.configs.qwen import QwenConfig
from moonvit.ops.attention import Segments
from moonvit.ops.grid import frame_lengths
from moonvit.ops.windows import reorder_blocks, window_order
from moonvit.towers.base import Features, Tap, VisionModel, no_tap
from moonvit.towers.qwen import ACTIVATIONS, Merger, QwenTower, last


class GatedFeedForward(nn.Module):
    """down(act(gate(x))·up(x))."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return out


class Tower(QwenTower):
    """Patches in merge-block order in, embeddings out; runs in window order inside, unseen by taps."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config, nn.RMSNorm, GatedFeedForward)
        self.merger = Merger(config, nn.RMSNorm)

    def forward(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> list[Tensor]:
        x_ND, grids = self.embed(pixel_values, grid_thws, tap)
        if not grids:
            return []
        config, cell = self.config, self.config.merge_size**2
        order, window_lengths = window_order(grids, config.merge_size, config.window_cells)
        frames, windows = Segments(frame_lengths(grids)), Segments(window_lengths)

        def segments(layer: int) -> Sequence[int]:
            return frames if layer in config.full_layers else windows

        cos, sin = (reorder_blocks(table, order, cell) for table in self.rope(grids, x_ND))
        back = torch.argsort(order)

        def in_blocks(name: str, value: Tensor) -> None:
            tap(name, reorder_blocks(value, back, cell))

        seen = tap if tap is no_tap else in_blocks
        x_ND = last(self.layers(reorder_blocks(x_ND, order, cell), (cos, sin), segments, seen))
        projected = reorder_blocks(self.merger(x_ND), back, 1)
        tap("projected", projected)
        return self.split(projected, grids)


class Qwen25VLVision(VisionModel):
    """`visual.*`; pixels [N, 3·2·patch²] in merge-block order."""

    config: QwenConfig

    def __init__(self, config: QwenConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.visual = Tower(config)

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """For each picture or clip [t·h·w/merge_size², text_hidden_size]; t counts pairs of frames."""
        return Features(self.visual(pixel_values, grid_thws, tap))
