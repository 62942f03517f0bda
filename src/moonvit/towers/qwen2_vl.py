"""Qwen2-VL's tower: LayerNorm, two-layer feed-forward, attention over each frame."""

from typing import Any

from torch import Tensor, nn

from moonvit.configs.qwen import QwenConfig
from moonvit.ops.attention import Segments
from moonvit.ops.grid import frame_lengths
from moonvit.towers.base import Features, Tap, VisionModel, no_tap
from moonvit.towers.qwen import ACTIVATIONS, Merger, QwenTower, last


class FeedForward(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.act = ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x_ND)))
        return out


class Tower(QwenTower):
    """Patches in merge-block order in, embeddings out."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config, nn.LayerNorm, FeedForward)
        self.merger = Merger(config, nn.LayerNorm)

    def forward(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> list[Tensor]:
        x_ND, grids = self.embed(pixel_values, grid_thws, tap)
        if not grids:
            return []
        frames = Segments(frame_lengths(grids))
        x_ND = last(self.layers(x_ND, self.rope(grids, x_ND), lambda _: frames, tap))
        projected = self.merger(x_ND)
        tap("projected", projected)
        return self.split(projected, grids)


class Qwen2VLVision(VisionModel):
    """`visual.*`; pixels [N, 3·2·patch²] in merge-block order."""

    config: QwenConfig

    def __init__(self, config: QwenConfig, projector: bool = True) -> None:
        super().__init__()
        self.config = config
        self.visual = Tower(config)

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """For each picture or clip [t·h·w/merge_size², text_hidden_size]; t counts pairs of frames."""
        return Features(self.visual(pixel_values, grid_thws, tap))
