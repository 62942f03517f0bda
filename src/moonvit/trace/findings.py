"""What a diagnosis says, and the test for mistakes that hide in a dump's rounding."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonvit.trace.mistakes import Mistake

F64 = NDArray[np.float64]

MATCH = 0.15
"""How far the strength of a hidden mistake may be from 1."""

CERTAIN = 12.0
"""Standard errors by which a hidden mistake must stand out."""

SHARE = 0.2
"""Share of what is left (in squares) that a hidden mistake must account for."""


@dataclass(frozen=True)
class Finding:
    """One explained divergence.

    Attributes:
        stage: where it first shows.
        mistakes: one, or a pair that only together explain it.
        residual: relative L2 left at that stage; `before` without the mistakes, `allowed` for the type.
        next_best: title and residual of the best hypothesis that is told apart from it, if there is one.
        also: titles of hypotheses that fit as well.
        hidden: the effect is within the budget of the type; found by its direction.
    """

    stage: str
    mistakes: tuple[Mistake, ...]
    residual: float
    before: float
    allowed: float
    next_best: tuple[str, float] | None
    also: tuple[str, ...] = ()
    hidden: bool = False


@dataclass(frozen=True)
class Unexplained:
    """A divergence that no known mistake or pair explains; `best` is the closest and what it leaves."""

    stage: str
    before: float
    allowed: float
    best: tuple[str, float] | None


@dataclass(frozen=True)
class Diagnosis:
    """All findings in the tower's order. `good` means that no divergence was found at all."""

    dtype: str
    order: str
    stages: Sequence[str]
    findings: Sequence[Finding]
    unexplained: Sequence[Unexplained]
    skipped: Sequence[str] = ()

    @property
    def good(self) -> bool:
        return not self.findings and not self.unexplained


@dataclass(frozen=True)
class Match:
    """Root mean squares, over stages, of what is left with and without a hidden mistake."""

    before: float
    after: float

    @property
    def explained(self) -> float:
        return self.before**2 - self.after**2


def match(pairs: Iterable[tuple[F64, F64]]) -> Match | None:
    """Whether the gaps point along the effects of a mistake, at the strength of that mistake.

    Args:
        pairs: for each stage, (the dump less the right run, the mistaken run less the right run), both
            relative to the right run's norm.

    Rounding points in no direction: its share along an effect over n values is about 1/sqrt(n) of its
    size. A mistake is named only if its strength, by least squares, is 1 within `MATCH`, is `CERTAIN`
    standard errors above 0, and accounts for `SHARE` of the gap.
    """
    dd = de = ee = 0.0
    values = stages = 0
    for gap, effect in pairs:
        if not effect.any():
            continue
        dd += float(np.vdot(gap, gap))
        de += float(np.vdot(gap, effect))
        ee += float(np.vdot(effect, effect))
        values += gap.size
        stages += 1
    if ee == 0 or dd == 0:
        return None
    strength = de / ee
    # Rounding errors of neighbouring values hang together: a quarter of them is taken as independent.
    error = math.sqrt(max(dd - de * de / ee, 0.0) / ee / max(values / 4, 1.0))
    if abs(strength - 1) > MATCH or strength < CERTAIN * error or de * de < SHARE * dd * ee:
        return None
    return Match(math.sqrt(dd / stages), math.sqrt(max(dd - 2 * de + ee, 0.0) / stages))
