"""Progress of long work, on stderr."""

import os
from typing import Any


def progress_bar(total: int, unit: str, shown: bool) -> Any:
    """A bar over `total` units; silent unless shown and allowed by HF_HUB_DISABLE_PROGRESS_BARS."""
    from tqdm import tqdm

    forbidden = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE")
    return tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=False, disable=forbidden or not shown)
