"""In which portions pictures go through the tower, and the next ones made ready meanwhile."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from moonvit.pixels.base import PictureProcessor, PixelBatch, Prepared
from moonvit.towers.base import PATCHES_AT_ONCE

T = TypeVar("T")

_END: Any = object()


def batches(
    processor: PictureProcessor, prepared: Iterable[Prepared], batch_size: int
) -> Iterator[tuple[Sequence[Prepared], PixelBatch]]:
    """Portions of pictures with their packed batches, the next one made while the present one is used."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1")
    return ahead((group, processor.pack(group)) for group in grouped(prepared, batch_size))


def grouped(prepared: Iterable[Prepared], batch_size: int) -> Iterator[Sequence[Prepared]]:
    """Consecutive pictures, at most batch_size and, more than one, at most PATCHES_AT_ONCE patches."""
    group: list[Prepared] = []
    patches = 0
    for picture in prepared:
        if group and (len(group) == batch_size or patches + picture.plan.patches > PATCHES_AT_ONCE):
            yield group
            group, patches = [], 0
        group.append(picture)
        patches += picture.plan.patches
    if group:
        yield group


def ahead(items: Iterable[T], count: int = 1) -> Iterator[T]:
    """The same items in order, up to `count` of them made in another thread before they are asked for.

    What making one raises is raised when its turn comes.
    """
    iterator = iter(items)
    pool = ThreadPoolExecutor(1, thread_name_prefix="moonvit-ahead")
    try:
        waiting = deque(pool.submit(next, iterator, _END) for _ in range(count))
        while (item := waiting.popleft().result()) is not _END:
            waiting.append(pool.submit(next, iterator, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
