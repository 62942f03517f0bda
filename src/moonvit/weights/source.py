"""Where a model's files come from: a directory, a mmproj file, the cache, or a hub."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from moonvit.errors import MoonvitError, OfflineError, WeightsError
from moonvit.places import cache_root
from moonvit.weights.checkpoint import DirectoryFiles, LocalCheckpoint
from moonvit.weights.gguf import SUFFIX, GgufCheckpoint, is_gguf
from moonvit.weights.hub import HubCheckpoint, HubRepo, RepoFiles, is_commit
from moonvit.weights.index import Checkpoint
from moonvit.weights.place import beside
from moonvit.weights.small import SmallFiles

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


def config_files(
    path_or_repo: str | os.PathLike[str], revision: str | None = None, *, cached: bool = False
) -> SmallFiles:
    """The small files of a directory, mmproj file or repository, which need hold no weights.

    Of a repository no tensor and no header is fetched. With `cached`, the vision half that lies in the cache
    stands for it, which has configs but no tokenizer.
    """
    path = local_path(path_or_repo)
    name = str(path_or_repo)
    if path is None and cached:
        path = _cached(cache_root() / ("models--" + name.replace("/", "--")), revision)
    if path is None:
        return RepoFiles(HubRepo(name, revision))
    return GgufCheckpoint(path) if path.is_file() else DirectoryFiles(path)


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
