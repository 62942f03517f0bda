"""Strict reading of single fields out of a checkpoint's JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonvit.errors import ConfigError

JSON_LIMIT = 16 * 2**20
"""No configuration file is larger than this many bytes."""


class Fields:
    """One JSON object whose fields are asked for by name and checked.

    Args:
        values: the object.
        where: what to call it in errors, such as `config.json: vision_config`.

    Every method raises `ConfigError`, naming field, value and file, for a missing or nonsensical value.
    """

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected an object, found {shown(values)}")
        self.values: Mapping[str, Any] = values
        self.where = where

    def raw(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(
                f"{self.where}: field '{name}' is missing", "its value changes the result, so none is assumed"
            )
        return self.values[name]

    def section(self, name: str) -> "Fields":
        return Fields(self.raw(name), f"{self.where}: {name}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(name, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, above: float, high: float) -> float:
        return self._number(name, self.raw(name), above, high)

    def numbers(self, name: str, count: int, above: float, high: float) -> tuple[float, ...]:
        value = self.raw(name)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != count:
            self._refuse(name, value, f"a list of {count} numbers")
        return tuple(self._number(name, item, above, high) for item in value)

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return bool(value)

    def choice(self, name: str, *allowed: str | float | bool | None) -> Any:
        value = self.raw(name)
        if value not in allowed:
            self._refuse(name, value, " or ".join(json.dumps(a) for a in allowed))
        return value

    def square(self, name: str, low: int, high: int) -> int:
        """A side given as `2` or as two equal sides, `[2, 2]`."""
        value = self.raw(name)
        sides = value if isinstance(value, list) and len(value) == 2 else [value, value]
        if sides[0] != sides[1]:
            self._refuse(name, value, "two equal sides")
        return Fields({name: sides[0]}, self.where).integer(name, low, high)

    def _number(self, name: str, value: Any, above: float, high: float) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not good or not above < value <= high:
            self._refuse(name, value, f"a number above {above:g} and at most {high:g}")
        return float(value)

    def _refuse(self, name: str, value: object, expected: str) -> None:
        raise ConfigError(f"{self.where}: field '{name}' is {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    """`value` as JSON-like text, cut to a length that fits into one line."""
    text = value if isinstance(value, str) else repr(value)
    text = json.dumps(value) if isinstance(value, str) else text
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path) -> Any:
    """The parsed JSON file; `ConfigError` for an absent, oversized or malformed one."""
    return parse_json(read_bytes(path, JSON_LIMIT), str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes; `ConfigError` for an absent or larger one."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes")
    return data


def parse_json(data: bytes, where: str) -> Any:
    """Parsed JSON in which no object names a key twice."""
    try:
        return json.loads(data, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not valid JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        doubled = sorted(name[:200] for name, count in counts.items() if count > 1)
        raise ConfigError(f"{where}: named twice: {', '.join(doubled[:8])}")
    return result
