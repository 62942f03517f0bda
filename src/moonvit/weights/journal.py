"""A file filled piece by piece, that can be gone on with after the process was killed.

Beside `name.partial` lies `name.journal`: a line with what is being written, then a line for each piece
whose bytes are in the file: start, length and CRC-32. Pieces are believed only if their bytes still have
that CRC, so that a crash of the whole system loses time and nothing else.
"""

import json
import os
import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

from moonvit.weights.place import sync_directory

Span = tuple[int, int]
"""Bytes [start, stop) of the file."""


class Journal:
    """Writes to `path.partial`; `finish` renames it to `path`.

    Args:
        path: the file to make.
        size: its bytes.
        identity: what it is made of; pieces of an earlier run count only if it was making the same.
    """

    def __init__(self, path: Path, size: int, identity: dict[str, Any]) -> None:
        self.path = path
        self.size = size
        self.partial = path.with_name(path.name + ".partial")
        self._log_path = path.with_name(path.name + ".journal")
        self._title = json.dumps({"size": size, **identity}, sort_keys=True)
        self._lock = threading.Lock()
        self.done: list[Span] = []

    def __enter__(self) -> Self:
        pieces = self._earlier_pieces()
        self._file = self.partial.open("r+b" if pieces else "w+b")
        self._file.truncate(self.size)
        self.done = merged([span for span, crc in pieces if self._holds(span, crc)])
        if not self.done:
            self._log_path.write_text(self._title + "\n")
        self._log = self._log_path.open("a")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._log.close()
            self._file.close()

    def write(self, start: int, data: bytes) -> None:
        """Put a piece into the file and note it; safe from several threads."""
        with self._lock:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], start + done)
            self._log.write(f"{start} {len(data)} {crc32(data)}\n")
            self._log.flush()

    def finish(self) -> None:
        """Make the file durable under its own name."""
        os.fsync(self._file.fileno())
        self.partial.replace(self.path)
        sync_directory(self.path.parent)
        self._log_path.unlink(missing_ok=True)

    def _earlier_pieces(self) -> list[tuple[Span, int]]:
        """What an earlier run noted for the same file; a torn last line is passed over."""
        try:
            title, *lines = self._log_path.read_text(errors="replace").split("\n")
        except OSError:
            return []
        if title != self._title or not self.partial.exists():
            return []
        pieces = []
        for line in lines[:-1]:
            words = line.split()
            if len(words) == 3 and all(re.fullmatch("[0-9]{1,18}", word) for word in words):
                start, length, crc = map(int, words)
                pieces.append(((start, start + length), crc))
        return pieces

    def _holds(self, span: Span, crc: int) -> bool:
        start, stop = span
        return stop <= self.size and crc32(os.pread(self._file.fileno(), stop - start, start)) == crc


def merged(spans: list[Span]) -> list[Span]:
    """The same bytes as few spans in order."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return result


def missing(wanted: Span, done: list[Span]) -> list[Span]:
    """The parts of `wanted` that no span of `done` (merged) covers."""
    start, stop = wanted
    gaps = []
    for left, right in done:
        if right <= start or left >= stop:
            continue
        if left > start:
            gaps.append((start, left))
        start = right
    return [*gaps, (start, stop)] if start < stop else gaps
