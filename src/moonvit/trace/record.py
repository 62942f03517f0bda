"""Stages of one pass of an encoder, kept in memory or written to a file as they are computed."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonvit._version import __version__
from moonvit.encoder import Encoder
from moonvit.ops.grid import as_grids, block_order, raster_order
from moonvit.pixels.kimi import PixelBatch
from moonvit.trace.stages import Selection, has_patch_rows, stage_names
from moonvit.weights.writer import SafetensorsWriter

ORDERS = ("raster", "block")
FORMAT = "moonvit-trace-1"


@contextmanager
def record(
    encoder: Encoder, *, stages: Sequence[str] = ("*",), layers: Iterable[int] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Collect the stages of one pass of an encoder into a dict.

    ``with record(enc) as stages: enc.encode(picture)`` fills `stages`; outside the block nothing is
    recorded and nothing is spent.

    Args:
        encoder: whose `embed` or `encode` runs inside the block, with one batch.
        stages: patterns of the stages to keep, such as `block.*.q`.
        layers: numbers of the blocks to keep; None keeps all.

    Yields:
        A dict that fills with {stage: tensor on the CPU, in the dtype it was computed in}.

    Raises:
        ValueError: when a second batch runs inside the block, which would overwrite the first.
    """
    selection = Selection(stages, layers)
    selection.check(encoder.config.num_layers)
    seen: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        if name == "pixels" and seen:
            raise ValueError("trace.record holds one batch; it was given a second one")
        if name in selection:
            seen[name] = value.detach().to("cpu", copy=True)

    with _tapped(encoder, keep):
        yield seen


@contextmanager
def _tapped(encoder: Encoder, tap: Any) -> Iterator[None]:
    before = encoder.tap
    encoder.tap = tap
    try:
        yield
    finally:
        encoder.tap = before


def write_trace(
    encoder: Encoder,
    batch: PixelBatch,
    path: Path,
    *,
    selection: Selection | None = None,
    order: str = "raster",
    metadata: dict[str, str] | None = None,
) -> dict[str, dict[str, float]]:
    """Run one batch and write its stages to a safetensors file, each as soon as it is computed.

    The file holds the stages, `grid_thws` int64 [n, 3], and in its metadata the order of patches, the
    dtype, the RMS epsilon, the rounding, the checkpoint's fingerprint and the statistics of every stage as
    JSON.

    Args:
        encoder: the tower.
        batch: pictures or clips as its processor makes them.
        path: file to write; it appears when complete.
        selection: stages to keep; None keeps all.
        order: "raster", or "block" to write stages of patches in merge-block order.
        metadata: more entries for the file's metadata.

    Returns:
        {stage: statistics}, as `statistics` gives them.
    """
    selection = selection or Selection()
    selection.check(encoder.config.num_layers)
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, expected one of {', '.join(ORDERS)}")
    grids = as_grids(batch.grid_thws)
    places = None
    if order != encoder.processor.order:
        turn = block_order if order == "block" else raster_order
        places = turn(grids, encoder.config.merge_size)
    table: dict[str, dict[str, float]] = {}
    reserve = 8192 + 512 * len(stage_names(encoder.config.num_layers, every_family=True))
    with SafetensorsWriter(path, reserve=reserve) as writer:

        def keep(name: str, value: Tensor) -> None:
            if name in selection:
                table[name] = statistics(value)
                moved = places is not None and has_patch_rows(name)
                writer.add(name, value.detach().cpu()[places] if moved else value)

        with _tapped(encoder, keep):
            encoder.embed(batch)
        writer.add("grid_thws", batch.grid_thws.to(torch.int64).reshape(-1, 3))
        writer.metadata.update(describe(encoder, order), **(metadata or {}), statistics=json.dumps(table))
    return table


def describe(encoder: Encoder, order: str) -> dict[str, str]:
    """What a trace file says of its run."""
    return {
        "format": FORMAT,
        "order": order,
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "norm_eps": repr(encoder.config.norm_eps),
        "quantize": encoder.quantize or "none",
        "model": encoder.fingerprint if encoder.checkpoint is not None else "",
        "version": __version__,
    }


def statistics(value: Tensor, at_once: int = 2**22) -> dict[str, float]:
    """mean, std (of the population), min, max and rms, computed in float64 a chunk at a time."""
    flat = value.detach().reshape(-1)
    if flat.numel() == 0:
        return dict.fromkeys(("mean", "std", "min", "max", "rms"), math.nan)
    low, high = (float(x) for x in torch.aminmax(flat))
    chunks = [flat[start : start + at_once].double() for start in range(0, flat.numel(), at_once)]
    mean = sum(float(chunk.sum()) for chunk in chunks) / flat.numel()
    spread = sum(float((chunk - mean).square().sum()) for chunk in chunks) / flat.numel()
    square = sum(float(chunk.square().sum()) for chunk in chunks) / flat.numel()
    return {"mean": mean, "std": math.sqrt(spread), "min": low, "max": high, "rms": math.sqrt(square)}
