"""What was measured, as rows, as text, as JSON, and how it grows with the picture."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moonvit.bench.measure import Timing
from moonvit.bench.work import Work


@dataclass(frozen=True)
class Row:
    """One contender on one size of picture.

    Attributes:
        name: of the contender, such as "moonvit native bfloat16".
        side: of the square picture, in pixels.
        ceiling: operations a second of PyTorch's own matrix product, in the same rounds and dtype.
        peak: bytes above the level before the run, or None where the system does not tell.
    """

    name: str
    side: int
    work: Work
    timing: Timing
    ceiling: float
    peak: int | None = None

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.work.total / self.timing.median

    @property
    def of_ceiling(self) -> float:
        return self.rate / self.ceiling


@dataclass(frozen=True)
class Growth:
    """seconds = linear·N + quadratic·N², fitted to one contender's medians by their relative errors."""

    name: str
    linear: float
    quadratic: float

    def seconds(self, patches: float) -> float:
        return self.linear * patches + self.quadratic * patches**2

    def share(self, patches: int) -> float:
        """Part of the time that grows with the square."""
        return self.quadratic * patches**2 / self.seconds(patches)


def growth(rows: Sequence[Row]) -> list[Growth]:
    """The growth of every contender that ran on two sizes or more."""
    found = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        if len({row.work.patches for row in mine}) > 1:
            found.append(Growth(name, *_fit([(row.work.patches, row.timing.median) for row in mine])))
    return found


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Least squares of the relative errors; no part is negative."""
    patches, seconds = (np.array(values, np.float64) for values in zip(*points, strict=True))
    columns = np.stack([patches, patches**2], axis=1) / seconds[:, None]
    best = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if (best >= 0).all():
        return float(best[0]), float(best[1])
    alone = [float(column.sum() / (column @ column)) for column in columns.T]
    errors = [((a * column - 1) ** 2).sum() for a, column in zip(alone, columns.T, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


def as_text(rows: Sequence[Row]) -> str:
    """A table for people."""
    width = max(len(row.name) for row in rows)
    columns = f"{'side':>5} {'patches':>8} {'seconds':>9} {'spread':>7} {'TFLOP/s':>8} {'of ceiling':>11}"
    lines = [f"{'':<{width}}  {columns} {'peak MiB':>9}"]
    for row in rows:
        peak = "-" if row.peak is None else f"{row.peak / 2**20:.0f}"
        lines.append(
            f"{row.name:<{width}}  {row.side:>5} {row.work.patches:>8} {row.timing.median:>9.4f} "
            f"{row.timing.spread:>7.0%} {row.rate / 1e12:>8.3f} {row.of_ceiling:>11.2f} {peak:>9}"
        )
    sides = {}
    for row in rows:
        sides[row.name.split()[-1], row.side] = row.ceiling
    for (dtype, side), ceiling in sides.items():
        lines.append(
            f"ceiling at {side}, {dtype}: {ceiling / 1e12:.3f} TFLOP/s, PyTorch's own matrix product"
        )
    for fit in growth(rows):
        largest = max(row.work.patches for row in rows if row.name == fit.name)
        lines.append(
            f"{fit.name}: {fit.linear * 1e6:.1f} us a patch, {fit.quadratic * 1e9:.2f} ns a pair of them; "
            f"at {largest} patches the pairs take {fit.share(largest):.0%}"
        )
    return "\n".join(lines)


def as_document(rows: Sequence[Row], machine: dict[str, Any]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "machine": machine,
        "rows": [
            {
                "name": row.name,
                "side": row.side,
                **asdict(row.work),
                "seconds": list(row.timing.seconds),
                "median": row.timing.median,
                "spread": row.timing.spread,
                "rate": row.rate,
                "ceiling": row.ceiling,
                "of_ceiling": row.of_ceiling,
                "peak_bytes": row.peak,
            }
            for row in rows
        ],
        "growth": [asdict(fit) for fit in growth(rows)],
    }
