"""A conversation as pieces: markers, pads and ordinary text, kept apart until they are ids.

Nothing ever looks for markers inside text, so that text cannot bring one in.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonvit.errors import PromptError
from moonvit.prompt.parts import Image, Kind, Turn, Video


@dataclass(frozen=True)
class Mark:
    """A marker that is one id; an `optional` one is text where the tokenizer does not have it."""

    literal: str
    optional: bool = False


@dataclass(frozen=True)
class Pads:
    """Pads of the `part`-th picture or video; each number is one slot, with nothing between them."""

    kind: Kind
    tokens: tuple[int, ...]
    part: int


Piece = str | Mark | Pads


@dataclass(frozen=True)
class Choices:
    """What a form may be asked for beside the turns; see `PromptFormat.encode`."""

    add_generation_prompt: bool = True
    thinking: bool | None = None
    thinking_effort: str | None = "max"
    tools: Sequence[Mapping[str, Any]] = ()


def as_json(value: Any, **how: Any) -> str:
    """The value as JSON, letters beyond ASCII as they are; `PromptError` for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, **how)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"tools and arguments must be JSON: {error}") from error


def numbered(turns: Iterable[Turn]) -> Iterator[tuple[Turn, list[str | tuple[int, Image | Video]]]]:
    """Each turn with its parts, pictures and videos carrying their number in the conversation."""
    number = 0
    for turn in turns:
        parts: list[str | tuple[int, Image | Video]] = []
        for part in turn.parts:
            if isinstance(part, str):
                parts.append(part)
            else:
                parts.append((number, part))
                number += 1
        yield turn, parts


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same with neighbouring texts made one, as when a whole prompt is tokenized at once."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        text = ""
        yield piece
    if text:
        yield text
