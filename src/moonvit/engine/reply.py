"""What comes back: text as it is written, and the whole when it is done."""

from collections.abc import Generator as Pieces
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from moonvit.errors import MoonvitError

Finish = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Reply:
    """A reply of the model.

    Attributes:
        text: without the marker or the text at which it ended.
        ids: all tokens chosen, the end marker among them.
        prompt_tokens: of the whole conversation before.
        computed_tokens: those of them that went through the text model now.
        finish: "end" by the model's own marker, "stop" by a text of `Sampling.stop`, or "length".
        seconds: by stage: "pictures" (reading and tower), "weights" (of the text model), "prefill" (up to
            the first token), "decode" (all others).
    """

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    finish: Finish
    seconds: dict[str, float] = field(default_factory=dict)


class Stream(Iterator[str]):
    """Pieces of a reply as they come; `reply` is there when the last one has."""

    def __init__(self, pieces: Pieces[str, None, Reply]) -> None:
        self._pieces = pieces
        self._reply: Reply | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._reply = self._reply or end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stop writing."""
        self._pieces.close()

    @property
    def reply(self) -> Reply:
        """The whole reply; reads the rest of the stream if need be.

        `MoonvitError` for a stream that was closed or failed before its end.
        """
        if self._reply is None:
            for _ in self:
                pass
        if self._reply is None:
            raise MoonvitError("no reply: the stream was closed, or failed, before its end")
        return self._reply
