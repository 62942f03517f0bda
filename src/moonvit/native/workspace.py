"""Memory that a thread's kernels work in, kept from one call to the next."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT = 2**24
"""Bytes that a thread holds on to for each use; more is given back after the call."""

_local = threading.local()


def workspace(use: str, size: int) -> NDArray[Any]:
    """At least `size` bytes as int32, for one call.

    From numpy, which asks the system for huge pages where PyTorch does not.
    """
    kept: dict[str, NDArray[Any]] = _local.__dict__
    found = kept.get(use)
    if found is not None and found.nbytes >= size:
        return found
    made = np.empty(-(-size // 4), np.int32)
    if made.nbytes <= KEPT:
        kept[use] = made
    return made
