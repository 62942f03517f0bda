"""Pads in ids and text: expanded n-fold, counted, and found again."""

from collections.abc import Collection, Iterable, Sequence
from operator import index

from moonvit.errors import PromptError


def expand_ids(ids: Sequence[int], counts: Sequence[int], pads: Collection[int]) -> list[int]:
    """The ids with the n-th pad repeated counts[n] times; `PromptError` where there are more or fewer."""
    counts = _checked(sum(token in pads for token in ids), counts)
    left = iter(counts)
    return [token for old in ids for token in ([old] * next(left) if old in pads else [old])]


def expand_text(text: str, counts: Sequence[int], literals: Collection[str]) -> str:
    """The text with the n-th pad literal repeated counts[n] times.

    Text of a template only: a literal that a user typed cannot be told from one of the template's.
    """
    first = next(iter(literals))
    found = sum(text.count(literal) for literal in literals)
    counts = _checked(found, counts)
    out, rest = "", text
    for count in counts:
        place, literal = min((rest.find(one), one) for one in literals if one in rest) if rest else (0, first)
        out += rest[:place] + literal * count
        rest = rest[place + len(literal) :]
    return out + rest


def runs(ids: Sequence[int], pads: Collection[int]) -> list[tuple[int, int]]:
    """(start, length) of each run of one and the same pad."""
    found: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        if token not in pads:
            continue
        if found and place == sum(found[-1]) and ids[place - 1] == token:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((place, 1))
    return found


def cut(found: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[tuple[int, int]]:
    """The runs cut into slots of those lengths, which must fill them one behind the other."""
    slots: list[tuple[int, int]] = []
    counts = whole_numbers(counts, "counts")
    left = list(counts)
    for start, length in found:
        stop = start + length
        while start < stop and left:
            size = left.pop(0)
            if size < 1 or start + size > stop:
                raise PromptError(f"slot {len(slots)} has {stop - start} pads, its embeddings {size} rows")
            slots.append((start, size))
            start += size
        if start < stop:
            raise PromptError(f"{sum(n for _, n in found)} pads, but embeddings of {sum(counts)} rows")
    if left:
        raise PromptError(f"{len(slots)} slots, but embeddings for {len(counts)}")
    return slots


def whole_numbers(values: Iterable[int], name: str) -> list[int]:
    """Plain numbers, of a tensor or array too; `PromptError` for anything else."""
    try:
        return [index(value) for value in values]
    except TypeError as error:
        raise PromptError(f"{name} are not whole numbers: {error}") from error


def _checked(found: int, counts: Sequence[int]) -> list[int]:
    counts = whole_numbers(counts, "counts")
    if found != len(counts):
        raise PromptError(f"{found} pads to expand, but {len(counts)} counts")
    if any(count < 1 for count in counts):
        raise PromptError(f"counts are {list(counts)}, expected at least 1 each")
    return counts
