"""Tests of the heap's state after a change of a live host."""

import gc
import weakref

import pytest
from fk_integrations.core.heap import frozen_again


class Node:
    def __init__(self) -> None:
        self.itself = self  # only a collection frees it


@pytest.fixture(autouse=True)
def unfrozen():
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    (gc.freeze if frozen else gc.unfreeze)()


@pytest.mark.parametrize("fails", [False, True])
def test_heap_is_frozen_again(fails: bool) -> None:
    """As vLLM and SGLang capture: they unfreeze all objects at the end."""

    @frozen_again()
    def change() -> None:
        gc.unfreeze()
        made.extend(Node() for _ in range(100))
        if fails:
            raise ValueError

    made: list[Node] = []
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        change()
    except ValueError:
        assert fails
    assert gc.get_freeze_count() > 0.9 * before
    assert not {id(o) for o in gc.get_objects()} & {id(o) for o in made}  # new objects are frozen, too


def test_frozen_heap_frees_what_was_replaced() -> None:
    old = Node()
    alive = weakref.ref(old)
    gc.freeze()

    @frozen_again()
    def change() -> None:
        nonlocal old
        del old

    change()
    assert alive() is None


def test_heap_that_was_not_frozen_stays_so() -> None:
    with frozen_again():
        pass
    assert gc.get_freeze_count() == 0
