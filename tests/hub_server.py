"""A hub on loopback: the routes that huggingface-hub asks for, byte ranges, and misbehaviour by switch."""

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Faults:
    """Switches; the default is a well-behaved server. Those on ranges touch *.safetensors only."""

    ignore_range: bool = False
    """Answer a range with 200 and the whole file."""
    short_by: int = 0
    """Close the connection that many bytes before the end of a range, `times` times."""
    drop_at: int | None = None
    """Close the connection when this byte of the file is reached, `times` times."""
    status: int | None = None
    """Answer ranges with this status, `times` times."""
    times: int = 1_000_000
    """How often short_by, drop_at and status strike."""
    api_status: int | None = None
    """Answer questions about a repository with this status, `times` times."""
    silent_after: int | None = None
    """Stop sending a range of 2,000 bytes or more after that many bytes, and keep the connection open."""
    lie_by: int = 0
    """Shift the Content-Range told, not the bytes."""
    lie_total: int = 0
    """Add to the file's size told in Content-Range."""
    etag_after: int | None = None
    """After that many ranges the ETag is another."""
    redirect_to: str | None = None
    """Send readers of *.safetensors to this server."""
    loop: bool = False
    """Redirect to itself for ever."""
    token: str | None = None
    """Refuse requests without this token."""
    bandwidth: float | None = None
    """Bytes a second of each connection."""


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None
    sent: int = 0


@dataclass
class HubServer:
    """Serves `repos`, {"org/name": {file name: path}}, until the `with` block ends."""

    repos: dict[str, dict[str, Path]]
    faults: Faults = field(default_factory=Faults)
    host: str = "127.0.0.1"
    commit: str | None = COMMIT
    revisions: tuple[str, ...] = ("main", COMMIT)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._lock = threading.Lock()
        self._struck = 0
        self._ranges: Counter[str] = Counter()
        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{self.host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent(self, ending: str = "") -> int:
        """Body bytes sent of files whose path ends so."""
        return sum(r.sent for r in self.requests if r.path.endswith(ending))

    def strikes(self) -> bool:
        """Whether a fault that is counted happens now."""
        with self._lock:
            self._struck += 1
            return self._struck <= self.faults.times


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub = self.server_hub
        path = unquote(self.path.split("?")[0])
        self.record = Request(
            self.command, path, self.headers.get("Range"), self.headers.get("Authorization")
        )
        hub.requests.append(self.record)
        if hub.faults.token and self.record.authorization != f"Bearer {hub.faults.token}":
            return self.refuse(401, "GatedRepo" if "resolve" in path else "RepoNotFound")
        if path.startswith("/api/models/"):
            return self.info(path.removeprefix("/api/models/"))
        org, name, verb, revision, *rest = [*path.lstrip("/").split("/"), *[""] * 4]
        files = hub.repos.get(f"{org}/{name}")
        if files is None or verb != "resolve":
            return self.refuse(404, "RepoNotFound")
        if revision not in hub.revisions:
            return self.refuse(404, "RevisionNotFound")
        file = "/".join(part for part in rest if part)
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        return self.file(path, file, files[file], body)

    def info(self, rest: str) -> None:
        hub = self.server_hub
        if hub.faults.api_status and hub.strikes():
            return self.head(hub.faults.api_status, {"Content-Length": "0"})
        org, name, *more = rest.split("/")
        files = hub.repos.get(f"{org}/{name}")
        if files is None:
            return self.refuse(404, "RepoNotFound")
        if more and more[-1] not in hub.revisions:
            return self.refuse(404, "RevisionNotFound")
        siblings = [{"rfilename": file} for file in files]
        answer: Any = {"id": f"{org}/{name}", "sha": self.server_hub.commit, "siblings": siblings}
        if more and more[0] == "tree":
            sizes = {file: source.stat().st_size for file, source in files.items()}
            answer = [
                {"type": "file", "path": file, "size": size, "oid": f"{size:040x}"}
                for file, size in sizes.items()
            ]
        data = json.dumps(answer).encode()
        self.head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.send(data)
        return None

    def file(self, path: str, name: str, source: Path, body: bool) -> None:
        faults = self.server_hub.faults
        size = source.stat().st_size
        etag = f'"{name}-{size}"'
        big = name.endswith(".safetensors")
        common = {"X-Repo-Commit": COMMIT, "ETag": etag, "Accept-Ranges": "bytes"}
        if big and (faults.redirect_to or faults.loop):
            target = self.server_hub.url if faults.loop else faults.redirect_to
            linked = {"X-Linked-Size": str(size), "X-Linked-ETag": etag}
            return self.head(302, common | linked | {"Location": f"{target}{path}", "Content-Length": "0"})
        if not body or self.record.range is None or not big or faults.ignore_range:
            self.head(200, common | {"Content-Length": str(size)})
            return self.copy(source, 0, size) if body else None
        return self.range(source, size, common, name)

    def range(self, source: Path, size: int, common: dict[str, str], name: str) -> None:
        hub, faults = self.server_hub, self.server_hub.faults
        start, stop = self.record.range.removeprefix("bytes=").split("-")
        first, last = int(start), min(int(stop), size - 1)
        hub._ranges[name] += 1
        if faults.etag_after is not None and hub._ranges[name] > faults.etag_after:
            common = common | {"ETag": '"another"'}
        if faults.status and hub.strikes():
            return self.head(faults.status, {"Content-Length": "0", "Retry-After": "0"})
        told = f"bytes {first + faults.lie_by}-{last + faults.lie_by}/{size + faults.lie_total}"
        self.head(206, common | {"Content-Range": told, "Content-Length": str(last + 1 - first)})
        end = last + 1
        if faults.short_by and hub.strikes():
            end = max(first, end - faults.short_by)
        if faults.drop_at is not None and first <= faults.drop_at < end and hub.strikes():
            end = faults.drop_at
        if faults.silent_after is not None and end - first >= 2000:
            self.copy(source, first, first + faults.silent_after)
            time.sleep(30)
            return None
        self.copy(source, first, end)
        if end != last + 1:
            self.close_connection = True
        return None

    def copy(self, source: Path, start: int, stop: int) -> None:
        bandwidth = self.server_hub.faults.bandwidth
        step = 2**16 if bandwidth is None else 2**12
        with source.open("rb") as file:
            file.seek(start)
            while start < stop and (data := file.read(min(step, stop - start))):
                if not self.send(data):
                    return
                start += len(data)
                if bandwidth:
                    time.sleep(len(data) / bandwidth)

    def send(self, data: bytes) -> bool:
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
            return False
        self.record.sent += len(data)
        return True

    def refuse(self, status: int, code: str) -> None:
        self.head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
