"""One run's stages against a reference run's: how far apart, where first, and whether that is too far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonvit.ops.grid import Grid, lengths
from moonvit.trace.budgets import ROUNDING, TOKEN, budget, cosine_budget
from moonvit.trace.dump import Dump, DumpError
from moonvit.trace.layout import align, rows_in_words
from moonvit.trace.metrics import Distance, distance
from moonvit.trace.stages import block_number, has_patch_rows, stage_names

F64 = NDArray[np.float64]

WORST = 10
"""Rows that are listed for a stage."""

_COARSENESS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Place:
    """A row of a stage: picture number and (t, row, column), in patches or, for merged rows, in cells;
    `channel` counts the row's features flattened, and `error` is relative to the row's own norm.
    """

    row: int
    picture: int
    at: tuple[int, int, int] | None
    channel: int
    error: float
    value: float
    expected: float


@dataclass(frozen=True)
class StageResult:
    """One stage of the comparison.

    Attributes:
        name: of the stage.
        note: how its layout differs from ours, or why it could not be compared; "" for neither.
        distance: the measures; None if it could not be compared.
        allowed: relative L2 budget.
        good: within the budgets of relative L2, of every token, and of their cosine.
        first_bad: the first row over a token's budget, or None.
        worst: the rows farthest off, the worst first.
    """

    name: str
    note: str
    distance: Distance | None
    allowed: float
    good: bool
    first_bad: Place | None
    worst: Sequence[Place]

    @property
    def cosine_allowed(self) -> float:
        return 1 - cosine_budget(self.allowed)


@dataclass(frozen=True)
class Comparison:
    """All stages that both runs have, in the tower's order.

    `order` is that of MINE's patches as found or given; `only_mine` and `only_reference` are stages that
    the other lacks. `first_diverging` is the first stage that is not good, or None.
    """

    mine: str
    reference: str
    dtype: str
    order: str
    grids: Sequence[Grid]
    merge_size: int
    stages: Sequence[StageResult]
    only_mine: Sequence[str]
    only_reference: Sequence[str]

    @property
    def first_diverging(self) -> StageResult | None:
        return next((stage for stage in self.stages if not stage.good), None)

    @property
    def good(self) -> bool:
        return self.first_diverging is None


def compare(
    mine: Dump,
    reference: Dump,
    *,
    grids: Sequence[Grid] | None = None,
    dtype: str | None = None,
    order: str = "auto",
    merge_size: int = 2,
) -> Comparison:
    """Compare every stage that both dumps hold; one stage is in memory at a time.

    Args:
        mine: the run to judge.
        reference: the run to judge it by, such as `moonvit trace` writes it.
        grids: (t, h, w) of the pictures; None takes them from either dump.
        dtype: what MINE was computed in; None takes the coarser of what the values of both show.
        order: "raster" or "block" for the patches of MINE, "auto" to find out.
        merge_size: patches along a side of a merged cell.

    Raises:
        DumpError: when there is nothing to compare, or no grid to be found.
    """
    found = grids or reference.grids() or mine.grids()
    if found is None:
        raise DumpError(f"{reference.path}: no grid_thws", "give --grid t,h,w")
    common = [name for name in _in_order(reference.names) if name in mine]
    if not common:
        raise DumpError(
            f"{mine.path}: no stage in common with {reference.path}: it has {', '.join(mine.names[:6])}",
            "name its stages with --map THEIRS=OURS",
        )
    judge = _Judge(
        mine, reference, list(found), dtype or _coarser(mine, reference, common), order, merge_size
    )
    results = list(judge.results(common))
    return Comparison(
        mine=str(mine.path),
        reference=str(reference.path),
        dtype=judge.dtype,
        order=judge.order if judge.order != "auto" else "raster",
        grids=judge.grids,
        merge_size=merge_size,
        stages=results,
        only_mine=[name for name in mine.names if name not in reference],
        only_reference=[name for name in _in_order(reference.names) if name not in mine],
    )


class _Judge:
    def __init__(
        self, mine: Dump, reference: Dump, grids: list[Grid], dtype: str, order: str, merge_size: int
    ) -> None:
        self.mine, self.reference = mine, reference
        self.grids, self.dtype, self.order, self.size = grids, dtype, order, merge_size
        self.reference_order = reference.metadata.get("order", "raster")
        numbers = [block_number(name) for name in reference.names]
        self.layers = 1 + max((number for number in numbers if number is not None), default=0)
        self.side = max(max(h, w) for _, h, w in grids)
        if self.order == "auto" and "order" in mine.metadata:
            self.order = mine.metadata["order"]

    def results(self, names: Sequence[str]) -> Iterator[StageResult]:
        if self.order == "auto":
            self.order = self._order_found(names)
        for name in names:
            yield self._result(name)

    def _order_found(self, names: Sequence[str]) -> str:
        """From the first stage of patches that fits clearly better in one order than in the other."""
        for name in names:
            if has_patch_rows(name):
                want = self._want(name)
                aligned = align(name, self.mine.read(name), want, self.grids, self.size)
                if aligned is not None and aligned.order == "block":
                    return "block"
                if aligned is not None and np.ptp(want, axis=0).max() != 0:
                    return "raster"
        return "raster"

    def _want(self, name: str) -> F64:
        want = self.reference.read(name)
        rows = sum(lengths(self.grids))
        if has_patch_rows(name) and len(want) != rows:
            raise DumpError(f"{self.reference.path}: {name} has {len(want)} rows, but the grids have {rows}")
        aligned = align(name, want, want, self.grids, self.size, self.reference_order)
        assert aligned is not None
        return aligned.values

    def _result(self, name: str) -> StageResult:
        allowed = budget(name, self.dtype, self.layers, self.side)
        want, got = self._want(name), self.mine.read(name)
        aligned = align(name, got, want, self.grids, self.size, self.order)
        if aligned is None:
            note = f"shape {list(got.shape)}, expected {list(want.shape)}"
            return StageResult(name, note, None, allowed, False, None, ())
        d = distance(aligned.values, want)
        bad = np.flatnonzero(d.token_errors > TOKEN * allowed)
        order = np.argsort(-d.token_errors, kind="stable")
        worst = [self._place(name, int(row), d, aligned.values, want) for row in order[:WORST]]
        first = self._place(name, int(bad[0]), d, aligned.values, want) if len(bad) else None
        cosine_good = 1 - d.min_cosine <= cosine_budget(allowed)
        good = d.finite and d.relative_l2 <= allowed and not len(bad) and cosine_good
        return StageResult(name, aligned.axes, d, allowed, good, first, worst)

    def _place(self, name: str, row: int, d: Distance, got: F64, want: F64) -> Place:
        a, b = got.reshape(len(got), -1)[row], want.reshape(len(want), -1)[row]
        gap = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf)
        channel = int(np.argmax(gap))
        picture, at = rows_in_words(name, row, self.grids, self.size)
        return Place(
            row, picture, at, channel, float(d.token_errors[row]), float(a[channel]), float(b[channel])
        )


def _in_order(names: Sequence[str]) -> list[str]:
    """The names that are stages, in the tower's order."""
    numbers = [block_number(name) for name in names]
    layers = 1 + max((number for number in numbers if number is not None), default=0)
    held = set(names)
    return [name for name in stage_names(layers, every_family=True) if name in held]


