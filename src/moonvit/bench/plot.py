"""Seconds over patches as one SVG: dots measured, lines fitted, dashes at the ceiling."""

import math
from collections.abc import Callable, Sequence
from html import escape

from moonvit.bench.report import Growth, Row, growth

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 24, 56
COLOURS = ("#1f5fa8", "#c2562b", "#2f7d4f", "#7b4ea3", "#8a6d00", "#3b8f96", "#a3315f")
STYLE = (
    "svg{background:#fff;font:12px system-ui,'DejaVu Sans',sans-serif}text{fill:#44443f}"
    "@media (prefers-color-scheme:dark){svg{background:#20201e}text{fill:#c9c9c2}}"
)

Place = Callable[[float], float]


def plot(rows: Sequence[Row]) -> str:
    """Both axes logarithmic."""
    x, across = _axis([row.work.patches for row in rows], LEFT, WIDTH - RIGHT)
    floors = [row.work.total / row.ceiling for row in rows]
    y, up = _axis([row.timing.median for row in rows] + floors, HEIGHT - BOTTOM, TOP)
    names = list(dict.fromkeys(row.name for row in rows))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="seconds over patches"><style>{STYLE}</style>'
    ]
    parts += [_grid_line(LEFT, y(v), WIDTH - RIGHT, y(v), f"{v:g}", (LEFT - 8, y(v) + 4), "end") for v in up]
    bottom = HEIGHT - BOTTOM
    parts += [_grid_line(x(v), TOP, x(v), bottom, f"{v:g}", (x(v), bottom + 18), "middle") for v in across]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">patches</text>'
    )
    parts.append(f'<text x="{LEFT - 8}" y="14" text-anchor="end">seconds</text>')
    parts += [_curve(fit, rows, x, y, colours[fit.name]) for fit in growth(rows)]
    parts += [_dot(row, x, y, colours[row.name]) for row in rows]
    parts += [_floor(row, x, y, colours[row.name]) for row in rows]
    for i, name in enumerate(names):
        at = TOP + 10 + 18 * i
        parts.append(f'<circle cx="{LEFT + 16}" cy="{at}" r="4.5" fill="{colours[name]}"/>')
        parts.append(f'<text x="{LEFT + 28}" y="{at + 4}">{escape(name)}</text>')
    legend = "lines: fitted; bars: what the matrix product alone would take"
    parts.append(f'<text x="{LEFT + 10}" y="{TOP + 14 + 18 * len(names)}">{legend}</text></svg>')
    return "\n".join(parts)


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Place, list[float]]:
    """Where a value goes on a logarithmic axis, and the round values to mark on it."""
    low, high = math.log(min(values) / 1.3), math.log(max(values) * 1.3)

    def place(value: float) -> float:
        return start + (math.log(value) - low) / (high - low) * (end - start)

    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    marks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    return place, [mark for mark in marks if low <= math.log(mark) <= high]


def _grid_line(
    x1: float, y1: float, x2: float, y2: float, text: str, at: tuple[float, float], anchor: str
) -> str:
    line = f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#8886" stroke-width="0.7"/>'
    return f'{line}<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve(fit: Growth, rows: Sequence[Row], x: Place, y: Place, colour: str) -> str:
    patches = [row.work.patches for row in rows if row.name == fit.name]
    low, high = min(patches), max(patches)
    steps = [low * (high / low) ** (i / 40) for i in range(41)]
    line = "L".join(f"{x(n):.1f} {y(fit.seconds(n)):.1f}" for n in steps)
    return f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _dot(row: Row, x: Place, y: Place, colour: str) -> str:
    tip = f"{row.name}, {row.side} px: {row.timing.median:.4f} s, {row.of_ceiling:.2f} of the ceiling"
    at = f'cx="{x(row.work.patches):.1f}" cy="{y(row.timing.median):.1f}"'
    return f'<circle {at} r="4.5" fill="{colour}"><title>{escape(tip)}</title></circle>'


def _floor(row: Row, x: Place, y: Place, colour: str) -> str:
    middle, level = x(row.work.patches), y(row.work.total / row.ceiling)
    return f'<path d="M{middle - 9:.1f} {level:.1f}h18" stroke="{colour}" stroke-width="2"/>'
