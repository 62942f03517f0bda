"""The native library compiled, once for each version of its source, into the cache.

No shell is used, and nothing is loaded from a place that another user may write to.
"""

import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moonvit.errors import MoonvitError
from moonvit.places import cache_root

log = logging.getLogger("moonvit.native")

HERE = Path(__file__).parent
SOURCES = ("attention.cpp", "elementwise.cpp", "int8.cpp", "product.cpp")
HEADERS = ("attention.h", "elementwise.h", "int8.h", "numbers.h", "pack.h", "panels.h", "product.h", "simd.h")
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wl,--as-needed",
    "-mavx2", "-mfma", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16",
    "-mavx512vnni",
)  # fmt: skip
TIMEOUT = 180  # seconds


class BuildError(MoonvitError):
    """There is no native library and none could be made."""


def library() -> Path:
    """The compiled library, built if it is not in the cache.

    Raises:
        BuildError: without a compiler, where it fails, or where the cache is not safe to load from.
    """
    directory = cache_root() / "native"
    compiler = _compiler()
    name = _name()
    if compiler is None:
        found = sorted(directory.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime)
        if not found:
            asked = os.environ.get("CXX")
            which = f"CXX is {asked!r}, which is not there" if asked else "no C++ compiler found"
            raise BuildError(which, "install g++, or set CXX")
        return _checked(found[-1])
    path = directory / f"{name}-{_identity(compiler)}.so"
    if path.exists():
        return _checked(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(directory)
    with _locked(directory):
        if not path.exists():
            _compile(compiler, path)
    return _checked(path)


def is_built() -> bool:
    """Whether `library` would find one in the cache."""
    compiler = _compiler()
    pattern = f"{_name()}-{_identity(compiler) if compiler else '*'}.so"
    return any((cache_root() / "native").glob(pattern))


def _compile(compiler: list[str], path: Path) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        made = Path(scratch) / path.name
        sources = [str(HERE / source) for source in SOURCES]
        command = [*compiler, *FLAGS, *sources, *_openmp(), "-o", str(made)]
        try:
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the C++ compiler {compiler[0]} did not finish: {error}") from error
        if done.returncode != 0:
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
            raise BuildError(
                f"the C++ compiler {compiler[0]} failed: {said.strip() or f'exit code {done.returncode}'}"
            )
        made.chmod(0o600)
        made.replace(path)
    log.info("compiled the native kernels in %.1f s, kept as %s", time.perf_counter() - began, path)


def _compiler() -> list[str] | None:
    """The command of a GNU C++ compiler: CXX, or g++."""
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked) or ["g++"]
    except ValueError as error:
        raise BuildError(f"CXX is {asked!r}, which is no command: {error}") from error
    program = shutil.which(words[0])
    return [program, *words[1:]] if program else None


def _openmp() -> list[str]:
    """PyTorch's own OpenMP library: with another one, two sets of threads would fight for the cores."""
    home = Path(torch.__file__).parent
    places = (home / "lib", home.parent / "torch.libs")
    return [str(path) for place in places for path in sorted(place.glob("libgomp*.so*"))][:1]


def _name() -> str:
    digest = hashlib.sha256()
    for file in (*SOURCES, *HEADERS):
        digest.update((HERE / file).read_bytes())
    digest.update(repr((FLAGS, [Path(path).name for path in _openmp()])).encode())
    return f"moonvit-{digest.hexdigest()[:16]}"


def _identity(compiler: list[str]) -> str:
    """Changes with the compiler, without running it."""
    program = Path(compiler[0]).resolve()
    facts = program.stat()
    said = repr((compiler, str(program), facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def _checked(path: Path) -> Path:
    _check_owner(path.parent)
    _check_owner(path)
    return path


def _check_owner(path: Path) -> None:
    facts = path.stat()
    if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path}: others may write there", "chmod go-w, or set MOONVIT_CACHE")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time compiles."""
    import fcntl

    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
