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


def check_output(path: Path) -> Path:
    """The file that `path` stands for, through links, if it can be written; nothing is made yet.

    `MoonvitError` for what is there and is no regular file (a device would be replaced by one), and where no
    file can be made.
    """
    try:
        real = path.resolve()
        if real.exists() and not real.is_file():
            raise MoonvitError(f"{path}: is no regular file", "name a file to write")
        home = next(place for place in real.parents if place.exists())
    except (OSError, RuntimeError) as error:  # such as a name too long, or links in a circle
        raise MoonvitError(f"{path}: cannot be written: {error}") from error
    if not home.is_dir():
        raise MoonvitError(f"{path}: cannot be written: {home} is no directory")
    if not os.access(home, os.W_OK | os.X_OK):
        raise MoonvitError(f"{path}: cannot be written: no permission in {home}")
    return real


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name to write a file under, which becomes `path` at the end and is removed on an error.

    Missing directories are made; `MoonvitError` as `check_output`.
    """
    real = check_output(path)
    real.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(real)
    try:
        yield partial
        partial.replace(real)
    finally:
        partial.unlink(missing_ok=True)


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
