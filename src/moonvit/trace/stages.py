"""The stages of the tower by name, in the order in which they are computed.

Sizes are named by the letters of the tower: N patches, M merged rows, D hidden_size, H heads, d head
size, P = d/2 pairs, F intermediate_size, C = 4·D, T text_hidden_size.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from moonvit.errors import MoonvitError

BEFORE = {
    "pixels": "N,3,patch,patch",
    "patch_embed": "N,D",
    "pos_embed": "N,D",
    "embed": "N,D",
    "rope_cos": "N,P",
    "rope_sin": "N,P",
}
IN_BLOCK = {
    "norm0": "N,D",
    "q_unrotated": "N,H,d",
    "k_unrotated": "N,H,d",
    "q": "N,H,d",
    "k": "N,H,d",
    "v": "N,H,d",
    "attn_out": "N,D",
    "attn_residual": "N,D",
    "norm1": "N,D",
    "mlp_hidden": "N,F",
}
AFTER = {"final_norm": "N,D", "merged": "M,C", "proj_hidden": "M,C", "projected": "M,T"}

PROJ_NORM = {"proj_norm": "M,C"}
"""Of the siblings that norm before merging, between `merged` and `proj_hidden`."""

DEEPSTACK = re.compile(r"deepstack\.\d+")
"""Qwen3-VL's features beside the embeddings, [M, T]."""

MERGED = frozenset({"merged", "proj_norm", "proj_hidden", "projected"})
"""Stages whose rows are merged cells; the rows of all others are patches."""

TABLES = frozenset({"pos_embed", "rope_cos", "rope_sin"})
"""Stages that depend on the grid alone: nothing is computed from them but sums and turns."""

_BLOCK = re.compile(r"block\.(\d+)(?:\.([a-z0-9_]+))?")


def stage_names(layers: int, *, every_family: bool = False) -> list[str]:
    """All stages of a K3 tower of that many blocks, in order; or all that any family may have."""
    names = list(BEFORE)
    for number in range(layers):
        block = f"block.{number:02}"
        names += [f"{block}.{name}" for name in IN_BLOCK] + [block]
    if not every_family:
        return names + list(AFTER)
    deepstack = [f"deepstack.{number}" for number in range(layers)]
    return [*names, "final_norm", "merged", *PROJ_NORM, "proj_hidden", *deepstack, "projected"]


def block_number(name: str) -> int | None:
    """The block that a stage belongs to, or None for the stages before and after the blocks."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def stage_shape(name: str) -> str:
    """The letters of a stage's shape, such as "N,H,d"."""
    if DEEPSTACK.fullmatch(name):
        return "M,T"
    match = _BLOCK.fullmatch(name)
    if match is None:
        return (BEFORE | PROJ_NORM | AFTER)[name]
    return IN_BLOCK[match[2]] if match[2] else "N,D"


def has_patch_rows(name: str) -> bool:
    """Whether the stage's first axis runs over patches, and so may be in raster or block order."""
    return name not in MERGED and not DEEPSTACK.fullmatch(name)


class Selection:
    """Which stages to keep: by patterns such as `block.*.q`, and by block numbers.

    Args:
        stages: shell patterns; a stage is kept if any fits.
        layers: numbers of blocks, or None for all; stages outside the blocks are not touched by it.
    """

    def __init__(self, stages: Sequence[str] = ("*",), layers: Iterable[int] | None = None) -> None:
        self.stages = tuple(stages)
        self.layers = None if layers is None else frozenset(layers)

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        number = block_number(name)
        if self.layers is not None and number is not None and number not in self.layers:
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.stages)

    def check(self, layers: int) -> None:
        """`MoonvitError` for a pattern that fits no stage, or a block that is not there."""
        known = stage_names(layers, every_family=True)
        for pattern in self.stages:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise MoonvitError(
                    f"stages: no stage fits {pattern!r}", f"stages are {', '.join(BEFORE)}, block.NN..."
                )
        beyond = sorted(number for number in self.layers or () if number >= layers)
        if beyond:
            raise MoonvitError(f"layers: no block {beyond[0]}, the last is {layers - 1}")


def parse_layers(text: str) -> list[int]:
    """`0,5-7,26` as [0, 5, 6, 7, 26]."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise MoonvitError(f"layers: {part.strip()!r} is not a number or a range such as 5-7")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers
