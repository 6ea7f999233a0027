"""Ids of a ranking: nearly equal scores may change places, and every other id is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.correctness.checks import Checks
from fk_bench.kernels.judge.correctness.errors import Errors, compare, expect
from fk_bench.kernels.judge.memory.slots import Slots

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.overrides.recsys.top_k_scores import reference

SPEC = registry.get("top_k_scores")
K, ITEMS = 4, 90
CASE = Case("ranking", {"users": 6, "items": ITEMS, "dim": 32, "k": K}, "float32")
TIED = 1  # user whose second and third best items have scores that differ by rounding


def call(dtype: torch.dtype = torch.float32) -> list[Any]:
    """Six users; the third and fourth place of TIED have scores that differ by 1e-7 of themselves."""
    generator = torch.Generator().manual_seed(5)
    users = torch.randn(6, 32, generator=generator)
    items = torch.randn(ITEMS, 32, generator=generator)
    items[7] = users[TIED] * 2
    items[8] = items[7].clone()
    items[8, 3] *= 1 + 2e-7
    starts = torch.tensor([0, 2, 3, 3, 3, 3, 3])
    return [users.to(dtype), items.to(dtype), K, starts, torch.tensor([11, 12, 13])]


def judged(scores: torch.Tensor, ids: torch.Tensor, args: list[Any], rounding: bool = True) -> str:
    """The problem with these outputs, of a baseline and of a candidate."""
    want = expect(SPEC, CASE, args, "op", [torch.float32, torch.int64] if rounding else None)
    found = [
        compare(SPEC, CASE, [scores, ids], want, allowed, (), Errors()).problem for allowed in (None, 1e-7)
    ]
    assert bool(found[0]) == bool(found[1])
    return found[1]


def test_nearly_equal_scores_may_change_places() -> None:
    args = call()
    scores, ids = reference(*args)
    assert set(ids[TIED, :2].tolist()) == {7, 8}
    swapped = ids.clone()
    swapped[TIED, :2] = ids[TIED, :2].flip(0)
    assert judged(scores, ids, args) == judged(scores, swapped, args) == ""
    assert judged(scores, swapped, args, rounding=False) == ""


def test_equal_scores_may_have_any_ids() -> None:
    args = call()
    args[0].zero_()
    scores, ids = reference(*args)
    assert judged(scores, ids + 40, args) == ""
    assert "occur twice" in judged(scores, torch.full_like(ids, 50), args)


@pytest.mark.parametrize(
    ("user", "wrong", "said"),
    [
        (0, [0, 0], "1 of 24 ids occur twice in their row"),
        (0, [1, 11], "1 of 24 ids do not exist or may not be chosen"),  # seen
        (2, [1, ITEMS], "do not exist"),
        (2, [1, -1], "do not exist"),
        (2, [1, -2], "do not exist"),
        (3, [3, 20], "(exact scores of its ids)"),  # an item of another score
        (TIED, [0, 50], "(exact scores of its ids)"),
    ],
)
def test_wrong_id_with_right_scores_is_wrong(user: int, wrong: list[int], said: str) -> None:
    """The planted id takes a place of the ranking; place 0 stands for the id of the first place."""
    args = call()
    scores, ids = reference(*args)
    place, value = wrong
    assert value not in ids[user].tolist()
    ids[user, max(place, 1)] = ids[user, 0] if value == 0 else value
    found = judged(scores, ids, args)
    assert found.startswith("output 1") and said in found


def test_ids_in_another_order_are_wrong() -> None:
    args = call()
    scores, ids = reference(*args)
    assert "(exact scores of its ids)" in judged(scores, ids.flip(1), args)
    assert judged(scores, ids.roll(1, 0), args).startswith("output 1")


def test_scores_of_the_wrong_ids_are_wrong_too() -> None:
    """Ids of the next best items, with their own exact scores."""
    args = call()
    scores, ids = (t[:, 1:] for t in reference(*args[:2], K + 1, *args[3:]))
    assert judged(scores.contiguous(), ids.contiguous(), args).startswith("output 0")


@pytest.mark.parametrize("bits", [7, 10])
def test_ids_chosen_with_low_precision_are_wrong(bits: int) -> None:
    """Ids by scores with few bits, as of bfloat16 and TF32, with the exact scores of these ids."""
    generator = torch.Generator().manual_seed(9)
    users, items = (torch.randn(n, 64, generator=generator) for n in (40, 4000))
    args = [users, items, 20]
    mask = torch.tensor(-1 << (23 - bits), dtype=torch.int32)
    rough = ((t.view(torch.int32) & mask).view(torch.float32) for t in (users, items))
    ids = reference(*rough, 20)[1]
    scores = (users @ items.t()).gather(1, ids)
    assert not torch.equal(ids, reference(*args)[1])
    assert judged(scores, ids, args)


def test_all_users_have_few_items_left() -> None:
    """The rest of a row is -1, and no item may take its place."""
    args = [torch.eye(2, 4), torch.randn(3, 4), 3, torch.tensor([0, 2, 2]), torch.tensor([0, 1])]
    scores, ids = reference(*args)
    assert ids[0].tolist() == [2, -1, -1] and judged(scores, ids, args) == ""
    for planted, said in ([2, 0, -1], "not be chosen"), ([2, 2, -1], "twice"), ([-1, 2, -1], "not be chosen"):
        changed = ids.clone()
        changed[0] = torch.tensor(planted)
        assert said in judged(scores, changed, args)


def test_rounding_of_a_product_passes() -> None:
    """Scores summed in another order, of many users: some ids change places."""
    generator = torch.Generator().manual_seed(3)
    users, items = (torch.randn(n, 64, generator=generator) for n in (150, 3000))
    items = torch.cat((items, items + 1e-7 * torch.randn(items.shape, generator=generator)))
    args = [users, items, 20]
    scores = (users.flip(1) @ items.flip(1).t()) * (1 + 2e-7 * torch.rand(150, 6000, generator=generator))
    best, ids = scores.topk(20, 1)
    assert int((ids != expect(SPEC, CASE, args, "op").outputs[1]).sum()) > 5
    assert judged(best, ids, args) == ""


def test_distance_of_a_ranking_is_that_of_scores() -> None:
    slots = Slots(SPEC, lambda g: call(), "cpu", 3, "op")
    outputs = [list(reference(*slots.args_of(s))) for s in range(3)]
    others = [[t.clone() for t in o] for o in outputs]
    outputs[1][1][TIED, :2] = outputs[1][1][TIED, :2].flip(0)
    outputs[2][1][3, 2] = ITEMS + 5
    checks = Checks(SPEC, CASE, "op")
    near, tied, wrong = checks.distances(*checks._ranked(slots, outputs, others)).tolist()
    assert near == 0 and tied < 1e-4 and wrong == float("inf")
    assert outputs[2][1][3, 2] == ITEMS + 5  # still there
