"""The native library loaded into this process."""

import ctypes
import threading
from dataclasses import dataclass

from moonvit.errors import MoonvitError
from moonvit.native import build, cpu

Pointer, Int64, Int32, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Plane(ctypes.Structure):
    """`Plane` of attention.h."""

    _fields_ = (("data", Pointer), ("row", Int64), ("head", Int64))


class Call(ctypes.Structure):
    """`Call` of attention.h."""

    _fields_ = (
        ("q", Plane), ("k", Plane), ("v", Plane),
        ("out", Pointer), ("out_row", Int64),
        ("starts", Pointer), ("segments", Int64), ("heads", Int64), ("head_dim", Int64),
        ("cosine", Pointer), ("sine", Pointer), ("zeros", Pointer),
        ("work", Pointer), ("work_words", Int64),
        ("scale", Float), ("kind", Int32), ("rotation", Int32), ("threads", Int32),
    )  # fmt: skip


class Norm(ctypes.Structure):
    """`Norm` of elementwise.h."""

    _fields_ = (
        ("x", Pointer), ("out", Pointer), ("weight", Pointer), ("bias", Pointer),
        ("rows", Int64), ("width", Int64),
        ("eps", Float), ("centred", Int32), ("kind", Int32), ("threads", Int32),
    )  # fmt: skip


class Gelu(ctypes.Structure):
    """`Gelu` of elementwise.h."""

    _fields_ = (("x", Pointer), ("count", Int64), ("kind", Int32), ("threads", Int32))


class Turn(ctypes.Structure):
    """`Turn` of elementwise.h."""

    _fields_ = (
        ("x", Pointer), ("cosine", Pointer), ("sine", Pointer),
        ("rows", Int64), ("row", Int64), ("heads", Int64), ("head_dim", Int64),
        ("kind", Int32), ("threads", Int32),
    )  # fmt: skip


class Product(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        ("x", Pointer), ("x_row", Int64), ("weight", Pointer), ("bias", Pointer),
        ("out", Pointer), ("out_row", Int64),
        ("rows", Int64), ("inner", Int64), ("outputs", Int64),
        ("work", Pointer), ("work_words", Int64),
        ("epilogue", Int32), ("kind", Int32), ("threads", Int32),
    )  # fmt: skip


class Int8Product(ctypes.Structure):
    """`Int8Product` of int8.h."""

    _fields_ = (
        ("x", Pointer), ("x_row", Int64), ("weight", Pointer), ("scale", Pointer), ("sums", Pointer),
        ("bias", Pointer), ("out", Pointer),
        ("out_row", Int64), ("rows", Int64), ("inner", Int64), ("outputs", Int64),
        ("work", Pointer), ("work_words", Int64),
        ("epilogue", Int32), ("kind", Int32), ("threads", Int32),
    )  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


_FUNCTIONS = {
    "moonvit_attention": Call,
    "moonvit_norm": Norm,
    "moonvit_gelu_tanh": Gelu,
    "moonvit_turn": Turn,
    "moonvit_product": Product,
    "moonvit_int8_product": Int8Product,
}
"""What each function takes; all give 0 back, or a number that says what was wrong."""

_lock = threading.Lock()
_loaded: Loaded | None = None


def kernels() -> ctypes.CDLL:
    """The library; `RuntimeError` where there is none."""
    loaded = load()
    if loaded.library is None:
        raise RuntimeError(f"no native kernels: {loaded.reason}")
    return loaded.library


def load() -> Loaded:
    """The library, compiled if need be; tried once a process."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _try()
        return _loaded


def _try() -> Loaded:
    if reason := cpu.lacking():
        return Loaded(None, reason)
    try:
        path = build.library()
    except (MoonvitError, OSError) as error:
        return Loaded(None, str(error))
    try:
        library = ctypes.CDLL(str(path))
        for name, structure in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = [ctypes.POINTER(structure)]
            function.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path} is not what was built there, delete it: {error}")
    return Loaded(library, "")
