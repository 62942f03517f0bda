"""A comparison as plain text."""

from collections.abc import Iterator

from moonvit.trace.compare import Comparison, Place, StageResult


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
