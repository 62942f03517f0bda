"""Errors over the patches of a picture, as inline SVG."""

import math
from html import escape

import numpy as np
from numpy.typing import NDArray

from moonvit.trace.budgets import TOKEN
from moonvit.trace.compare import Comparison, StageResult
from moonvit.trace.stages import TABLES, has_patch_rows

CELLS = 64
"""Squares along a side at most; of a larger grid, each square is the worst of its patches."""

MAPS = 8


def heat_maps(comparison: Comparison) -> str:
    """Maps of the first diverging stage and of a few that mark the way; "" if there are none."""
    figures: list[str] = []
    for stage in _chosen(comparison):
        start = 0
        for picture, (t, h, w) in enumerate(comparison.grids):
            if not has_patch_rows(stage.name):
                t, h, w = 1, h // comparison.merge_size, w // comparison.merge_size
            assert stage.distance is not None
            errors = stage.distance.token_errors[start : start + t * h * w].reshape(t, h, w)
            start += t * h * w
            for frame in range(t):
                if len(figures) < MAPS:
                    words = _words(stage, picture, frame, len(comparison.grids), t)
                    figures.append(_figure(errors[frame], stage, words))
    if not figures:
        return ""
    key = (
        "Full colour is the worst error of the map, or what a single token may have where that is more; "
        "outlined squares are over it. Merged stages have one square a cell."
    )
    return f'<div class="maps">{"".join(figures)}</div><p class="soft">{key}</p>'


def _chosen(comparison: Comparison) -> list[StageResult]:
    measured = [s for s in comparison.stages if s.distance is not None and s.name not in TABLES]
    rows = sum(t * h * w for t, h, w in comparison.grids)
    measured = [s for s in measured if _mapped(s, rows)]
    chosen = [s for s in measured if not s.good][:1]
    for name in ("projected", "final_norm", "block.00", "embed"):
        chosen += [s for s in measured if s.name == name and s not in chosen]
    return chosen[:4]


def _mapped(stage: StageResult, rows: int) -> bool:
    return stage.distance is not None and (
        not has_patch_rows(stage.name) or len(stage.distance.token_errors) == rows
    )


def _words(stage: StageResult, picture: int, frame: int, pictures: int, frames: int) -> str:
    words = stage.name
    words += f", picture {picture}" if pictures > 1 else ""
    return words + (f", frame {frame}" if frames > 1 else "")


def _figure(errors: NDArray[np.float64], stage: StageResult, words: str) -> str:
    step = max(1, math.ceil(max(errors.shape) / CELLS))
    pooled = _worst_of(errors, step)
    h, w = pooled.shape
    side = min(22, max(4, 260 // max(h, w)))
    limit = TOKEN * stage.allowed
    worst = float(pooled.max())
    scale = max(worst, limit)
    parts = [f'<svg viewBox="0 0 {w * side + 1} {h * side + 1}" width="{w * side + 1}" role="img">']
    parts.append(f'<rect width="{w * side}" height="{h * side}" fill="none" stroke="var(--line)"/>')
    for (row, column), error in np.ndenumerate(pooled):
        place = f'x="{column * side}" y="{row * side}" width="{side}" height="{side}"'
        outline = ' stroke="var(--ink)" stroke-opacity=".45"' if error > limit else ""
        tip = f"row {row * step}, column {column * step}: {error:.2e}"
        shade = error / scale if error < math.inf else 1.0
        parts.append(
            f'<rect {place} fill="var(--heat)" fill-opacity="{shade:.2f}"'
            f"{outline}><title>{tip}</title></rect>"
        )
    return (
        f"<figure><figcaption>{escape(words)}: worst {worst:.1e}</figcaption>{''.join(parts)}</svg></figure>"
    )


def _worst_of(errors: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    h, w = errors.shape
    padded = np.zeros((-(-h // step) * step, -(-w // step) * step))
    padded[:h, :w] = errors
    return np.asarray(padded.reshape(padded.shape[0] // step, step, -1, step).max(axis=(1, 3)))
