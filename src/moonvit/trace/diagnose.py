"""Which known mistake makes another program's stages what they are.

A dump is cut into segments between stages from which the tower can go on (the pixels, `embed`, each
block, `final_norm`, `merged`, `proj_hidden`). Every segment is run from the dump's own value at its
start, so that a mistake shows in its own segment and nowhere else, however far along the tower it is.
Where the right tower does not give the dump's next stage, it is run with each known mistake, then with
each pair of them; a mistake is believed only if what is left is as small as the rounding of the dump's
type. Mistakes whose effect is smaller than that rounding are looked for by the direction of what is
left: over thousands of values rounding points nowhere, the mistake to itself.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonvit.trace.budgets import budget, segment_budget
from moonvit.trace.dump import Dump, DumpError
from moonvit.trace.findings import Diagnosis, Finding, Match, Unexplained, match
from moonvit.trace.layout import align
from moonvit.trace.metrics import relative_l2
from moonvit.trace.mistakes import Mistake, known_mistakes
from moonvit.trace.stages import BEFORE, block_number
from moonvit.trace.variants import AFTER_BLOCKS, BEFORE_BLOCKS, DoesNotApplyError, Machine, Variant

F64 = NDArray[np.float64]

TIE = 1.5
"""Hypotheses that leave residuals within this factor of each other are not told apart."""

SUBTLE = (
    *("eps-", "projector-eps-", "gelu-erf", "projector-gelu-tanh"),
    *("rope-bfloat16", "table-bfloat16", "tables-bfloat16", "frequencies-bfloat16"),
)
"""Mistakes that may hide in the rounding of a dump."""

SUBTLE_BLOCKS = 4
"""Blocks that are searched for them."""


@dataclass(frozen=True)
class Segment:
    """Stages of the dump after `start`, up to the next one that is enough to go on from."""

    start: str | None
    value: Tensor | None
    wanted: Mapping[str, F64]


@dataclass(frozen=True, eq=False)
class Guess:
    """A set of mistakes and what it leaves at a stage."""

    mistakes: tuple[Mistake, ...]
    residual: float

    @property
    def title(self) -> str:
        return " and ".join(mistake.title for mistake in self.mistakes)


def diagnose(mine: Dump, machine: Machine, *, dtype: str | None = None, order: str = "auto") -> Diagnosis:
    """Name the mistakes behind the stages of a dump.

    Args:
        mine: the dump; `projected` alone will do, block outputs tell more.
        machine: the right tower with the pictures that the dump was made of.
        dtype: what it was computed in; None takes what the values show.
        order: "raster", "block", or "auto" to find out.

    Raises:
        DumpError: when no stage has a known name and a fitting shape.
    """
    order = mine.metadata.get("order", order) if order == "auto" else order
    found = _diagnose(mine, machine, dtype, order)
    if order == "auto" and found.unexplained and found.order == "raster":
        other = _diagnose(mine, machine, dtype, "block")
        found = found if other.unexplained else other
    return found


def _diagnose(mine: Dump, machine: Machine, dtype: str | None, order: str) -> Diagnosis:
    held, skipped, order = _held(mine, machine, order)
    if not held:
        known = "stages such as projected, block.00"
        raise DumpError(f"{mine.path}: none of {', '.join(mine.names[:6])} is a stage", f"expected {known}")
    last = list(held)[-1]
    search = _Search(machine, dtype or mine.dtype(last), known_mistakes(machine.config))
    segments = list(_segments(held))
    for segment in segments:
        search.explain(segment, segments)
    search.look_for_hidden(segments)
    return Diagnosis(search.dtype, order, list(held), search.findings, search.unexplained, skipped)


def _held(mine: Dump, machine: Machine, order: str) -> tuple[dict[str, F64], list[str], str]:
    """The dump's stages in our shapes and order, the names of those that do not fit, and their order."""
    held: dict[str, F64] = {}
    skipped: list[str] = []
    for name, value in machine.stages(Variant(), None, None):
        if name not in mine:
            continue
        size = machine.config.merge_size
        aligned = align(name, mine.read(name), value.numpy(), machine.grids, size, order)
        if aligned is None or not np.isfinite(aligned.values).all():
            skipped.append(name)
            continue
        held[name] = aligned.values
        if order == "auto" and aligned.order:
            order = aligned.order
    return held, skipped, "raster" if order == "auto" else order


