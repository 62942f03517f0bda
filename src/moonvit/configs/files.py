"""Which of a checkpoint's files hold the rules for pictures and for videos.

Transformers 5 writes all of them into `processor_config.json`, one object each; before, each had a file of
its own. Where both are there, the first counts. A checkpoint without rules for videos takes them by those
for pictures. (Source: `get_image_processor_dict` and `get_video_processor_dict` of transformers 5.24.)
"""

from collections.abc import Callable, Sequence
from typing import Any

from moonvit.errors import ConfigError
from moonvit.fields import Fields

Place = tuple[str, str | None]
"""A file, and the object in it or None for the whole of it."""

PICTURES: tuple[Place, ...] = (
    ("processor_config.json", "image_processor"),
    ("preprocessor_config.json", None),
)
VIDEOS: tuple[Place, ...] = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
)
RULE_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""All files that a checkpoint may keep rules in."""


def find_rules(read: Callable[[str], Any], where: str, places: Sequence[Place]) -> Fields | None:
    """The first of `places` that is there; `read` gives a file's parsed JSON, or None if it is absent."""
    for file, key in places:
        content = read(file)
        if content is None:
            continue
        fields = Fields(content, f"{where}/{file}")
        if key is None:
            return fields
        if fields.values.get(key) is not None:
            return fields.section(key)
    return None


def picture_rules(read: Callable[[str], Any], where: str) -> Fields:
    """The rules for pictures; `ConfigError` where there are none."""
    found = find_rules(read, where, PICTURES)
    if found is None:
        raise ConfigError(
            f"{where}/preprocessor_config.json: no such file",
            "nor is there a processor_config.json with an image_processor",
        )
    return found
