"""Comparisons and diagnoses as plain text and as JSON-like data."""

from collections.abc import Iterator
from typing import Any

from moonvit.trace.budgets import segment_budget
from moonvit.trace.compare import Comparison, Place, StageResult
from moonvit.trace.findings import Diagnosis, Finding


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """The table of stages, layout remarks, and the verdict in the last line."""
    width = max([len(stage.name) for stage in comparison.stages] + [12])
    yield f"{'stage':<{width}}  {'max abs':>9} {'rel L2':>9} {'allowed':>9} {'1-cosine':>9} {'PCC':>10}"
    for stage in comparison.stages:
        yield stage_line(stage, width)
    if comparison.order != "raster":
        yield f"{comparison.mine}: patches are in merge-block order; put into raster order to compare"
    for title, names in (("mine", comparison.only_mine), ("the reference", comparison.only_reference)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            yield f"only in {title}: {', '.join(names[:8])}{more}"
    yield verdict(comparison)


def stage_line(stage: StageResult, width: int) -> str:
    d = stage.distance
    if d is None:
        return f"{stage.name:<{width}}  {stage.note}  <-- cannot be compared"
    pcc = "-" if d.pcc is None else f"{d.pcc:.7f}"
    line = (
        f"{stage.name:<{width}}  {d.max_abs:>9.2e} {d.relative_l2:>9.2e} {stage.allowed:>9.1e} "
        f"{1 - d.min_cosine:>9.1e} {pcc:>10}"
    )
    if stage.note:
        line += f"  ({stage.note})"
    if stage.good:
        return line
    return line + "  <-- " + ("over budget" if d.finite else "NaN or infinity") + _first(stage)


def _first(stage: StageResult) -> str:
    return f", first at {place_words(stage.first_bad)}" if stage.first_bad else ""


def place_words(place: Place) -> str:
    """Such as `picture 0 (t,row,column) (0,1,3) channel 17`."""
    where = f"(t,row,column) ({','.join(map(str, place.at))})" if place.at else f"row {place.row}"
    return f"picture {place.picture} {where} channel {place.channel}"


def verdict(comparison: Comparison) -> str:
    """One line: agreement, or the first diverging stage."""
    first = comparison.first_diverging
    if first is None:
        worst = max(
            (s.distance.relative_l2 / s.allowed for s in comparison.stages if s.distance), default=0.0
        )
        return (
            f"AGREES: {len(comparison.stages)} stages within the {comparison.dtype} budgets "
            f"(the worst uses {worst:.0%} of its own)"
        )
    if first.distance is None:
        return f"DIVERGES at {first.name}: {first.note}"
    return (
        f"DIVERGES first at {first.name}: relative L2 {first.distance.relative_l2:.2e}, "
        f"{comparison.dtype} allows {first.allowed:.1e}{_first(first)}"
    )


def diagnosis_lines(found: Diagnosis) -> Iterator[str]:
    """Each finding with what to change, and in the last line the verdict."""
    if found.order != "raster":
        yield "patches are in merge-block order"
    if found.skipped:
        yield f"not used, for shape or NaN: {', '.join(found.skipped)}"
    for finding in found.findings:
        yield from _finding_lines(finding, found.dtype)
    for lost in found.unexplained:
        best = f"; the closest is '{lost.best[0]}', which leaves {lost.best[1]:.1e}" if lost.best else ""
        yield (
            f"{lost.stage}: none of the known ones: {lost.before:.1e} off, {found.dtype} allows "
            f"{lost.allowed:.1e}{best}"
        )
        if found.dtype == "float32" and lost.before <= segment_budget("bfloat16", 1):
            yield "  so small a gap may be reduced precision (TF32, bfloat16): try --dtype bfloat16"
    stages = len(found.stages)
    if found.good:
        yield f"NO MISTAKE FOUND: {stages} stages follow from one another within the {found.dtype} budgets"
    else:
        named = sum(len(finding.mistakes) for finding in found.findings)
        rest = f", {len(found.unexplained)} divergences unexplained" if found.unexplained else ""
        yield f"{named} {'mistake' if named == 1 else 'mistakes'} named in {stages} stages{rest}"


def _finding_lines(finding: Finding, dtype: str) -> Iterator[str]:
    title = " and ".join(mistake.title for mistake in finding.mistakes)
    next_best = f"; next best {finding.next_best[1]:.1e}, {finding.next_best[0]}" if finding.next_best else ""
    if finding.hidden:
        yield (
            f"{finding.stage}: consistent with: {title} (within the {dtype} budgets, but what is left falls "
            f"from {finding.before:.1e} to {finding.residual:.1e})"
        )
    else:
        yield (
            f"{finding.stage}: {title} (residual {finding.residual:.1e}, without it {finding.before:.1e}"
            f"{next_best})"
        )
    for also in finding.also:
        yield f"  as consistent with: {also}"
    for mistake in finding.mistakes:
        yield f"  change: {mistake.advice}"


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON-like data."""
    return {
        "good": found.good,
        "dtype": found.dtype,
        "order": found.order,
        "stages": list(found.stages),
        "skipped": list(found.skipped),
        "findings": [
            {
                "stage": finding.stage,
                "mistakes": [
                    {"key": mistake.key, "title": mistake.title, "advice": mistake.advice}
                    for mistake in finding.mistakes
                ],
                "residual": finding.residual,
                "before": finding.before,
                "allowed": finding.allowed,
                "next_best": _pair(finding.next_best),
                "also": list(finding.also),
                "hidden": finding.hidden,
            }
            for finding in found.findings
        ],
        "unexplained": [
            {"stage": lost.stage, "before": lost.before, "allowed": lost.allowed, "best": _pair(lost.best)}
            for lost in found.unexplained
        ],
    }


def _pair(best: tuple[str, float] | None) -> dict[str, Any] | None:
    return {"title": best[0], "residual": best[1]} if best else None
