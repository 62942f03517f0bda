"""The native matrix product on tensors."""

import ctypes

import torch
from torch import Tensor

from moonvit.native.attention import KINDS
from moonvit.native.library import Product, kernels
from moonvit.native.workspace import workspace

EPILOGUES = {"store": 0, "gelu_tanh": 1, "add": 2}

_PACKED = 2**22  # bytes of rows at once: more of them no longer stay in the cache


def multiplies(x: Tensor) -> bool:
    """Whether the kernel takes such rows: in bfloat16 their length must be even."""
    return x.dtype in KINDS and x.shape[-1] % 2 == 0


def product(
    x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_RN: Tensor, then: str = "store"
) -> Tensor:
    """`out` = x·weightᵀ + bias; through GELU (tanh) or added to `out` before it is rounded.

    All of one type; sums are float32. The weight and the bias are contiguous; x and `out` have contiguous
    rows and do not overlap.
    """
    rows, inner = x_RK.shape
    if weight_NK.shape[1] != inner or out_RN.shape != (rows, len(weight_NK)):
        shapes = [tuple(x.shape) for x in (x_RK, weight_NK, out_RN)]
        raise ValueError(f"x, weight and out are {shapes}, which do not fit together")
    if x_RK.stride(1) != 1 or out_RN.stride(1) != 1 or not weight_NK.is_contiguous():
        raise ValueError("rows of x and out, and the weight, must be contiguous")
    row = inner * x_RK.element_size()
    work = workspace("rows", max(16 * row, min(-(-rows // 16) * 16 * row, _PACKED)))
    call = Product(
        x=x_RK.data_ptr(), x_row=x_RK.stride(0), weight=weight_NK.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        out=out_RN.data_ptr(), out_row=out_RN.stride(0), rows=rows, inner=inner, outputs=len(weight_NK),
        work=work.ctypes.data, work_words=work.size,
        epilogue=EPILOGUES[then], kind=KINDS[x_RK.dtype], threads=torch.get_num_threads(),
    )  # fmt: skip
    if failed := kernels().moonvit_product(ctypes.byref(call)):
        raise RuntimeError(f"the native product refused its input ({failed})")
    return out_RN
