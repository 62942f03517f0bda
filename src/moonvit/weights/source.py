"""Where a model's files come from."""

import os
from pathlib import Path

from moonvit.errors import WeightsError


def find_checkpoint(path_or_repo: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint; `WeightsError` where there is none."""
    path = Path(path_or_repo).expanduser()
    if not path.is_dir():
        raise WeightsError(str(path_or_repo), ["no such directory"], "give the directory of a checkpoint")
    return path
