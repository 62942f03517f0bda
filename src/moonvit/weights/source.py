"""Where a model's files come from: a directory, a mmproj file, the cache, or a hub."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moonvit.configs.files import RULE_FILES
from moonvit.errors import MoonvitError, OfflineError, WeightsError
from moonvit.fields import JSON_LIMIT, Fields, parse_json, read_bytes
from moonvit.lazy import lazy
from moonvit.places import cache_root
from moonvit.weights.checkpoint import LocalCheckpoint, directory_file
from moonvit.weights.gguf import SUFFIX, GgufCheckpoint, is_gguf
from moonvit.weights.hub import HubCheckpoint, HubRepo, is_commit, repo_file
from moonvit.weights.index import Checkpoint
from moonvit.weights.place import beside

log = logging.getLogger("moonvit")

Reporter = Callable[[HubCheckpoint], Callable[[int], object]]
"""Given a checkpoint that is about to be fetched, what to call with the bytes that come."""


def find_checkpoint(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    report: Reporter | None = None,
) -> Path:
    """The directory or mmproj file of a checkpoint, or the vision half of a repository, fetched if need be.

    The cache keeps one directory a commit and remembers which commit a revision last stood for, so that
    it is found again offline. `WeightsError` where there is none.
    """
    path = local_path(path_or_repo)
    if path is not None:
        return path
    name = str(path_or_repo)
    root = cache_root(cache_dir)
    place = root / ("models--" + name.replace("/", "--"))
    cached = _cached(place, revision)
    if local_files_only and cached is None:
        raise OfflineError(name, ["not in the cache"], "allow the network, or run moonvit fetch first")
    if cached is not None and (local_files_only or is_commit(revision or "")):
        return cached
    repo = HubRepo(name, revision, token, root / "hub" if cache_dir else None)
    try:
        commit = repo.commit
    except OfflineError as error:
        if cached is None:
            raise
        log.warning("%s; using the cached %s", error, cached)
        return cached
    target = place / commit
    if not is_complete(target):
        fetch_to(repo, target, report)
    _remember(place, revision or "main", commit)
    return target


def fetch_to(repo: HubRepo, target: Path, report: Reporter | None = None) -> None:
    """Fetch the vision half of a repository into `target`, one process at a time."""
    from filelock import FileLock

    from moonvit.weights.fetch import fetch, free_space

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if is_complete(target):
            return
        if target.is_dir():
            log.warning("%s: damaged, fetched again", target)
            shutil.rmtree(target)
        checkpoint = HubCheckpoint(repo)
        free_space(target, checkpoint.nbytes)
        fetch(checkpoint, target, report(checkpoint) if report else None)


def small_files(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> dict[str, bytes]:
    """The configs of a checkpoint that are there; of a repository, no tensor and no header is fetched."""
    path = local_path(path_or_repo)
    name = str(path_or_repo)
    if path is None and (cached := _cached(cache_root() / ("models--" + name.replace("/", "--")), revision)):
        path = cached
    if path is not None and path.is_file():
        return GgufCheckpoint(path).json_files()
    wanted = ("config.json", *RULE_FILES)
    if path is not None:
        return {file: read_bytes(path / file, JSON_LIMIT) for file in wanted if (path / file).exists()}
    repo = HubRepo(name, revision, None)
    return {file: repo.download(file, JSON_LIMIT) for file in wanted if file in repo.files}


class ConfigFiles:
    """The small files of a directory or repository that need hold no weights: configs and tokenizer."""

    def __init__(self, path_or_repo: str | os.PathLike[str], revision: str | None = None) -> None:
        self.where = os.fspath(path_or_repo)
        self._directory = local_path(path_or_repo)
        if self._directory is not None and self._directory.is_file():
            raise WeightsError(
                self.where, ["a mmproj file holds no tokenizer"], "give the directory of a checkpoint"
            )
        if self._directory is not None and self._directory.is_file():
            fault = "is a mmproj file, which has no tokenizer"
            raise WeightsError(self.where, [fault], "give the directory of the checkpoint")
        self._repo = HubRepo(self.where, revision)

    def file_names(self) -> list[str]:
        if self._directory is None:
            return self._repo.files
        return sorted(path.name for path in self._directory.iterdir())

    def small_file(self, name: str, limit: int) -> bytes:
        """A whole file; `ConfigError` if it is absent or larger than `limit` bytes."""
        if self._directory is None:
            return repo_file(self._repo, name, limit)
        return directory_file(self._directory, name, limit)

    @lazy
    def config(self) -> Mapping[str, Any]:
        where = f"{self.where}/config.json"
        return Fields(parse_json(self.small_file("config.json", JSON_LIMIT), where), where).values


def open_checkpoint(
    path_or_repo: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None
) -> Checkpoint:
    """The checkpoint where it lies, nothing fetched: headers and tensors are read as they are asked for."""
    path = local_path(path_or_repo)
    if path is not None:
        return local_checkpoint(path)
    return HubCheckpoint(HubRepo(str(path_or_repo), revision, token))


def local_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory or in a mmproj file."""
    return GgufCheckpoint(path) if path.is_file() else LocalCheckpoint(path)


def local_path(path_or_repo: str | os.PathLike[str]) -> Path | None:
    """The directory or mmproj file, or None for what can only be a repository; else `WeightsError`."""
    name = os.fspath(path_or_repo)
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~nobody
        path = Path(name)
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise WeightsError(name, ["is a file"], "give the directory it lies in")
    if path.suffix.lower() == SUFFIX:
        raise WeightsError(name, ["no such file"])
    if not _is_repo_name(name):
        raise WeightsError(name, ["no such directory"], "give a directory, or a repository as org/name")
    return None


def is_complete(directory: Path) -> bool:
    """Whether a fetched directory holds all that it should, by its headers and sizes."""
    try:
        checkpoint = LocalCheckpoint(directory)
        return (
            bool(checkpoint.tensors and checkpoint.config and checkpoint.preprocessor)
            and not checkpoint.faults
        )
    except MoonvitError:
        return False


def _is_repo_name(name: str) -> bool:
    """Whether it could be a repository, `org/name`, rather than a mistyped path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*", name) is not None


def _cached(place: Path, revision: str | None) -> Path | None:
    name = revision or "main"
    ref = place / "refs" / _ref_name(name)
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else name
    found = place / commit
    return found if is_commit(commit) and is_complete(found) else None


def _remember(place: Path, revision: str, commit: str) -> None:
    ref = place / "refs" / _ref_name(revision)
    try:
        if ref.is_file() and ref.read_text().strip() == commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = beside(ref)
        fresh.write_text(commit + "\n")
        fresh.replace(ref)
    except OSError as error:  # a cache that is only read serves all the same
        log.info("%s: not remembered: %s", ref, error)


def _ref_name(revision: str) -> str:
    """A branch or tag as one file name, no two alike."""
    return quote(revision, safe="").replace(".", "%2E")
