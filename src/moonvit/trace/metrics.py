"""How far one array is from another, all in float64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

SMALL = 1e-3
"""A token whose norm is below this share of the stage's usual one has no direction worth comparing."""


@dataclass(frozen=True)
class Distance:
    """One stage against the reference.

    Attributes:
        max_abs: largest absolute difference.
        relative_l2: norm of the difference over the norm of the reference.
        min_cosine: smallest cosine between a token and its counterpart; 1 if there is no token of size.
        pcc: Pearson's correlation over all elements; None where either side is constant.
        token_errors: for each row, the norm of its difference over the norm of its reference, or over
            the usual norm of a row where that is larger than 1000 times its own. [rows]
        finite: False if the array has a NaN or an infinity, and then the numbers above mean nothing.
    """

    max_abs: float
    relative_l2: float
    min_cosine: float
    pcc: float | None
    token_errors: F64
    finite: bool = True


def relative_l2(got: NDArray[Any], want: NDArray[Any]) -> float:
    """|got - want| / |want|; 0 for two zeros, infinite where only `want` is zero."""
    wide = np.asarray(want, np.float64)
    return _ratio(float(np.linalg.norm(np.asarray(got, np.float64) - wide)), float(np.linalg.norm(wide)))


def distance(got: NDArray[Any], want: NDArray[Any]) -> Distance:
    """All measures for two arrays of one shape whose first axis runs over tokens."""
    rows = len(want) if want.ndim else 1
    a = np.asarray(got, np.float64).reshape(rows, -1)
    b = np.asarray(want, np.float64).reshape(rows, -1)
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if not a.size:
        return Distance(0.0, 0.0, 1.0, None, np.zeros(rows))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        bad = ~np.isfinite(a).all(axis=1) | ~np.isfinite(b).all(axis=1)
        return Distance(math.inf, math.inf, -1.0, None, np.where(bad, np.inf, 0.0), finite=False)
    difference = a - b
    error, size = np.linalg.norm(difference, axis=1), np.linalg.norm(b, axis=1)
    usual = math.sqrt(float(np.mean(size**2)))
    return Distance(
        max_abs=float(np.abs(difference).max()),
        relative_l2=_ratio(float(np.linalg.norm(error)), float(np.linalg.norm(size))),
        min_cosine=_min_cosine(a, b, size, usual),
        pcc=_pcc(a, b),
        token_errors=_token_errors(error, size, usual),
    )


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def _token_errors(error: F64, size: F64, usual: float) -> F64:
    scale = np.where(size < SMALL * usual, usual, size)
    return np.asarray(np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0))


def _min_cosine(a: F64, b: F64, size: F64, usual: float) -> float:
    """1 - |a/|a| - b/|b||² / 2, which keeps its digits where a·b/(|a||b|) would round to 1."""
    sized = (size >= SMALL * usual) & (size > 0)
    if not sized.any():
        return 1.0
    a, b = a[sized], b[sized]
    lengths = np.linalg.norm(a, axis=1, keepdims=True)
    turned = np.divide(a, lengths, out=np.zeros_like(a), where=lengths > 0) - b / size[sized, None]
    return float(1 - 0.5 * np.square(turned).sum(axis=1).max())


def _pcc(a: F64, b: F64) -> float | None:
    x, y = a - a.mean(), b - b.mean()
    scale = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    tiny = 1e-12 * float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.vdot(x, y)) / scale if scale > tiny else None
