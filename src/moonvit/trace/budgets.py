"""How far a right run of each dtype may be from a float64 one.

Each budget is a little over twice what was measured on full-depth runs with random weights; the figures
are in docs/porting.md. The float32 budget also leaves room for sums taken in plain order.
"""

import math

from moonvit.errors import MoonvitError
from moonvit.trace.stages import BEFORE, TABLES, block_number

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-12, "bfloat16": 2.0**-9}
"""Largest relative rounding error of the types that dumps come in; float16 and bfloat16 halved, as the
rounding of many values averages out."""

FLAT = {"float64": 1e-12, "float32": 5e-6}
"""Relative L2 allowed in types whose error hardly grows with depth."""

TABLE_SIDE = 2e-8
"""Added for each patch along the longer side: float32 angles grow with the position they belong to."""

TABLE_ROOM = 4.0
"""Tables may be this much farther off: they are float32 in every run, and a share between two cells of a
64-wide table has an error of up to 64 roundings."""

TOKEN = 4.0
"""A single token may be this many times farther off than the stage as a whole."""


def budget(stage: str, dtype: str, layers: int, side: int = 0) -> float:
    """Relative L2 error allowed at a stage, counted from the pixels.

    Args:
        stage: its name.
        dtype: the coarser type of the two runs, a key of `ROUNDING`.
        layers: blocks of the tower.
        side: patches along the longer side of the grid.
    """
    if stage in TABLES:
        low = dtype in ("float16", "bfloat16")
        return TABLE_ROOM * _allowed("float32" if low else dtype, None, side)
    if stage in BEFORE:
        return _allowed(dtype, None, side)
    number = block_number(stage)
    return _allowed(dtype, layers if number is None else number + 1, side)


def segment_budget(dtype: str, blocks: int, side: int = 0) -> float:
    """Relative L2 error allowed after that many blocks from an exact input."""
    return _allowed(dtype, max(blocks, 1), side)


def cosine_budget(relative: float) -> float:
    """How far below 1 a token's cosine may be, where the stage may have that relative error."""
    return min(1.0, (TOKEN * relative) ** 2 / 2)


def _allowed(dtype: str, blocks: int | None, side: int) -> float:
    if dtype not in ROUNDING:
        raise MoonvitError(f"dtype is {dtype!r}, expected one of {', '.join(ROUNDING)}")
    if dtype == "float64":
        return FLAT[dtype]
    if dtype == "float32":
        return FLAT[dtype] + TABLE_SIDE * side
    growth = 3.0 if blocks is None else 4.0 + 1.5 * math.sqrt(blocks)
    return growth * ROUNDING[dtype]
