"""The vision half of a hub checkpoint, moved into a small checkpoint directory of its own.

Bytes moved are those of the vision tensors, the headers of their shards, the configs and the index.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from moonvit.errors import WeightsError
from moonvit.families import family_of
from moonvit.weights.hub import HubCheckpoint
from moonvit.weights.index import StoredTensor, index_bytes
from moonvit.weights.journal import Journal, Span, missing
from moonvit.weights.load import check_loadable, tower_only
from moonvit.weights.place import sync_directory

CONNECTIONS = 4
"""Ranges asked for at the same time."""

Progress = Callable[[int], object]
"""Called with a number of bytes."""

_REQUEST = 32 * 2**20  # bytes of one range request at most, so that all connections have work
_PIECE = 512 * 1024  # bytes noted in the journal at once, at most: what a killed fetch loses a connection


@dataclass(frozen=True)
class Run:
    """Bytes that lie side by side both in the remote shard and in the file being made."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Part:
    """One file to make: the vision tensors of one remote shard."""

    shard: str
    name: str
    head: bytes
    runs: list[Run]
    size: int


def fetch(checkpoint: HubCheckpoint, directory: Path, progress: Progress | None = None) -> None:
    """Make `directory`, a checkpoint of the vision tensors under their released names.

    It appears only when complete; beside it, a hidden directory holds what an earlier, killed run has
    brought, and is gone on with. Refused before a tensor is moved: whatever could not be loaded.

    Args:
        checkpoint: the source.
        directory: must not exist.
        progress: called with the number of bytes that came or were there already.
    """
    _refuse_unusable(checkpoint)
    partial = unfinished(directory)
    partial.mkdir(parents=True, exist_ok=True)
    parts = plan_parts(checkpoint)
    _remove_strangers(partial, parts)
    for part in parts:
        if not (partial / part.name).exists():
            _fetch_part(checkpoint, part, partial, progress)
        elif progress:
            progress(part.size - len(part.head))
    _write_small_files(checkpoint, parts, partial)
    sync_directory(partial)
    partial.rename(directory)
    sync_directory(directory.parent)


def unfinished(directory: Path) -> Path:
    """Where a fetch into `directory` gathers what has come."""
    return directory.with_name(f".{directory.name}.fetching")


def _remove_strangers(partial: Path, parts: list[Part]) -> None:
    """Keep only finished parts that are the ones planned, and pieces of parts not finished."""
    planned = {part.name: part for part in parts}
    for path in partial.iterdir():
        part = planned.get(path.name)
        if part is not None:
            with path.open("rb") as file:
                whole = path.stat().st_size == part.size and file.read(len(part.head)) == part.head
            if whole:
                continue
        elif path.name.removesuffix(".partial").removesuffix(".journal") in planned:
            continue
        path.unlink()


def _refuse_unusable(checkpoint: HubCheckpoint) -> None:
    family = family_of(checkpoint.config, f"{checkpoint.where}/config.json")
    config, _ = family.read(checkpoint)
    check_loadable(family.empty_model(config, projector=not tower_only(checkpoint)), checkpoint)


def plan_parts(checkpoint: HubCheckpoint) -> list[Part]:
    """The files to make, one for each shard with vision tensors, tensors in the order of their bytes."""
    by_shard: dict[str, list[tuple[str, StoredTensor]]] = {}
    for name, stored in checkpoint.tensors.items():
        by_shard.setdefault(stored.shard, []).append((name, stored))
    total = len(by_shard)
    return [
        _plan_part(checkpoint, shard, tensors, f"model-{number:05}-of-{total:05}.safetensors")
        for number, (shard, tensors) in enumerate(sorted(by_shard.items()), start=1)
    ]


def _plan_part(
    checkpoint: HubCheckpoint, shard: str, tensors: list[tuple[str, StoredTensor]], name: str
) -> Part:
    tensors = sorted(tensors, key=lambda item: item[1].entry.start)
    metadata = {
        "format": "mlx" if tensors[0][1].mlx else "pt",
        "source": checkpoint.repo.name,
        "revision": checkpoint.repo.commit,
        "file": shard,
        "etag": checkpoint.remote[shard][1],
    }
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for released, stored in tensors:
        entry = stored.entry
        offsets = [offset, offset + entry.nbytes]
        header[released] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Part(shard, name, head, _runs([stored for _, stored in tensors], len(head)), len(head) + offset)


