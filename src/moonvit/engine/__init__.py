"""From pictures and words to text: our towers in front of the text models of `transformers`.

Needs the extra `engine`: pip install 'moonvit[engine]'. Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonvit.engine.chat import Chat
    from moonvit.engine.generator import Generator
    from moonvit.engine.media import Clip, Look, Media
    from moonvit.engine.reply import Reply
    from moonvit.engine.sampling import Sampling

_HOMES = {
    "Chat": "moonvit.engine.chat",
    "Clip": "moonvit.engine.media",
    "Generator": "moonvit.engine.generator",
    "Look": "moonvit.engine.media",
    "Media": "moonvit.engine.media",
    "Reply": "moonvit.engine.reply",
    "Sampling": "moonvit.engine.sampling",
}

__all__ = ["Chat", "Clip", "Generator", "Look", "Media", "Reply", "Sampling"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonvit.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
