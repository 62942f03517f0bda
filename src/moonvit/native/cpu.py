"""Which processor this is."""

import platform
from functools import cache

NEEDED = frozenset(
    {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma", "bmi2"}
)
"""What the native kernels are compiled for; a processor without one of these would stop at it."""

MATRIX_UNITS = frozenset({"amx_bf16", "amx_tile"})


@cache
def cpu_flags() -> frozenset[str]:
    """The processor's features by Linux' names; empty where the system does not tell them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            line = next((line for line in file if line.startswith("flags")), ":")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def lacking() -> str:
    """What the native kernels miss here, as a clause, or an empty string."""
    missing = sorted(NEEDED - cpu_flags())
    return f"the processor has no {', '.join(missing)}" if missing else ""


def has_matrix_units() -> bool:
    """Whether PyTorch's own kernels can use AMX here."""
    return cpu_flags() >= MATRIX_UNITS
