"""Blocks compiled by PyTorch, once for all blocks and all sizes of pictures.

What comes before and after the attention is compiled, with the number of patches left open; the attention
itself, whose calls depend on the batch, stays as it is. So twenty sizes compile no more than one.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from moonvit.ops.attention import segment_attention
from moonvit.towers.attend import ROTATE, Heads, Rope
from moonvit.towers.base import Tap, unwatched

log = logging.getLogger("moonvit")

_failed: list[str] = []


class Halved(Protocol):
    """A block in two halves."""

    rotation: str

    def before(self, x_ND: Tensor) -> Heads:
        """Q, k and v, not turned yet, each [N, H, d]."""
        ...

    def after(self, x_ND: Tensor, mixed_NHd: Tensor) -> Tensor:
        """The block's result from its input and the attention's."""
        ...


def _before(block: Halved, x_ND: Tensor, rope: Rope) -> Heads:
    q_NHd, k_NHd, v_NHd = block.before(x_ND)
    rotate = ROTATE[block.rotation]
    return rotate(q_NHd, *rope), rotate(k_NHd, *rope), v_NHd


def _after(block: Halved, x_ND: Tensor, mixed_NHd: Tensor) -> Tensor:
    return block.after(x_ND, mixed_NHd)


@cache
def _compiled(half: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(half, dynamic=True)


def run_block(block: Halved, x_ND: Tensor, rope: Rope, lengths: Sequence[int], tap: Tap) -> Tensor | None:
    """The block's result; None where it must be had otherwise.

    That is with gradients or taps, inside another compilation, and where the compiler does not work, which is
    logged once a process.
    """
    if _failed or not unwatched(tap):
        return None
    try:
        q_NHd, k_NHd, v_NHd = _compiled(_before)(block, x_ND, rope)
        mixed_NHd = segment_attention(q_NHd, k_NHd, v_NHd, lengths)
        result: Tensor = _compiled(_after)(block, x_ND, mixed_NHd)
    except Exception as error:  # compilers raise anything; what is not theirs is the caller's
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _failed.append(said)
        log.warning("backend compiled does not work here, eager is used: %s", said)
        return None
    return result
