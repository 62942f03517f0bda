"""Tokens into text as they come: no half characters, no text that a stop may still take back."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for bytes that are no character, or not yet one."""


class TextStream:
    """Takes ids one by one and gives the text that is certain.

    Args:
        decode: ids to text; bytes that are not yet a character come out as one U+FFFD at the end.
        stop: texts at which the reply ends; `stopped` says that one was met.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode = decode
        self.stop = stop
        self.stopped = False
        self._ids: list[int] = []
        self._taken = 0
        self._held = ""

    def push(self, token: int) -> str:
        """What is certain of the text after one more token."""
        self._ids.append(token)
        text = self.decode(self._ids)
        certain = text[:-1] if text.endswith(UNFINISHED) else text
        fresh = certain[self._taken :]
        self._taken = len(certain)
        if certain == text:
            self._ids, self._taken = [], 0
        return self._released(fresh)

    def finish(self) -> str:
        """The rest, when no token follows."""
        fresh = self.decode(self._ids)[self._taken :] if self._ids else ""
        out = self._released(fresh)
        if not self.stopped:
            out, self._held = out + self._held, ""
        return out

    def _released(self, fresh: str) -> str:
        """Text up to a stop, or up to where one may begin."""
        if self.stopped:
            return ""
        text = self._held + fresh
        met = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if met:
            self.stopped, self._held = True, ""
            return text[: min(met)]
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
