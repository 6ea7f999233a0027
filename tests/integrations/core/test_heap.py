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

    def change() -> None:
        gc.unfreeze()
        made.extend(Node() for _ in range(100))
        if fails:
            raise ValueError

    made: list[Node] = []
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        with frozen_again():
            change()
    except ValueError:
        assert fails
    assert gc.get_freeze_count() > 0.9 * before
    assert not {id(o) for o in gc.get_objects()} & {id(o) for o in made}  # new objects are frozen, too


@pytest.mark.parametrize("now", [False, True])
def test_frozen_heap_frees_what_was_replaced(now: bool) -> None:
    old = Node()
    alive = weakref.ref(old)
    gc.freeze()
    with frozen_again() as heap:
        del old
        gc.collect()
        assert alive() is not None  # of a frozen heap, which is not scanned
        gc.freeze()  # as vLLM does at the end of a warm-up
        if now:
            heap.collect()
            assert alive() is None
    assert alive() is None and gc.get_freeze_count() > 0


def test_a_frozen_heap_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(gc, "collect", lambda *args: calls.append(args))
    gc.freeze()
    for use in (True, False):
        with frozen_again() as heap:
            if use:
                heap.collect()
        assert len(calls) == 1
        calls.clear()


def test_heap_that_was_not_frozen_stays_so() -> None:
    with frozen_again():
        pass
    assert gc.get_freeze_count() == 0