def _runs(tensors: Iterable[StoredTensor], target: int) -> list[Run]:
    """Tensors that are neighbours in the shard joined into one run."""
    runs: list[Run] = []
    for stored in tensors:
        start, length = stored.entry.start, stored.entry.nbytes
        if runs and runs[-1].source + runs[-1].length == start:
            runs[-1] = Run(runs[-1].source, runs[-1].target, runs[-1].length + length)
        elif length:
            runs.append(Run(start, target, length))
        target += length
    return runs


def _fetch_part(checkpoint: HubCheckpoint, part: Part, directory: Path, progress: Progress | None) -> None:
    file = checkpoint.file(part.shard)
    piece = max(4096, min(_PIECE, (part.size - len(part.head)) // 2000))
    with Journal(directory / part.name, part.size, {"head": part.head.hex()}) as journal:
        requests = [request for run in part.runs for request in _requests(run, journal.done)]
        if progress:
            progress(part.size - len(part.head) - sum(request.length for request in requests))

        def move(request: Run) -> None:
            place = request.target
            buffer = bytearray()

            def flush() -> None:
                nonlocal place
                if buffer:
                    journal.write(place, bytes(buffer))
                    if progress:
                        progress(len(buffer))
                    place += len(buffer)
                    buffer.clear()

            def sink(data: bytes) -> None:
                buffer.extend(data)
                if len(buffer) >= piece:
                    flush()

            try:
                file.stream(request.source, request.source + request.length, sink)
            finally:
                flush()

        _all_done(move, requests, file.stopped)
        journal.write(0, part.head)
        journal.finish()


def _all_done(move: Callable[[Run], None], requests: list[Run], stopped: Event) -> None:
    """Run all requests on a few connections; on an error or an interrupt the rest is stopped at once.

    The threads are daemons: one that waits for a silent server must not hold up the end of the program.
    """
    waiting: SimpleQueue[Run | None] = SimpleQueue()
    results: SimpleQueue[BaseException | None] = SimpleQueue()
    for request in [*requests, *[None] * CONNECTIONS]:
        waiting.put(request)

    def work() -> None:
        while (request := waiting.get()) is not None and not stopped.is_set():
            try:
                move(request)
                results.put(None)
            except BaseException as error:  # handed to the caller's thread
                results.put(error)

    for number in range(min(CONNECTIONS, len(requests))):
        Thread(target=work, name=f"moonvit-fetch-{number}", daemon=True).start()
    try:
        for _ in requests:
            if (error := results.get()) is not None:
                raise error
    except BaseException:
        stopped.set()
        raise


def _requests(run: Run, done: list[Span]) -> list[Run]:
    """What of a run is still to be fetched, cut to the size of one request."""
    shift = run.source - run.target
    requests = []
    for start, stop in missing((run.target, run.target + run.length), done):
        for left in range(start, stop, _REQUEST):
            requests.append(Run(left + shift, left, min(_REQUEST, stop - left)))
    return requests


def _write_small_files(checkpoint: HubCheckpoint, parts: list[Part], directory: Path) -> None:
    names = {part.shard: part.name for part in parts}
    weight_map = {name: names[stored.shard] for name, stored in checkpoint.tensors.items()}
    files = {
        "model.safetensors.index.json": index_bytes(weight_map, checkpoint.nbytes),
        **checkpoint.json_files(),
    }
    for name, data in files.items():
        with (directory / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def free_space(directory: Path, needed: int) -> None:
    """`WeightsError` where the disk has not enough room for `needed` bytes, less what has come already."""
    place = next(p for p in [directory, *directory.parents] if p.exists())
    come = sum(512 * path.stat().st_blocks for path in unfinished(directory).glob("*"))
    free = shutil.disk_usage(place).free
    if free < needed - come:
        raise WeightsError(str(directory), [f"needs {needed - come} bytes of disk, {free} are free"])
