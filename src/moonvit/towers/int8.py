"""Linear layers in eight-bit integers, for passes without gradients on a CPU.

Weights are rounded once, by output channel; activations in every pass, by row, that is by patch or token. So
a picture's result does not depend on what else is in the batch. Sums are exact 32-bit integers; scales, bias
and what follows are float32 until the result is rounded to the model's type.
"""

from typing import Any

import torch
from torch import Tensor, nn

from moonvit.errors import MoonvitError
from moonvit.native.attention import KINDS
from moonvit.native.cpu import cpu_flags, has_matrix_units
from moonvit.native.int8 import MAX_INNER, int8_product
from moonvit.native.library import load
from moonvit.ops.quantize import quantize_rows

QUANTIZE = ("int8",)
_SKIPPED = "patch_embed"
_WITHOUT = "load it without quantize"

ROWS = 128
"""Rows that PyTorch rounds and multiplies at a time: what lies between stays in the cache."""


class Int8Linear(nn.Module):
    """`nn.Linear` with rounded weights.

    `state_dict` has `weight` in int8 [N, K], `weight_scale` in float32 [N], and the bias as it was.
    """

    backend = "eager"
    weight: Tensor
    weight_scale: Tensor
    weight_sums: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_NK, scale_N = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", weight_NK.contiguous())
        self.register_buffer("weight_scale", scale_N)
        self.register_buffer("weight_sums", weight_NK.sum(1, dtype=torch.int32), persistent=False)
        self.bias = linear.bias
        self._packed: Tensor | None = None

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # PyTorch's packed weights can be neither copied nor saved

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        given = state_dict.get(prefix + "weight")
        if given is not None and given.dtype != torch.int8:  # PyTorch would cut its numbers off to integers
            errors.append(f"{prefix}weight is {given.dtype}, expected the int8 of an int8 model")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._packed = None
        self.weight_sums = self.weight.sum(1, dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        x_RK = x.reshape(-1, self.in_features)
        if self.is_native() and load().library is not None:
            x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
            out_RN = self.into(x_RK, x_RK.new_empty(len(x_RK), self.out_features))
        else:
            out_RN = self.by_torch(x_RK)
        return out_RN.view(*x.shape[:-1], self.out_features)

    def is_native(self) -> bool:
        """Whether the native kernel takes this layer; with matrix units, PyTorch's product is faster."""
        as_made = self.weight_scale.dtype == torch.float32 and self.weight.device.type == "cpu"
        return self.backend == "native" and as_made and self.in_features % 4 == 0 and not has_matrix_units()

    def into(self, x_RK: Tensor, out_RN: Tensor, then: str = "store") -> Tensor:
        """The native kernel's result; `then` as in `moonvit.native.product`."""
        bias = None if self.bias is None else self.bias.detach()
        return int8_product(x_RK, self.weight, self.weight_scale, self.weight_sums, bias, out_RN, then)

    def by_torch(self, x_RK: Tensor) -> Tensor:
        """The same through oneDNN, by PyTorch."""
        if len(x_RK) == 0:
            return x_RK.new_empty(0, self.out_features)
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.weight, None)
        return torch.cat([self._rows(x) for x in torch.split(x_RK, ROWS)])

    def _rows(self, x_RK: Tensor) -> Tensor:
        q_RK, scale_R = quantize_rows(x_RK)
        unsigned_RK = q_RK.view(torch.uint8).bitwise_xor_(128)  # the same as adding 128
        zeros_N = torch.zeros(self.out_features, dtype=torch.int64)
        out_RN: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned_RK, 1.0, 128, self._packed, self.weight_scale, zeros_N, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        out_RN.mul_(scale_R[:, None])
        return (out_RN if self.bias is None else out_RN.add_(self.bias)).to(x_RK.dtype)

    def _check(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            raise MoonvitError("an int8 model cannot be compiled", _WITHOUT)
        if reason := int8_lacks():  # there, oneDNN's sums of two products may leave 16 bits
            raise MoonvitError(f"an int8 model cannot run here: {reason}", _WITHOUT)
        learns = x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if torch.is_grad_enabled() and learns:
            raise MoonvitError("an int8 model has no gradients", f"use torch.no_grad(), or {_WITHOUT}")
        if x.device.type != "cpu" or self.weight.device.type != "cpu":
            raise MoonvitError(f"an int8 model runs on the CPU, not on {x.device}", _WITHOUT)
        bias_dtype = x.dtype if self.bias is None else self.bias.dtype
        if self.weight_scale.dtype != torch.float32 or x.dtype != bias_dtype or x.dtype not in KINDS:
            raise MoonvitError(
                "an int8 model keeps the type that it was loaded in, bfloat16 or float32",
                "give dtype= to from_pretrained, and leave autocast off",
            )


def check_quantize(quantize: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """`MoonvitError` for what cannot be had: another kind, device or type, or a processor without it."""
    if quantize is None:
        return
    if quantize not in QUANTIZE:
        raise MoonvitError(f"quantize is {quantize!r}, expected None or {', '.join(map(repr, QUANTIZE))}")
    if device.type != "cpu":
        raise MoonvitError(f"quantize {quantize!r} is for the CPU, the device is {device}", _WITHOUT)
    if dtype not in KINDS:
        name = str(dtype).removeprefix("torch.")
        raise MoonvitError(f"quantize {quantize!r} goes with bfloat16 and float32, dtype is {name}", _WITHOUT)
    if reason := int8_lacks():
        raise MoonvitError(f"quantize {quantize!r} cannot be had here: {reason}", _WITHOUT)


def int8_lacks() -> str:
    """Why eight-bit products are not exact or do not pay here, or an empty string."""
    if "avx512_vnni" not in cpu_flags():
        return "the processor has no avx512_vnni"
    mkldnn: Any = torch.backends.mkldnn
    return "" if mkldnn.is_available() else "this PyTorch has no oneDNN"


def quantize_model(model: nn.Module) -> None:
    """Round every linear layer but those of the patch embedding, in place, one at a time.

    One of more than `MAX_INNER` inputs would be left as it is; no tower has such.
    """
    for parent_name, parent in list(model.named_modules()):
        if _SKIPPED in parent_name.split("."):
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != _SKIPPED and child.in_features <= MAX_INNER:
                setattr(parent, name, Int8Linear(child))
