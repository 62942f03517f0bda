"""MoonViT's blocks without a copy too many, for passes that need no gradients.

Buffers are made once a pass and used by every block; all but the q, k and v of the batch are worked on a
few rows at a time, so that they stay in the cache. Products are native too, or, where PyTorch has faster
ones, its own.
Shape letters: N patches of a packed batch, R rows of a part of it, D width, H heads, d head size, F hidden.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from moonvit.native.attention import attention, fits
from moonvit.native.elementwise import gelu_tanh_, norm, turn_pairs_
from moonvit.native.product import multiplies, product
from moonvit.ops.attention import segment_attention
from moonvit.towers.attend import torch_is_faster
from moonvit.towers.int8 import Int8Linear

if TYPE_CHECKING:
    from moonvit.towers.moonvit import Block, BlockStack

Rope = tuple[Tensor, Tensor]

ROWS = 1024
"""Rows worked on at a time."""


def fits_blocks(stack: "BlockStack", x_ND: Tensor) -> bool:
    """Whether every block is as it was made: a replaced, hooked or retyped layer must be called."""
    if len(x_ND) == 0 or not x_ND.is_contiguous() or torch.is_autocast_enabled("cpu"):
        return False
    heads = x_ND.new_empty(1, 1, stack.head_dim)
    stored = all(
        type(p) is nn.Parameter and p.dtype == x_ND.dtype and p.is_contiguous() and multiplies(p)
        for p in stack.parameters()
    )
    if not (fits(heads) and stored and not _global_hooks()):
        return False
    return all(_plain(module) for module in stack.modules()) and _alike(stack)


def _alike(stack: "BlockStack") -> bool:
    """Whether all blocks have the first one's shapes: they share its buffers."""
    shapes = [
        [(name, x.shape) for name, x in chain(block.named_parameters(), block.named_buffers())]
        for block in stack.blocks
    ]
    return bool(shapes) and all(found == shapes[0] for found in shapes)


def _plain(module: nn.Module) -> bool:
    from moonvit.towers import moonvit

    if type(module) is Int8Linear and not module.is_native():
        return False
    known = (nn.Linear, Int8Linear, nn.RMSNorm, nn.LayerNorm, nn.ModuleList)
    ours = (moonvit.Block, moonvit.BlockStack, moonvit.FeedForward)
    if isinstance(module, nn.RMSNorm | nn.LayerNorm) and (module.weight is None or module.eps is None):
        return False
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) in (*known, *ours) and not changed


def _global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def run_blocks(stack: "BlockStack", x_ND: Tensor, rope: Rope, lengths: Sequence[int]) -> Tensor:
    """What `BlockStack.forward` gives, the last norm included."""
    x_ND = x_ND.clone()
    blocks = cast("list[Block]", list(stack.blocks))
    rows = min(ROWS, len(x_ND))
    qkv = empty(len(x_ND), blocks[0].wqkv.out_features, x_ND.dtype)
    hidden = empty(rows, blocks[0].mlp.fc0.out_features, x_ND.dtype)
    normed = empty(rows, x_ND.shape[1], x_ND.dtype)
    for block in blocks:
        _attend(block, x_ND, rope, lengths, qkv, normed)
        _feed_forward(block, x_ND, hidden, normed)
    for x_RD in torch.split(x_ND, ROWS):
        normalise(stack.final_layernorm, x_RD, x_RD)
    return x_ND


def _attend(
    block: "Block", x_ND: Tensor, rope: Rope, lengths: Sequence[int], qkv: Tensor, normed: Tensor
) -> None:
    """X += wo·attention(norm0(x)); the result of the attention takes the place of q."""
    for x_RD, qkv_R in zip(torch.split(x_ND, ROWS), torch.split(qkv, ROWS), strict=True):
        multiply(block.wqkv, normalise(block.norm0, x_RD, normed[: len(x_RD)]), qkv_R)
    q_NHd, k_NHd, v_NHd = qkv.view(len(qkv), 3, -1, block.head_dim).unbind(1)
    if torch_is_faster(q_NHd.dtype):
        q_NHd, k_NHd = turn_pairs_(q_NHd, *rope), turn_pairs_(k_NHd, *rope)
        q_NHd.copy_(segment_attention(q_NHd, k_NHd, v_NHd, lengths))
    else:
        attention(q_NHd, k_NHd, v_NHd, lengths, rope, "pairs", out=q_NHd)
    for x_RD, q_RHd in zip(torch.split(x_ND, ROWS), torch.split(q_NHd, ROWS), strict=True):
        multiply(block.wo, q_RHd.flatten(1), x_RD, "add")


def _feed_forward(block: "Block", x_ND: Tensor, hidden: Tensor, normed: Tensor) -> None:
    """X += fc1·GELU(fc0·norm1(x))."""
    for x_RD in torch.split(x_ND, ROWS):
        hidden_RF = hidden[: len(x_RD)]
        multiply(block.mlp.fc0, normalise(block.norm1, x_RD, normed[: len(x_RD)]), hidden_RF, "gelu_tanh")
        multiply(block.mlp.fc1, hidden_RF, x_RD, "add")


def normalise(layer: nn.Module, x_RD: Tensor, out: Tensor) -> Tensor:
    """The RMS or layer norm into `out`."""
    assert isinstance(layer, nn.RMSNorm | nn.LayerNorm)
    assert layer.eps is not None
    bias = layer.bias if isinstance(layer, nn.LayerNorm) else None
    return norm(x_RD, layer.weight, bias, layer.eps, isinstance(layer, nn.LayerNorm), out)


def multiply(layer: nn.Linear | Int8Linear, x: Tensor, out: Tensor, then: str = "store") -> None:
    """`out` = layer(x); or GELU of it, or `out` + layer(x)."""
    if isinstance(layer, Int8Linear):
        layer.into(x, out, then)
    elif not torch_is_faster(x.dtype):
        product(x, layer.weight, layer.bias, out, then)
    elif then == "add":
        torch.addmm(out, x, layer.weight.t(), out=out)
        if layer.bias is not None:
            out.add_(layer.bias)
    else:
        torch.mm(x, layer.weight.t(), out=out)
        if layer.bias is not None:
            out.add_(layer.bias)
        if then == "gelu_tanh":
            gelu_tanh_(out)


def empty(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A buffer from numpy, which asks the system for huge pages: PyTorch's cost a page fault each 4 kB."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.empty(rows * width * size, np.uint8)).view(dtype).view(rows, width)
