"""How a model is run: in plain PyTorch, compiled by it, or with native kernels."""

import logging
import os
from functools import cache

import torch
from torch import nn

from moonvit.errors import MoonvitError
from moonvit.native.attention import KINDS
from moonvit.native.cpu import lacking
from moonvit.native.library import load

log = logging.getLogger("moonvit")

BACKENDS = ("auto", "eager", "compiled", "native")


def choose(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that is meant, "eager", "compiled" or "native".

    "auto" is MOONVIT_BACKEND if that is set, else "native" where its kernels run and "eager" elsewhere. One
    that is asked for by name and cannot run is replaced by "eager", with a warning.
    """
    if asked not in BACKENDS:
        raise MoonvitError(f"backend is {asked!r}, expected one of {', '.join(BACKENDS)}")
    wanted = asked
    if asked == "auto":
        wanted = os.environ.get("MOONVIT_BACKEND") or "auto"
        if wanted not in BACKENDS:
            raise MoonvitError(f"MOONVIT_BACKEND is {wanted!r}, expected one of {', '.join(BACKENDS)}")
    if wanted not in ("auto", "native"):
        return wanted
    reason = native_lacks(device, dtype)
    if reason and wanted == "native":
        log.warning("backend native is not to be had, eager is used: %s", reason)
    elif device.type == "cpu" and dtype in KINDS and reason and not lacking():
        _say_once(f"this processor could run much faster, but native kernels are missing: {reason}")
    return "eager" if reason else "native"


@cache
def _say_once(message: str) -> None:
    log.warning(message)


def native_lacks(device: torch.device, dtype: torch.dtype) -> str:
    """Why native kernels cannot run there, or an empty string; builds them at the first time."""
    if device.type != "cpu":
        return f"its kernels run on the CPU, the model is on {device}"
    if dtype not in KINDS:
        return f"its kernels take bfloat16 and float32, the model is {str(dtype).removeprefix('torch.')}"
    return load().reason


def set_backend(model: nn.Module, backend: str) -> None:
    """Tell every part of the model that has a choice."""
    for module in model.modules():
        if hasattr(module, "backend"):
            module.__dict__["backend"] = backend
