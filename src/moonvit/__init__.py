"""moonvit: the vision encoder of Kimi K3 and K3.1 as a small, exact package.

Names are imported on first use, so that `import moonvit` is quick and touches nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moonvit._version import __version__

if TYPE_CHECKING:
    from moonvit.config import PixelConfig, VisionConfig
    from moonvit.encoder import Encoder
    from moonvit.errors import (
        ConfigError,
        ImageError,
        MoonvitError,
        NumericsError,
        PromptError,
        TokenizerError,
        WeightsError,
    )
    from moonvit.pixels.decode import Limits

_HOMES = {
    "Encoder": "moonvit.encoder",
    "PixelConfig": "moonvit.config",
    "VisionConfig": "moonvit.config",
    "Limits": "moonvit.pixels.decode",
    "ConfigError": "moonvit.errors",
    "ImageError": "moonvit.errors",
    "MoonvitError": "moonvit.errors",
    "NumericsError": "moonvit.errors",
    "PromptError": "moonvit.errors",
    "TokenizerError": "moonvit.errors",
    "WeightsError": "moonvit.errors",
}

__all__ = [
    "ConfigError",
    "Encoder",
    "ImageError",
    "Limits",
    "MoonvitError",
    "NumericsError",
    "PixelConfig",
    "PromptError",
    "TokenizerError",
    "VisionConfig",
    "WeightsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonvit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
