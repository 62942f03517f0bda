"""How many processors this process may use."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Processors of the affinity mask, no more than the container's quota of time, at least 1.

    PyTorch starts as many threads as the machine has cores; where a container gets the time of fewer, the
    surplus ones only wait for each other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Processors' worth of time that a control group grants, second version or first; None without limit."""
    try:
        granted, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        share = int(granted) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None
