"""What the models of all families share: taps, results, and the ways a grid is handed in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moonvit.config import TowerConfig
from moonvit.errors import NumericsError

Tap = Callable[[str, Tensor], None]
"""Receives each stage by name as it is computed."""


def no_tap(name: str, value: Tensor) -> None:
    """The tap of a plain run."""


def prefixed(tap: Tap, prefix: str) -> Tap:
    """The tap under a longer name; a plain run stays one."""
    return tap if tap is no_tap else lambda name, value: tap(f"{prefix}.{name}", value)


def table_dtype(weight: Tensor) -> torch.dtype:
    """Tables are float32, or float64 where the weights are."""
    return torch.promote_types(weight.dtype, torch.float32)


@dataclass(frozen=True)
class Features:
    """All that a model gives the text model.

    Attributes:
        embeddings: for each picture or clip, [tokens, text_hidden_size].
        deepstack: for each of Qwen3-VL's listed layers, from the first up, such a list; empty for the other
            families. Text layer k adds `deepstack[k]` to its hidden states at the picture's places.
    """

    embeddings: list[Tensor]
    deepstack: list[list[Tensor]] = field(default_factory=list)


def check_finite(features: Features, dtype: torch.dtype) -> None:
    """`NumericsError` where a picture's result is not finite."""
    name = str(dtype).removeprefix("torch.")
    for per_picture in (features.embeddings, *features.deepstack):
        for number, values in enumerate(per_picture):
            if not bool(torch.isfinite(values).all()):
                raise NumericsError(
                    f"picture {number} of the batch: NaN or infinity came out in {name}",
                    "it overflowed: use bfloat16 or float32"
                    if dtype == torch.float16
                    else "moonvit verify tells whether the weights are finite",
                )


class VisionModel(nn.Module):
    """A tower with its projector; a family defines `run`."""

    config: TowerConfig

    def forward(
        self,
        pixel_values: Tensor,
        grid_thws: Any = None,
        *,
        image_grid_thw: Any = None,
        image_grid_hws: Any = None,
        tap: Tap = no_tap,
    ) -> list[Tensor]:
        """Embeddings for the text model: for each picture or clip, [tokens, text_hidden_size].

        The grid goes in by exactly one of its usual names; otherwise as the family's `run`.
        """
        given = [grid for grid in (grid_thws, image_grid_thw, image_grid_hws) if grid is not None]
        if len(given) != 1:
            fault = "missing" if not given else f"given {len(given)} times, by several of its names"
            raise ValueError(f"grid_thws is {fault}")
        features = self.run(pixel_values, given[0], tap)
        if pixel_values.device.type != "meta" and not torch.compiler.is_compiling():
            dtype = next(self.parameters()).dtype
            if dtype == torch.float16:  # the one type whose range the activations may leave
                check_finite(features, dtype)
        return features.embeddings

    def run(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """Embeddings and what goes beside them."""
        raise NotImplementedError
