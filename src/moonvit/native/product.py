"""The native matrix product on tensors."""

import ctypes
from typing import Any

import torch
from numpy.typing import NDArray
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
    check_product(x_RK, weight_NK, out_RN)
    rows, inner = x_RK.shape
    work = room_for_rows(rows, inner * x_RK.element_size(), _PACKED)
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


def check_product(x_RK: Tensor, weight_NK: Tensor, out_RN: Tensor) -> None:
    """`ValueError` for shapes and strides with which a kernel would leave its memory."""
    if weight_NK.shape[1] != x_RK.shape[1] or out_RN.shape != (len(x_RK), len(weight_NK)):
        shapes = [tuple(x.shape) for x in (x_RK, weight_NK, out_RN)]
        raise ValueError(f"x, weight and out are {shapes}, which do not fit together")
    if x_RK.stride(1) != 1 or out_RN.stride(1) != 1 or not weight_NK.is_contiguous():
        raise ValueError("rows of x and out, and the weight, must be contiguous")


def room_for_rows(rows: int, row: int, most: int) -> NDArray[Any]:
    """Memory for rows of `row` bytes each, in sixteens: all, or what fits into `most` bytes; one at least."""
    return workspace("rows", max(16 * row, min(-(-rows // 16) * 16 * row, most)))
