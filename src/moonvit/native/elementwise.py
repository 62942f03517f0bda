"""The native norms and GELU on tensors."""

import ctypes

import torch
from torch import Tensor

from moonvit.native.attention import KINDS
from moonvit.native.library import Gelu, Norm, Turn, kernels


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, out: Tensor) -> Tensor:
    """RMS norm of each row or, `centred`, LayerNorm, into `out`; all contiguous and of one type.

    Computed in float32 and rounded once, as PyTorch does.
    """
    call = Norm(
        x=x.data_ptr(), out=out.data_ptr(), weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        rows=x.numel() // x.shape[-1], width=x.shape[-1], eps=eps, centred=centred,
        kind=KINDS[x.dtype], threads=torch.get_num_threads(),
    )  # fmt: skip
    kernels().moonvit_norm(ctypes.byref(call))
    return out


def gelu_tanh_(x: Tensor) -> Tensor:
    """GELU by its tanh formula in place; contiguous."""
    call = Gelu(x=x.data_ptr(), count=x.numel(), kind=KINDS[x.dtype], threads=torch.get_num_threads())
    kernels().moonvit_gelu_tanh(ctypes.byref(call))
    return x


def turn_pairs_(x_NHd: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """`rotate_pairs` in place; heads are neighbours, tables float32 and contiguous."""
    n, heads, d = x_NHd.shape
    assert x_NHd.stride()[1:] == (d, 1)
    call = Turn(
        x=x_NHd.data_ptr(), cosine=cos_NP.data_ptr(), sine=sin_NP.data_ptr(),
        rows=n, row=x_NHd.stride(0), heads=heads, head_dim=d,
        kind=KINDS[x_NHd.dtype], threads=torch.get_num_threads(),
    )  # fmt: skip
    kernels().moonvit_turn(ctypes.byref(call))
    return x_NHd
