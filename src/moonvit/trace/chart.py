"""The chart of errors by stage, as inline SVG."""

import math
from html import escape

from moonvit.trace.compare import Comparison, StageResult
from moonvit.trace.stages import block_number

WIDTH, HEIGHT = 1000, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 74, 22, 118


def stage_chart(comparison: Comparison) -> str:
    """A dot a stage on a logarithmic scale, and the budget as a line; "" if there is nothing to draw."""
    stages = [stage for stage in comparison.stages if stage.distance is not None]
    if not stages:
        return ""
    low, high = _decades(stages)
    step = (WIDTH - LEFT - RIGHT) / len(stages)

    def x(number: int) -> float:
        return LEFT + (number + 0.5) * step

    def y(value: float) -> float:
        place = (math.log10(min(max(value, 10.0**low), 10.0**high)) - low) / (high - low)
        return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="errors by stage">']
    for decade in range(low, high + 1, max(1, (high - low) // 6)):
        line = y(10.0**decade)
        parts.append(f'<path d="M{LEFT} {line:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{line + 4:.1f}" text-anchor="end">1e{decade}</text>')
    corners = [(LEFT + i * step, LEFT + (i + 1) * step, y(stage.allowed)) for i, stage in enumerate(stages)]
    budget = "".join(
        f"{'L' if i else 'M'}{a:.1f} {h:.1f}L{b:.1f} {h:.1f}" for i, (a, b, h) in enumerate(corners)
    )
    parts.append(f'<path d="{budget}" fill="none" stroke="var(--budget)" stroke-dasharray="5 4"/>')
    first = comparison.first_diverging
    for i, stage in enumerate(stages):
        assert stage.distance is not None
        value = stage.distance.relative_l2
        colour = "var(--good)" if stage.good else "var(--bad)"
        radius = 5 if stage is first else 3.2
        tip = f"{stage.name}: relative L2 {value:.2e}, allowed {stage.allowed:.1e}"
        parts.append(
            f'<circle cx="{x(i):.1f}" cy="{y(value):.1f}" r="{radius}" fill="{colour}">'
            f"<title>{escape(tip)}</title></circle>"
        )
        if _labelled(stages, i, stage is first):
            at = f"{x(i):.1f} {HEIGHT - BOTTOM + 14}"
            weight = ' style="fill:var(--bad);font-weight:600"' if stage is first else ""
            parts.append(f'<text transform="translate({at}) rotate(45)"{weight}>{escape(stage.name)}</text>')
    legend = "dots: error at the bottom line or below it is 0 or too small to draw; dashes: budget"
    parts.append(f'<text x="{LEFT}" y="12">{legend}</text></svg>')
    return "".join(parts)


def _decades(stages: list[StageResult]) -> tuple[int, int]:
    values = [s.distance.relative_l2 for s in stages if s.distance] + [s.allowed for s in stages]
    finite = [value for value in values if 0 < value < math.inf] or [1e-6]
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    return max(low, -18), max(min(high, 4), low + 1)


def _labelled(stages: list[StageResult], i: int, first: bool) -> bool:
    """All names of a short chart; of a long one every few, whole blocks only."""
    if len(stages) <= 46 or first:
        return True
    number = block_number(stages[i].name)
    if number is None:
        return i in (0, len(stages) - 1)
    whole = stages[i].name == f"block.{number:02}"
    return whole and number % 4 == 0
