"""What the models of all families share: taps, results, and the ways a grid is handed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moonvit.config import TowerConfig
from moonvit.errors import NumericsError
from moonvit.ops.grid import Grid, as_grids, lengths
from moonvit.towers.inputs import all_finite, check_pixels

PATCHES_AT_ONCE = 4096
"""Patches of pictures that go through a tower together; a picture with more goes alone."""

Tap = Callable[[str, Tensor], None]
"""Receives each stage by name as it is computed."""


def no_tap(name: str, value: Tensor) -> None:
    """The tap of a plain run."""


def unwatched(tap: Tap) -> bool:
    """Whether only the result of a pass counts: no gradients, no taps, no tracing by a compiler."""
    return tap is no_tap and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


ROWS = 2048
"""Patches worked on at once where only the result counts."""

MERGED_ROWS = 512
"""Merged rows so; each has four patches' numbers, and more in the text model's width."""


def by_rows(function: Callable[..., Tensor], *inputs: Tensor, at_once: int = ROWS) -> Tensor:
    """`function` of all rows, computed a part of them at a time when nobody watches.

    For what does each row by itself. What lies between input and output, often float32 and several times as
    wide, then never is there for all rows.
    """
    rows = len(inputs[0])
    if rows <= at_once or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*inputs)
    out: Tensor | None = None
    for start in range(0, rows, at_once):
        part = function(*(x[start : start + at_once] for x in inputs))
        out = part.new_empty(rows, *part.shape[1:]) if out is None else out
        out[start : start + at_once] = part
    assert out is not None
    return out


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
            if not all_finite(values):
                raise NumericsError(
                    f"picture {number} of the batch: NaN or infinity came out in {name}",
                    "it overflowed: use bfloat16 or float32"
                    if dtype == torch.float16
                    else "moonvit verify tells whether the weights are finite",
                )


class VisionModel(nn.Module):
    """A tower with its projector; a family defines `run_packed`."""

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
        """Embeddings and what goes beside them.

        Without gradients and taps, a batch of several pictures is done in parts of `PATCHES_AT_ONCE`, so that
        it takes no more memory than its largest picture.
        """
        grids = as_grids(grid_thws)
        if unwatched(tap) and len(grids) > 1 and len(pixel_values) == sum(lengths(grids)):
            parts = parts_of(grids)
            if len(parts) > 1:
                check_pixels(pixel_values)  # of the whole: an error names the patch by its number in it
                sizes = [sum(lengths(part)) for part in parts]
                pixels = torch.split(pixel_values, sizes)
                return joined([self.run_packed(*pair) for pair in zip(pixels, parts, strict=True)])
        return self.run_packed(pixel_values, grids, tap)

    def run_packed(self, pixel_values: Tensor, grid_thws: Any, tap: Tap = no_tap) -> Features:
        """`run` on all pictures together."""
        raise NotImplementedError


def parts_of(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Consecutive pictures, more than one only while they have at most `PATCHES_AT_ONCE` patches."""
    parts: list[list[Grid]] = []
    room = 0
    for grid, length in zip(grids, lengths(grids), strict=True):
        if length > room:
            parts.append([])
            room = PATCHES_AT_ONCE
        parts[-1].append(grid)
        room -= length
    return parts


def joined(parts: Sequence[Features]) -> Features:
    """The features of consecutive parts of a batch as those of the whole."""
    embeddings = [rows for part in parts for rows in part.embeddings]
    layers = zip(*(part.deepstack for part in parts), strict=True)
    return Features(embeddings, [[rows for part in layer for rows in part] for layer in layers])
