"""Pictures named on the command line: files, directories, patterns."""

import glob
from collections.abc import Iterable
from pathlib import Path

from moonvit.pixels.decode import SUFFIXES


def expand(arguments: Iterable[str]) -> list[str]:
    """Each argument as the pictures it stands for, in order, names sorted within an argument.

    A directory gives the pictures below it, by file name ending; a pattern with *, ? or [ gives what it
    matches unless a file of that very name exists. What matches nothing stays as it is, so that it is
    reported as missing.
    """
    found: list[str] = []
    for argument in arguments:
        path = Path(argument)
        if argument[:5].lower() != "data:" and path.is_dir():
            inside = sorted(str(p) for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            found.extend(inside or [argument])
        elif glob.has_magic(argument) and not path.exists():
            found.extend(sorted(glob.glob(argument, recursive=True)) or [argument])  # noqa: PTH207
        else:
            found.append(argument)
    return found
