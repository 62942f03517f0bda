"""What a prompt is made of, and what comes of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moonvit.errors import PromptError

Kind = Literal["image", "video"]
Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Image:
    """A picture's place in a prompt.

    Attributes:
        size: (width, height) in pixels before resizing, upright; K3's prompts name it.
        tokens: rows of its embeddings.
    """

    size: tuple[int, int]
    tokens: int

    def __post_init__(self) -> None:
        if len(self.size) != 2 or not all(type(side) is int and side > 0 for side in self.size):
            raise PromptError(f"size is {self.size}, expected width and height in pixels")
        _check_tokens(self.tokens)


@dataclass(frozen=True)
class Chunk:
    """One chunk of a video: its time as the family's prompts write it, and the rows of its embeddings."""

    timestamp: str
    tokens: int

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)


@dataclass(frozen=True)
class Video:
    """A video's place in a prompt; each chunk is one slot."""

    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if not self.chunks:
            raise PromptError("a video without chunks")


Part = str | Image | Video


@dataclass(frozen=True)
class ToolCall:
    """What an assistant's turn called: `arguments` by name, or text that is not a JSON object."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, Mapping | str):
            raise PromptError(
                f"arguments of a tool call are {type(self.arguments).__name__}, not by name or text"
            )


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        role: who speaks.
        parts: text, pictures and videos in order. Text is text whatever it looks like: a marker typed in
            it, such as `<|media_pad|>`, is never one.
        name: of the speaker, where the family's form has room for one; of the tool in a tool's turn.
        reasoning: an assistant's thoughts, apart from its answer.
        tool_calls: an assistant's.
        tool_call_id: in a tool's turn, the call that it answers.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"role is {self.role!r}, expected one of {', '.join(ROLES)}")
        if isinstance(self.parts, str) or not all(isinstance(p, str | Image | Video) for p in self.parts):
            raise PromptError("parts of a turn are text, Image and Video, in a tuple")
        if self.role != "assistant" and (self.tool_calls or self.reasoning):
            raise PromptError(f"only an assistant's turn has tool_calls and reasoning, not a {self.role}'s")


@dataclass(frozen=True)
class Slot:
    """One run of pads in a prompt's ids, `ids[start : start + length]`.

    Slots are one to one, in order, with the embeddings of `Encoder.encode` and the chunks of
    `Encoder.encode_video`. `part` counts the pictures and videos of the prompt from 0; the chunks of one
    video share it.
    """

    start: int
    length: int
    kind: Kind
    part: int


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids with its slots, and as text with one pad a slot (Qwen2: one a video)."""

    ids: tuple[int, ...]
    slots: tuple[Slot, ...]
    text: str


def media(turns: Sequence[Turn]) -> list[Image | Video]:
    """The pictures and videos of a conversation in order."""
    return [part for turn in turns for part in turn.parts if not isinstance(part, str)]


def check_turns(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The turns, or `PromptError` for anything else."""
    listed = tuple(turns) if isinstance(turns, Iterable) else (turns,)
    if not all(isinstance(turn, Turn) for turn in listed):
        raise PromptError("a conversation is a sequence of Turn")
    return listed


def _check_tokens(tokens: int) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise PromptError(f"tokens is {tokens!r}, expected a whole number of at least 1")
