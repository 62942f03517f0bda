"""The tower against the plain float64 reference, stage by stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonvit import reference
from moonvit.config import VisionConfig
from moonvit.encoder import Encoder
from moonvit.errors import ConfigError
from moonvit.trace.budgets import budget
from moonvit.trace.known import known_tower
from moonvit.trace.metrics import relative_l2
from moonvit.trace.patterns import as_clip, frames
from moonvit.trace.record import record
from moonvit.weights.index import Checkpoint

CASES = (("ramp", (84, 56), 1), ("checkerboard", (28, 112), 1), ("ramp", (56, 84), 2))
"""(pattern, (width, height), frames): two still pictures that are not square, and a clip."""


@dataclass(frozen=True)
class Check:
    """One stage of one case: its error, relative to the reference, and what is allowed."""

    case: str
    stage: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed


class StoredWeights(Mapping[str, NDArray[Any]]):
    """A checkpoint's tensors as NumPy arrays, widened to float32 or wider when they are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self._checkpoint.read(name)
        return np.asarray((tensor if tensor.itemsize >= 4 else tensor.float()).numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)


def geometry(config: VisionConfig) -> reference.Geometry:
    """What the reference needs to know; `ConfigError` for a tower that it does not describe."""
    if config.attn_bias or config.linear_bias or config.patch_bias:
        raise ConfigError("the reference has no biases, but this checkpoint has")
    return reference.Geometry(
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        norm_eps=config.norm_eps,
        projector_eps=config.projector_eps,
        merge=(config.merge_size, config.merge_size),
        interpolation=config.interpolation,
    )


def selftest(encoder: Encoder) -> Iterator[Check]:
    """Every stage of every case in `CASES`, in order."""
    config, _, checkpoint = known_tower(encoder, "selftest")
    weights, shape = StoredWeights(checkpoint), geometry(config)
    dtype = str(encoder.dtype).removeprefix("torch.")
    for pattern, size, count in CASES:
        batch = as_clip(encoder.processor(frames(pattern, size, count)))
        with record(encoder) as seen:
            encoder.embed(batch)
        found: list[tuple[str, float]] = []

        def note(name: str, want: NDArray[np.float64], seen: Any = seen, found: Any = found) -> None:
            found.append((name, relative_l2(seen.pop(name).double().numpy(), want)))

        t, h, w = batch.grid_thws[0].tolist()
        reference.trace(weights, shape, batch.pixel_values.numpy(), (t, h, w), note)
        assert not seen, f"stages that the reference does not know: {', '.join(seen)}"
        case = f"{pattern} {size[0]}x{size[1]}" + (f" {count} frames" if count > 1 else "")
        for name, error in found:
            yield Check(case, name, error, budget(name, dtype, encoder.config.num_layers))
