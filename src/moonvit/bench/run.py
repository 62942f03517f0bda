"""A benchmark of one checkpoint: sizes of pictures, contenders in turns, the matrix product among them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moonvit.bench.measure import Run, in_turns, peak_rise
from moonvit.bench.report import Row
from moonvit.bench.work import matrix_product, patches_of, square_grid, work_of
from moonvit.encoder import Encoder


@dataclass(frozen=True)
class Contender:
    """Something that encodes patches.

    Attributes:
        encoder: whose geometry, dtype and device the work is counted and the ceiling measured in.
        prepare: given patches and their grid, a call that encodes them once.
    """

    name: str
    encoder: Encoder
    prepare: Callable[[torch.Tensor, list[list[int]]], Run]


def of_encoder(name: str, encoder: Encoder) -> Contender:
    """The encoder itself, without gradients."""

    def prepare(patches: torch.Tensor, grids: list[list[int]]) -> Run:
        def run() -> object:
            with torch.no_grad():
                result = encoder.model(patches, grids)
            return synchronized(result, encoder.device)

        return run

    return Contender(name, encoder, prepare)


def synchronized(result: object, device: torch.device) -> object:
    """The result, once the device has it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return result


def benchmark(
    contenders: Sequence[Contender],
    sides: Sequence[int],
    rounds: int,
    told: Callable[[str, float], None] | None = None,
) -> Iterator[Row]:
    """Rows size by size: all contenders in turns, and with them the matrix product of each dtype."""
    for side in sides:
        prepared, ceilings = {}, {}
        for contender in contenders:
            grid = square_grid(contender.encoder, side)
            prepared[contender.name] = contender.prepare(patches_of(contender.encoder, grid), [list(grid)])
            ceilings[_kind(contender)] = matrix_product(contender.encoder, grid[1] * grid[2])
        products: Mapping[str, Run] = {kind: product for kind, (product, _) in ceilings.items()}
        timings = in_turns({**products, **prepared}, rounds, told)
        for contender in contenders:
            kind = _kind(contender)
            yield Row(
                name=contender.name,
                side=side,
                work=work_of(contender.encoder, square_grid(contender.encoder, side)),
                timing=timings[contender.name],
                ceiling=ceilings[kind][1] / timings[kind].median,
                peak=peak_rise(prepared[contender.name]),
            )


def _kind(contender: Contender) -> str:
    encoder = contender.encoder
    return f"matrix product, {encoder.family}, {encoder.dtype}, {encoder.device}"
