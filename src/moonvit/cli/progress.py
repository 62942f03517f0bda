"""Bars of the command line: shown where stderr is a terminal."""

import sys
from collections.abc import Callable
from typing import Any

from moonvit.progress import progress_bar
from moonvit.weights.hub import HubCheckpoint


def bar(total: int, unit: str, shown: bool = True) -> Any:
    """A bar over `total` units."""
    return progress_bar(total, unit, shown and sys.stderr.isatty())


def fetch_bar(checkpoint: HubCheckpoint) -> Callable[[int], object]:
    """What to call with the bytes that a fetch brings."""
    update: Callable[[int], object] = bar(checkpoint.nbytes, "B").update
    return update
