"""Where moonvit keeps what it fetched or built."""

import os
from pathlib import Path


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir`, MOONVIT_CACHE, or `moonvit` in HF_HOME."""
    from huggingface_hub import constants

    return Path(
        cache_dir or os.environ.get("MOONVIT_CACHE") or Path(constants.HF_HOME) / "moonvit"
    ).expanduser()
