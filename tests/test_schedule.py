"""Portions of pictures, and work done ahead."""

import threading

import pytest
from PIL import Image

from moonvit.schedule import ahead, grouped
from moonvit.towers.base import PATCHES_AT_ONCE


def test_groups_are_bounded_by_pictures_and_patches(encoder):
    picture = encoder.processor.prepare(Image.new("L", (14 * 100, 14 * 100)))
    assert picture.plan.patches == 10_000
    assert [len(g) for g in grouped([picture] * 3, 100)] == [1, 1, 1]
    small = encoder.processor.prepare(Image.new("L", (28, 28)))
    assert [len(g) for g in grouped([small] * 5, 2)] == [2, 2, 1]
    fitting = PATCHES_AT_ONCE // small.plan.patches
    assert len(next(iter(grouped([small] * (fitting + 1), 10**9)))) == fitting
    with pytest.raises(ValueError, match="batch_size is 0"):
        encoder.encode([Image.new("L", (28, 28))], batch_size=0)


def test_ahead_keeps_the_order_and_works_in_another_thread():
    makers = set()

    def items():
        for number in range(20):
            makers.add(threading.get_ident())
            yield number

    assert list(ahead(items())) == list(range(20))
    assert len(makers) == 1
    assert threading.get_ident() not in makers
    assert list(ahead([], 3)) == []


@pytest.mark.parametrize("count", [1, 3])
def test_ahead_makes_no_more_than_it_may(count):
    made = []
    using = ahead((made.append(n) or n for n in range(10)), count)
    assert next(using) == 0
    using.close()
    assert len(made) <= 1 + count


def test_an_error_comes_when_its_turn_does():
    def items():
        yield from (1, 2)
        raise KeyError("third")

    using = ahead(items(), 2)
    assert [next(using), next(using)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(using)


def test_stopping_early_leaves_no_thread():
    def threads():
        return [t for t in threading.enumerate() if t.name.startswith("moonvit-ahead")]

    using = ahead(iter(range(100)), 2)
    next(using)
    assert threads()
    using.close()
    assert not threads()