def _segments(held: Mapping[str, F64]) -> Iterator[Segment]:
    start: str | None = None
    wanted: dict[str, F64] = {}
    for name, value in held.items():
        wanted[name] = value
        number = block_number(name)
        whole = name == f"block.{number:02}" if number is not None else False
        if whole or name in ("pixels", "embed", "final_norm", "merged", "proj_hidden", "projected"):
            yield Segment(start, None if start is None else torch.from_numpy(held[start]), wanted)
            start, wanted = name, {}
    if wanted:
        yield Segment(start, None if start is None else torch.from_numpy(held[start]), wanted)


@dataclass
class _Search:
    machine: Machine
    dtype: str
    known: Sequence[Mistake]
    base: Variant = field(default_factory=Variant)
    blamed: list[Mistake] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unexplained: list[Unexplained] = field(default_factory=list)
    lost_in_blocks: bool = False

    def explain(self, segment: Segment, segments: Sequence[Segment]) -> None:
        """Find what is wrong in one segment, on top of what was found before it."""
        for _ in range(len(segment.wanted) + 1):
            bad = self._first_bad(segment, self.base)
            if bad is None or self._first_bad(segment, Variant()) is None:
                return
            in_block = block_number(bad[0]) is not None
            if in_block and self.lost_in_blocks:
                return
            if not self._blame(segment, *bad, segments):
                self.lost_in_blocks |= in_block
                return

    def _first_bad(self, segment: Segment, variant: Variant) -> tuple[str, float, float] | None:
        """(stage, residual, allowed) of the first stage over its budget."""
        for name, got in self._predicted(segment, variant):
            residual = relative_l2(segment.wanted[name], got)
            allowed = self._allowed(segment, name)
            if not residual <= allowed:
                return name, residual, allowed
        return None

    def _touches(self, mistakes: Iterable[Mistake], segment: Segment) -> bool:
        """Whether the mistakes can change anything in the segment; saves the work where they cannot."""
        changed = {name for mistake in mistakes for name in mistake.changes}
        in_blocks = block_number(list(segment.wanted)[-1]) is not None
        if in_blocks and changed <= AFTER_BLOCKS:
            return False
        return segment.start in (None, "pixels") or not changed <= BEFORE_BLOCKS

    def _predicted(self, segment: Segment, variant: Variant) -> Iterator[tuple[str, F64]]:
        left = len(segment.wanted)
        for name, value in self.machine.stages(variant, segment.start, segment.value):
            if name in segment.wanted:
                yield name, value.numpy()
                left -= 1
            if not left:
                return

    def _residual(self, segment: Segment, mistakes: Sequence[Mistake], stage: str) -> float | None:
        variant = self.base
        for mistake in mistakes:
            variant = variant.changed(mistake.changes)
        try:
            for name, got in self._predicted(segment, variant):
                if name == stage:
                    return relative_l2(segment.wanted[name], got)
        except DoesNotApplyError:
            pass
        return None

    def _allowed(self, segment: Segment, stage: str) -> float:
        side = max(max(h, w) for _, h, w in self.machine.grids)
        layers = self.machine.config.num_layers
        if stage in BEFORE:
            return budget(stage, self.dtype, layers, side)
        number, start = block_number(stage), block_number(segment.start or "")
        before = -1 if segment.start in (None, "pixels", "embed") else layers - 1 if start is None else start
        return segment_budget(self.dtype, (layers if number is None else number) - before, side)

    def _blame(
        self, segment: Segment, stage: str, before: float, allowed: float, segments: Sequence[Segment]
    ) -> bool:
        free = [m for m in self.known if not any(m.changes.keys() & b.changes.keys() for b in self.blamed)]
        guesses = self._guesses(segment, stage, before, [(m,) for m in free])
        fitting = [guess for guess in guesses if guess.residual <= allowed]
        if not fitting:
            singles = [guess.mistakes[0] for guess in guesses]
            pairs = [p for p in combinations(singles, 2) if not p[0].changes.keys() & p[1].changes.keys()]
            guesses += self._paired(segment, stage, before, allowed, pairs)
            fitting = [guess for guess in guesses if guess.residual <= allowed]
        guesses.sort(key=lambda guess: guess.residual)
        if not fitting:
            best = (guesses[0].title, guesses[0].residual) if guesses else None
            self.unexplained.append(Unexplained(stage, before, allowed, best))
            return False
        best_guess, tied = self._best(fitting, segments)
        others = [g for g in guesses if g is not best_guess and g not in tied]
        others = [g for g in others if not set(g.mistakes) >= set(best_guess.mistakes)]
        self.findings.append(
            Finding(
                stage=stage,
                mistakes=best_guess.mistakes,
                residual=best_guess.residual,
                before=before,
                allowed=allowed,
                next_best=(others[0].title, others[0].residual) if others else None,
                also=tuple(guess.title for guess in tied),
            )
        )
        self._add(best_guess.mistakes)
        return True

    def _add(self, mistakes: Sequence[Mistake]) -> None:
        for mistake in mistakes:
            self.base = self.base.changed(mistake.changes)
            self.blamed.append(mistake)

    def _guesses(
        self,
        segment: Segment,
        stage: str,
        before: float,
        sets: Iterable[tuple[Mistake, ...]],
    ) -> list[Guess]:
        """What each set leaves, the least first; sets that change nothing are left out."""
        guesses = []
        for mistakes in sets:
            if not all(self._touches([mistake], segment) for mistake in mistakes):
                continue
            residual = self._residual(segment, mistakes, stage)
            if residual is not None and residual != before:
                guesses.append(Guess(mistakes, residual))
        return sorted(guesses, key=lambda guess: guess.residual)

    def _paired(
        self,
        segment: Segment,
        stage: str,
        before: float,
        allowed: float,
        pairs: Sequence[tuple[Mistake, Mistake]],
    ) -> list[Guess]:
        """What pairs leave; once one fits, only those that share a mistake with it are still tried."""
        guesses: list[Guess] = []
        for number, pair in enumerate(pairs):
            guesses += self._guesses(segment, stage, before, [pair])
            if guesses and guesses[-1].mistakes == pair and guesses[-1].residual <= allowed:
                rest = [p for p in pairs[number + 1 :] if set(p) & set(pair)]
                return guesses + self._guesses(segment, stage, before, rest)
        return guesses

    def _best(self, fitting: list[Guess], segments: Sequence[Segment]) -> tuple[Guess, list[Guess]]:
        """The one that fits best here and further on, and those that cannot be told from it."""
        close = [guess for guess in fitting if guess.residual <= TIE * fitting[0].residual]
        if len(close) == 1:
            return fitting[0], []
        scores = {
            id(guess): self._score(guess, [*segments[:SUBTLE_BLOCKS], *segments[-3:]]) for guess in close
        }
        close.sort(key=lambda guess: scores[id(guess)])
        limit = scores[id(close[0])] * TIE
        return close[0], [guess for guess in close[1:] if scores[id(guess)] <= limit]

    def _score(self, guess: Guess, segments: Sequence[Segment]) -> float:
        """Root mean square of the residuals at the ends of the segments."""
        squares = []
        for segment in segments:
            stage = list(segment.wanted)[-1]
            residual = self._residual(segment, guess.mistakes, stage)
            squares.append(4.0 if residual is None else min(residual, 2.0) ** 2)
        return math.sqrt(sum(squares) / len(squares))

    def look_for_hidden(self, segments: Sequence[Segment]) -> None:
        """Mistakes within the budgets, by the direction of what is left; up to two."""
        if self.unexplained:
            return
        few = [s for s in segments if (block_number(s.start or "") or 0) < SUBTLE_BLOCKS]
        few += [s for s in segments[-4:] if s not in few]
        for _ in range(2):
            taken = {name for mistake in self.blamed for name in mistake.changes}
            subtle = [m for m in self.known if m.key.startswith(SUBTLE) and not taken & m.changes.keys()]
            right = [dict(self._predicted(segment, self.base)) for segment in few]
            found = [(m, fit) for m in subtle if (fit := self._match(m, few, right)) is not None]
            if not found:
                return
            mistake, best = max(found, key=lambda pair: pair[1].explained)
            rest = [
                m.title for m, fit in found if m is not mistake and fit.explained >= 0.98 * best.explained
            ]
            first = next(name for s in few if self._touches([mistake], s) for name in s.wanted)
            self.findings.append(
                Finding(
                    first, (mistake,), best.after, best.before, best.before, None, tuple(rest), hidden=True
                )
            )
            self._add([mistake])

    def _match(
        self, mistake: Mistake, segments: Sequence[Segment], rights: Sequence[Mapping[str, F64]]
    ) -> Match | None:
        pairs: list[tuple[F64, F64]] = []
        for segment, right in zip(segments, rights, strict=True):
            if not self._touches([mistake], segment):
                continue
            for name, wrong in self._predicted(segment, self.base.changed(mistake.changes)):
                scale = float(np.linalg.norm(right[name]))
                pairs.append(((segment.wanted[name] - right[name]) / scale, (wrong - right[name]) / scale))
        return match(pairs)
