"""Tensor names of checkpoints in the wild, mapped to the released checkpoint's.

Literal tables, read from the top; the first prefix that fits decides.
"""

from collections.abc import Iterable

PREFIXES = {
    "vision_tower.": "vision_tower.",
    "mm_projector.": "mm_projector.",
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.": "mm_projector.",
}
"""A tensor under one of these belongs to the vision half, whatever else its name says."""

BARE_PREFIXES = {
    "patch_embed.": "vision_tower.patch_embed.",
    "encoder.": "vision_tower.encoder.",
    "proj.": "mm_projector.proj.",
    "post_norm.": "mm_projector.post_norm.",
    "linear_1.": "mm_projector.proj.0.",
    "linear_2.": "mm_projector.proj.2.",
}
"""Names of a tower or projector saved alone; understood only where no name has a prefix above."""

RENAMED = {
    "mm_projector.linear_1.": "mm_projector.proj.0.",
    "mm_projector.linear_2.": "mm_projector.proj.2.",
}


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """{name as stored: name as released} for the vision tensors among `names`; others are left out."""
    names = list(names)
    found = {name: new for name in names if (new := _replaced(name, PREFIXES)) is not None}
    if not found:
        found = {name: new for name in names if (new := _replaced(name, BARE_PREFIXES)) is not None}
    return {name: _replaced(new, RENAMED) or new for name, new in found.items()}


def _replaced(name: str, prefixes: dict[str, str]) -> str | None:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return None
