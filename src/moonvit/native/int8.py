"""The native product of eight-bit integers on tensors."""

import ctypes

import torch
from torch import Tensor

from moonvit.native.attention import KINDS
from moonvit.native.library import Int8Product, kernels
from moonvit.native.product import EPILOGUES, check_product, room_for_rows

MAX_INNER = 65536
"""Sums of more products could leave 32 bits."""

_PACKED = 2**23  # bytes of rows at once: more of them no longer stay in the cache


def int8_product(
    x_RK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    sums_N: Tensor,
    bias_N: Tensor | None,
    out_RN: Tensor,
    then: str = "store",
) -> Tensor:
    """`out` = x·(scale·weight)ᵀ + bias, each row of x rounded to 255 steps of its own scale.

    Args:
        x_RK: float32 or bfloat16 with contiguous rows, a multiple of 4 and at most `MAX_INNER` long.
        weight_NK: int8, contiguous.
        scale_N: float32, of each row of the weight.
        sums_N: int32, the sum of each row of the weight.
        bias_N: of x's type, or None.
        out_RN: of x's type with contiguous rows, not overlapping x.
        then: "store"; "gelu_tanh"; or "add" to what `out` holds, before it is rounded.
    """
    check_product(x_RK, weight_NK, out_RN)
    rows, inner = x_RK.shape
    work = room_for_rows(rows, inner + 4, _PACKED)
    call = Int8Product(
        x=x_RK.data_ptr(), x_row=x_RK.stride(0), weight=weight_NK.data_ptr(), scale=scale_N.data_ptr(),
        sums=sums_N.data_ptr(), bias=None if bias_N is None else bias_N.data_ptr(), out=out_RN.data_ptr(),
        out_row=out_RN.stride(0), rows=rows, inner=inner, outputs=len(weight_NK),
        work=work.ctypes.data, work_words=work.size,
        epilogue=EPILOGUES[then], kind=KINDS[x_RK.dtype], threads=torch.get_num_threads(),
    )  # fmt: skip
    if failed := kernels().moonvit_int8_product(ctypes.byref(call)):
        raise RuntimeError(f"the native product refused its input ({failed})")
    return out_RN
