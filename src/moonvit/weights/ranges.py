"""Byte ranges of one remote file, of which nothing is believed.

Each response must be the very range asked for, of a file of the same size and ETag as before; short ones
are taken up where they ended, after a pause. A bearer token goes to the host it is for and to no other.
"""

import importlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

from moonvit.errors import FetchError

TRIES = 6
"""Attempts in a row that bring less than `PROGRESS` before giving up."""

PROGRESS = 64 * 1024
"""Bytes that make an attempt count as one that went on."""

SLOWEST = 1024
"""Bytes a second below which a connection is given up after a minute."""

TIMEOUT = 30.0
"""Seconds without an answer or a byte."""

_REDIRECTS = 8
_PAUSE_LIMIT = 30.0
RETRIED = (408, 429, 500, 502, 503, 504)

log = logging.getLogger("moonvit")


class InterruptedAnswerError(Exception):
    """The connection failed or ended early; worth another try."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class StoppedError(Exception):
    """Another connection failed, or the user interrupted."""


@dataclass
class RemoteFile:
    """A file at a URL.

    Attributes:
        name: for errors.
        url: on the hub; it may lead elsewhere.
        size: bytes, as the hub says.
        headers: for the hub's host only, such as the authorization.
        etag: of the place that serves the bytes, learnt from its first answer.
        moved: bytes received, all told.
        stopped: set it, and reading ends with `StoppedError` within the next piece or pause.
    """

    name: str
    url: str
    size: int
    headers: Mapping[str, str]
    etag: str | None = None
    moved: int = 0
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        data = bytearray()
        self.stream(start, stop, data.extend)
        return bytes(data)

    def stream(self, start: int, stop: int, sink: Callable[[bytes], object]) -> None:
        """Hand bytes [start, stop) to `sink` in order, in pieces as they come.

        `FetchError` when the file is not what it was, the server does not speak ranges, or nothing more
        comes after several tries.
        """
        if not 0 <= start <= stop <= self.size:
            raise FetchError(self.name, [f"bytes {start} to {stop} are not in a file of {self.size}"])
        failures = 0
        while start < stop:
            if self.stopped.is_set():
                raise StoppedError
            before = start
            try:
                for piece in self._answer(start, stop):
                    sink(piece)
                    start += len(piece)
                if start < stop:
                    raise InterruptedAnswerError("the answer ended early")
            except InterruptedAnswerError as error:
                failures = 1 if start - before >= PROGRESS else failures + 1
                if failures >= TRIES:
                    raise FetchError(
                        self.name, [f"gave up at byte {start}: {error}"], "run it again to go on from there"
                    ) from error
                self._pause(error, failures)

    def _pause(self, error: InterruptedAnswerError, failures: int) -> None:
        pause = pause_before(failures, error.pause)
        log.info("%s: %s; once more in %.1f s", self.name, error, pause)
        self.stopped.wait(pause)

    def _answer(self, start: int, stop: int) -> Any:
        """The pieces of one response, checked; `InterruptedAnswerError` where another try may help."""
        session, library = http_client()
        try:
            with self._request(session, library, start, stop) as response:
                self._check(response, start, stop)
                wanted = stop - start
                began = time.monotonic()
                for piece in response.iter_raw():
                    if self.stopped.is_set():
                        raise StoppedError
                    seconds = time.monotonic() - began
                    if seconds > 60 and stop - start - wanted < SLOWEST * seconds:
                        raise InterruptedAnswerError("less than a kilobyte a second")
                    piece = piece[:wanted]
                    wanted -= len(piece)
                    with self._lock:
                        self.moved += len(piece)
                    if piece:
                        yield piece
                    if not wanted:
                        return
        except library.TransportError as error:
            raise InterruptedAnswerError(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def _request(self, session: Any, library: Any, start: int, stop: int) -> Any:
        """An open response for the range, redirects followed without the token leaving its host."""
        url = self.url
        ours = urlsplit(self.url)[:2]
        span = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        for _ in range(_REDIRECTS):
            headers = {**(self.headers if urlsplit(url)[:2] == ours else {}), **span}
            try:
                request = session.build_request("GET", url, headers=headers, timeout=TIMEOUT)
            except library.InvalidURL as error:
                raise FetchError(self.name, ["redirected to a malformed address"]) from error
            if urlsplit(url)[:2] != ours:
                request.headers.pop("authorization", None)
            response = session.send(request, stream=True, follow_redirects=False)
            target = response.headers.get("Location")
            if response.status_code == 403 and url != self.url:
                response.close()
                raise InterruptedAnswerError("the signed link was refused")
            if response.status_code not in (301, 302, 303, 307, 308) or not target:
                return _Closing(response)
            response.close()
            url = self._redirected(url, target)
        raise FetchError(self.name, [f"more than {_REDIRECTS} redirects"])

    def _redirected(self, url: str, target: str) -> str:
        """The address that a redirect leads to; from HTTPS to nothing less."""
        try:
            url = urljoin(url, target)
            scheme = urlsplit(url).scheme
        except ValueError as error:
            raise FetchError(self.name, ["redirected to a malformed address"]) from error
        if scheme not in ("http", "https") or (scheme == "http" and self.url.startswith("https:")):
            raise FetchError(self.name, [f"refused a redirect to {url.split('?')[0]}"])
        return url

    def _check(self, response: Any, start: int, stop: int) -> None:
        status = response.status_code
        if status in RETRIED:
            raise InterruptedAnswerError(f"status {status}", retry_after(response.headers.get("Retry-After")))
        if status == 200:
            raise FetchError(
                self.name,
                [f"the server ignores byte ranges and would send all {self.size} bytes"],
                "download the checkpoint by other means and give its directory",
            )
        if status != 206:
            raise FetchError(self.name, [f"status {status} for bytes {start} to {stop}"])
        found = response.headers.get("Content-Range", "")
        if (match := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", found.strip())) is None:
            raise FetchError(self.name, [f"malformed Content-Range {found[:60]!r}"])
        first, last, total = match.groups()
        if total not in ("*", str(self.size)):
            raise FetchError(self.name, [f"changed while being read: {self.size} bytes, now {total}"])
        if (int(first), int(last)) != (start, stop - 1):
            raise FetchError(
                self.name, [f"asked for bytes {start} to {stop - 1}, the answer is {first} to {last}"]
            )
        if response.headers.get("Content-Type", "").startswith("multipart/"):
            raise FetchError(self.name, ["the server answers one byte range in several parts"])
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise FetchError(self.name, ["the server compresses byte ranges"])
        self._check_etag(response.headers.get("ETag"))

    def _check_etag(self, etag: str | None) -> None:
        if etag is None:
            return
        etag = etag.removeprefix("W/")
        with self._lock:
            self.etag = first = self.etag or etag
        if etag != first:
            fault = f"changed while being read: ETag {first[:80]}, now {etag[:80]}"
            raise FetchError(self.name, [fault], "run it again")


class _Closing:
    """A response as a context manager."""

    def __init__(self, response: Any) -> None:
        self.response = response

    def __enter__(self) -> Any:
        return self.response

    def __exit__(self, *_: object) -> None:
        self.response.close()


def http_client() -> tuple[Any, Any]:
    """huggingface-hub's shared client, with the user's proxies and transport, and the library it is of.

    The client is httpx's in huggingface-hub 1, httpx2's in 2; both name their errors alike.
    """
    from huggingface_hub import get_session

    session = get_session()
    modules = [kind.__module__.partition(".")[0] for kind in type(session).__mro__]
    return session, importlib.import_module(next(m for m in modules if m.startswith("httpx")))


def pause_before(attempt: int, told: float | None) -> float:
    """Seconds to wait before that attempt: what the server told, or longer each time."""
    pause = told if told is not None else 0.25 * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
    return min(pause, _PAUSE_LIMIT)


def retry_after(value: str | None) -> float | None:
    return float(value) if value is not None and re.fullmatch(r"[0-9]{1,6}", value) else None
