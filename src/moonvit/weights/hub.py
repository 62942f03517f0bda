"""A checkpoint on a hub, read by byte ranges."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonvit.errors import ConfigError, FetchError, OfflineError, WeightsError
from moonvit.lazy import lazy
from moonvit.weights.header import Header, header_size, parse_header
from moonvit.weights.index import Checkpoint, check_name
from moonvit.weights.ranges import RETRIED, TIMEOUT, TRIES, RemoteFile, http_client, pause_before, retry_after
from moonvit.weights.small import SmallFiles

T = TypeVar("T")
UNREACHED = "check the network; for a directory, check the path"


@dataclass
class HubRepo:
    """A model repository.

    Attributes:
        name: "org/name".
        revision: branch, tag or commit; None is the main branch.
        token: a string, True for the saved one, False for none, None for the saved one if there is any.
        cache_dir: for small files; None is huggingface-hub's own.
    """

    name: str
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: Path | None = None

    @lazy
    def commit(self) -> str:
        """The commit that the revision stands for now."""
        sha = str(self._info.sha)
        if not is_commit(sha):
            raise FetchError(self.name, [f"the hub names no commit but {sha[:80]!r}"])
        return sha

    @property
    def files(self) -> list[str]:
        return [str(sibling.rfilename) for sibling in self._info.siblings or []]

    @lazy
    def _info(self) -> Any:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=endpoint(), token=self.token)
        return self.asked(lambda: api.model_info(self.name, revision=self.revision, timeout=TIMEOUT))

    def download(self, file: str, limit: int) -> bytes:
        """A file of at most `limit` bytes at the commit, through huggingface-hub's cache."""
        from huggingface_hub import hf_hub_download

        size = self.open(file)[0].size
        if size > limit:
            raise WeightsError(f"{self.name}/{file}", [f"{size} bytes, the limit is {limit}"])
        path = self.asked(
            lambda: hf_hub_download(
                self.name,
                file,
                revision=self.commit,
                token=self.token,
                endpoint=endpoint(),
                cache_dir=self.cache_dir,
            ),
            file,
        )
        return Path(path).read_bytes()

    def open(self, file: str) -> tuple[RemoteFile, str]:
        """A file at the commit for reading by ranges, and its ETag on the hub."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.name, file, revision=self.commit, endpoint=endpoint())
        found = self.asked(lambda: get_hf_file_metadata(url, token=self.token, retry_on_errors=True), file)
        if found.size is None:
            raise WeightsError(file, ["the hub does not say how large it is"])
        headers = build_hf_headers(token=self.token, library_name="moonvit")
        return RemoteFile(file, url, found.size, headers), found.etag or ""

    def asked(self, question: Callable[[], T], file: str = "") -> T:
        """The answer of huggingface-hub, its errors as one line of ours."""
        from huggingface_hub import errors

        where = f"{self.name}/{file}" if file else self.name
        revision = self.revision or "main"
        try:
            return patiently(question)
        except errors.GatedRepoError as error:
            hint = "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
            raise WeightsError(where, ["access is gated"], hint) from error
        except errors.RevisionNotFoundError as error:
            raise WeightsError(where, [f"no revision {revision!r}"]) from error
        except errors.RepositoryNotFoundError as error:
            hint = "check the name; a private one needs `hf auth login` or HF_TOKEN"
            fault = "no such directory here, no such repository on the hub"
            raise WeightsError(where, [fault], hint) from error
        except errors.LocalEntryNotFoundError as error:
            raise OfflineError(where, ["the hub cannot be reached"], UNREACHED) from error
        except errors.EntryNotFoundError as error:
            raise WeightsError(where, ["no such file"]) from error
        except errors.OfflineModeIsEnabled as error:
            hint = "unset HF_HUB_OFFLINE to ask the hub; for a directory, check the path"
            raise OfflineError(where, ["offline mode is set"], hint) from error
        except errors.HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == 401:
                hint = "log in with `hf auth login` or set a valid HF_TOKEN"
                raise WeightsError(where, ["the hub refused the token"], hint) from error
            fault = f"the hub answered: {str(error).splitlines()[0]}"
            busy = error.response is not None and error.response.status_code in RETRIED
            raise (OfflineError if busy else FetchError)(where, [fault]) from error
        except errors.HFValidationError as error:
            raise WeightsError(where, ["no such directory, and not a repository name"]) from error
        except http_client()[1].TransportError as error:
            reason = f"the hub cannot be reached: {type(error).__name__}"
            raise OfflineError(where, [reason], UNREACHED) from error
        except http_client()[1].HTTPError as error:
            raise FetchError(where, [str(error).splitlines()[0]]) from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            fault = f"the hub's answer is malformed ({type(error).__name__})"
            raise FetchError(where, [fault], f"it was asked at {endpoint()}") from error


def patiently(question: Callable[[], T]) -> T:
    """The answer of a busy hub, asked again after a pause; other errors pass through."""
    from huggingface_hub import errors

    for attempt in range(1, TRIES):
        try:
            return question()
        except errors.HfHubHTTPError as error:
            if error.response is None or error.response.status_code not in RETRIED:
                raise
            told = retry_after(error.response.headers.get("Retry-After"))
            time.sleep(pause_before(attempt, told))
    return question()


def is_commit(text: str) -> bool:
    """Whether it is a whole commit hash, and so safe as a file name."""
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) is not None


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT as it is now, or huggingface-hub's own."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


class RepoFiles(SmallFiles):
    """The small files of a repository, which need hold no weights; each is fetched as it is asked for."""

    def __init__(self, repo: HubRepo) -> None:
        self.repo = repo
        self.where = repo.name

    def file_names(self) -> list[str]:
        return self.repo.files

    def small_file(self, name: str, limit: int) -> bytes:
        """A whole file; `ConfigError` if it is absent or larger than `limit` bytes."""
        try:
            return self.repo.download(name, limit)
        except FetchError:
            raise
        except WeightsError as error:
            raise ConfigError(f"{self.where}/{name}: {error.faults[0]}", error.hint) from error


class HubCheckpoint(RepoFiles, Checkpoint):
    """The vision half of a repository; headers and tensors are read by byte ranges as they are asked for."""

    def __init__(self, repo: HubRepo) -> None:
        super().__init__(repo)
        self.remote: dict[str, tuple[RemoteFile, str]] = {}
        self.scan()

    def header(self, shard: str) -> Header:
        file = self.file(shard)
        if file.size < 8:
            return parse_header(b"", header_size(b"", file.size, shard), shard)
        size = header_size(file.read(0, 8), file.size, shard)
        return parse_header(file.read(8, 8 + size), file.size, shard)

    def data(self, shard: str, start: int, stop: int) -> NDArray[np.uint8]:
        return np.frombuffer(bytearray(self.file(shard).read(start, stop)), np.uint8)

    def file(self, shard: str) -> RemoteFile:
        """The shard as a remote file; asked for once."""
        if shard not in self.remote:
            check_name(shard)
            self.remote[shard] = self.repo.open(shard)
        return self.remote[shard][0]
