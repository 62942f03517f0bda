"""Pictures named on the command line: files, directories, patterns."""

import glob
from collections.abc import Iterable
from pathlib import Path

from moonvit.pixels.decode import SUFFIXES


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
        path = Path(argument)
        if argument[:5].lower() != "data:" and path.is_dir():
            inside = sorted(
                str(p) for p in path.rglob("*") if _is_picture(p.relative_to(path)) and p.is_file()
            )
            found.extend(inside or [argument])
        elif glob.has_magic(argument) and not path.exists():
            found.extend(sorted(glob.glob(argument, recursive=True)) or [argument])  # noqa: PTH207
        else:
            found.append(argument)
    return found
