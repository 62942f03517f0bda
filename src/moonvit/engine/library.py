"""The package `transformers`, imported when it is used."""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from moonvit.errors import MoonvitError

OLDEST = (5, 24)
"""The oldest version that the tests run with; earlier ones name the arguments of their models otherwise."""


def require_transformers() -> None:
    """`MoonvitError` with what to install, where the package is absent; imports nothing."""
    if find_spec("transformers") is None:
        raise MoonvitError(
            "generating text needs transformers, which is not installed", "pip install 'moonvit[engine]'"
        )


def transformers_module(name: str) -> ModuleType:
    """`transformers.NAME`; `MoonvitError` where the package is absent, too old or has no such module."""
    require_transformers()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    version = str(transformers.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise MoonvitError(
            f"transformers {version} is too old, expected {wanted} or newer", "pip install 'moonvit[engine]'"
        )
    try:
        return import_module(f"transformers.{name}")
    except ImportError as error:
        raise MoonvitError(f"transformers {version} has no {name}: {error}") from error
