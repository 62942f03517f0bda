"""The small files of a checkpoint: its configs, its rules for pictures and videos, its tokenizer."""

from collections.abc import Mapping
from typing import Any

from moonvit.configs.files import RULE_FILES, VIDEOS, find_rules, picture_rules
from moonvit.fields import JSON_LIMIT, Fields, parse_json
from moonvit.lazy import lazy


class SmallFiles:
    """What can be known of a checkpoint without its tensors, wherever its files lie.

    Attributes:
        where: what to call it in errors.
    """

    where: str

    # What a kind of place provides:

    def file_names(self) -> list[str]:
        """Names of all files, relative to the checkpoint."""
        raise NotImplementedError

    def small_file(self, name: str, limit: int) -> bytes:
        """A whole small file; `ConfigError` if it is absent or larger than `limit` bytes."""
        raise NotImplementedError

    # What follows from it:

    @lazy
    def config(self) -> Mapping[str, Any]:
        return self._json("config.json")

    @lazy
    def picture_rules(self) -> Fields:
        """How pictures become pixels, from whichever file has it; see `moonvit.configs.files`."""
        return picture_rules(self._json_if_there, self.where)

    @lazy
    def video_rules(self) -> Fields | None:
        """The same for videos; None where the checkpoint has no rules of their own."""
        return find_rules(self._json_if_there, self.where, VIDEOS)

    @property
    def preprocessor(self) -> Mapping[str, Any]:
        return self.picture_rules.values

    def json_files(self) -> dict[str, bytes]:
        """The configuration files by name; `ConfigError` without rules for pictures."""
        assert self.picture_rules
        there = self.file_names()
        wanted = ["config.json", *(name for name in RULE_FILES if name in there)]
        return {name: self.small_file(name, JSON_LIMIT) for name in wanted}

    def _json_if_there(self, name: str) -> Any:
        return self._json(name) if name in self.file_names() else None

    def _json(self, name: str) -> Mapping[str, Any]:
        where = f"{self.where}/{name}"
        return Fields(parse_json(self.small_file(name, JSON_LIMIT), where), where).values
