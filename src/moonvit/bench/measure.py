"""Timing in turns, so that whatever else the machine does falls on every contender alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender's runs, in the order in which they were made."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def in_turns(
    runs: Mapping[str, Run],
    rounds: int,
    told: Callable[[str, float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Each run once untimed, then `rounds` times all of them, one after the other: A B C, A B C, ..."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}, expected at least 1")
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = clock()
            run()
            taken[name].append(clock() - began)
            if told is not None:
                told(name, taken[name][-1])
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def peak_rise(run: Run) -> int | None:
    """Bytes by which resident memory rose above its level at the start, at most, during the run.

    None where the system does not tell (Linux alone does, by /proc/self).
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")
        before = _field(status, "VmRSS")
        run()
        return max(0, _field(status, "VmHWM") - before)
    except (OSError, KeyError):
        return None


def _field(status: Path, name: str) -> int:
    for line in status.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