def _coarser(mine: Dump, reference: Dump, names: Sequence[str]) -> str:
    """The coarsest type among the last stages of both, which have been through all of the arithmetic."""
    found = [dump.dtype(names[-1]) for dump in (mine, reference)]
    found += [d for dump in (mine, reference) if (d := dump.metadata.get("dtype")) in ROUNDING]
    return max(found, key=_COARSENESS.index)


def as_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON-like data; infinities become None."""
    first = comparison.first_diverging
    return {
        "good": comparison.good,
        "first_diverging": first.name if first else None,
        "mine": comparison.mine,
        "reference": comparison.reference,
        "dtype": comparison.dtype,
        "order": comparison.order,
        "grid_thws": [list(grid) for grid in comparison.grids],
        "only_mine": list(comparison.only_mine),
        "only_reference": list(comparison.only_reference),
        "stages": [_stage_document(stage) for stage in comparison.stages],
    }


def _stage_document(stage: StageResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": stage.name,
        "good": stage.good,
        "note": stage.note,
        "allowed": stage.allowed,
    }
    if stage.distance is not None:
        d = stage.distance
        numbers = {
            "max_abs": d.max_abs,
            "relative_l2": d.relative_l2,
            "min_cosine": d.min_cosine,
            "pcc": d.pcc,
        }
        row |= {key: _finite(value) for key, value in numbers.items()}
    row["first_bad"] = _place_document(stage.first_bad)
    row["worst"] = [_place_document(place) for place in stage.worst[:3]]
    return row


def _place_document(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "row": place.row,
        "picture": place.picture,
        "t_row_column": list(place.at) if place.at else None,
        "channel": place.channel,
        "error": _finite(place.error),
        "value": _finite(place.value),
        "expected": _finite(place.expected),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
