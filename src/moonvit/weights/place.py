"""Files and directories that appear under their name only when complete."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moonvit.errors import MoonvitError


def beside(path: Path) -> Path:
    """A name next to `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


def sync_directory(directory: Path) -> None:
    """Make the names in it durable, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill, renamed to `directory` at the end and removed on an error.

    `MoonvitError` if there is something under that name already, other than an empty directory.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise MoonvitError(f"{directory}: exists already", "remove it or choose another place")
    partial = beside(directory)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
