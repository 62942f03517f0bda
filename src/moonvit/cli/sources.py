"""Pictures named on the command line: files, directories, patterns."""

import glob
from collections.abc import Iterable
from pathlib import Path

from moonvit.pixels.decode import SUFFIXES


def _is_directory(argument: str) -> bool:
    try:
        return bool(argument) and argument[:5].lower() != "data:" and Path(argument).is_dir()
    except OSError:  # no name of a file here; said when it is read
        return False


def _is_picture(path: Path) -> bool:
    """By its ending; hidden files, and what lies in hidden folders, are none."""
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)


def expand(arguments: Iterable[str]) -> list[str]:
    """Each argument as the pictures it stands for, in order, names sorted within an argument.

    A directory gives the pictures below it, by file name ending, hidden ones left out; a pattern with *, ?
    or [ gives what it matches unless a file of that very name exists. What matches nothing stays as it is,
    so that it is reported as missing.
    """
    found: list[str] = []
    for argument in arguments:
        if _is_directory(argument):
            below = (p for p in Path(argument).rglob("*") if _is_picture(p.relative_to(argument)))
            inside = sorted(str(p) for p in below if p.is_file())
            found.extend(inside or [argument])
        elif glob.has_magic(argument) and not Path(argument).exists():
            found.extend(sorted(glob.glob(argument, recursive=True)) or [argument])  # noqa: PTH207
        else:
            found.append(argument)
    return found
