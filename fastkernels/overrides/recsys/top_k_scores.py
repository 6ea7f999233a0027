"""The best items of users: scores users @ items^T without the items that a user has seen, and the k largest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec, Permutable, Ranking
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recsys.cases import zipf

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_HELD = (
    16384  # numbers that a program of the Triton kernel holds: scores of groups, or items of the best ones
)


def reference(
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """users: [B, D]; items: [M, D]. Returns scores [B, k] float32, the largest first, and the items' ids [B, k] int64.

    seen [S] int are the items that users have seen: of user b those at seen_starts[b] to seen_starts[b + 1],
    seen_starts [B + 1] int. They are left out, as are scores of -inf; ids beyond the items exclude nothing. A user with
    fewer than k items left has -inf and the id -1 for the rest. Items of equal scores are in any order; here the
    smaller id comes first. NaN is larger than all numbers. float64 inputs give float64 scores. Raises ValueError for
    shapes that do not fit, and for k outside of 1 .. M.
    """
    _check(users, items, k, seen_starts, seen)
    acc = torch.promote_types(users.dtype, torch.float32)
    scores = users.to(acc) @ items.to(acc).t()
    hidden = _hidden(users, items, seen_starts, seen)
    best, ids = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True, stable=True)
    best, ids = best[:, :k], ids[:, :k]
    return best, ids.masked_fill(best == float("-inf"), -1)


def _hidden(
    users: torch.Tensor, items: torch.Tensor, seen_starts: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    """The items that each user has seen: [B, M] bool. Does not synchronize, so that it can be captured in a graph."""
    hidden = torch.zeros(users.shape[0] * items.shape[0] + 1, dtype=torch.bool, device=users.device)
    _fill_seen(hidden, len(items), True, users, items, seen_starts, seen)
    return hidden[:-1].view(len(users), len(items))


def _fill_seen(
    cells: torch.Tensor, stride: int, value: Any, users: torch.Tensor, items: torch.Tensor,
    seen_starts: torch.Tensor | None, seen: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write `value` to each user's seen items, in cells of rows of `stride` and one more: it is for ids beyond."""
    if seen is not None and seen_starts is not None:
        place = torch.arange(len(seen), device=seen.device)
        # Not of seen_starts[1:]: Inductor 2.11 searches views from their storage's first value on.
        user = torch.searchsorted(seen_starts.long(), place, right=True) - 1
        kept = (seen >= 0) & (seen < len(items)) & (user >= 0) & (user < len(users))
        cells.index_fill_(0, torch.where(kept, user * stride + seen, cells.shape[0] - 1), value)


def _score(
    ids: torch.Tensor, users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The scores of ids [B, k], and whether the user may get each: it exists, and the user has not seen it."""
    acc = torch.promote_types(users.dtype, torch.float32)
    at = ids.clamp(0, len(items) - 1)
    scores = (users.to(acc)[:, None] * items[at].to(acc)).sum(-1)
    return scores, (ids == at) & ~_hidden(users, items, seen_starts, seen).gather(1, at)


def _check(
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    seen_starts: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> None:
    if users.dim() != 2 or items.dim() != 2 or users.shape[1] != items.shape[1]:
        shapes = f"{tuple(users.shape)} and {tuple(items.shape)}"
        raise ValueError(f"top_k_scores: users must be [B, D] and items [M, D], got {shapes}")
    if not 1 <= k <= len(items):
        raise ValueError(f"top_k_scores: k must be from 1 to the number of items, {len(items)}, got {k}")
    if (seen is None) != (seen_starts is None):
        raise ValueError("top_k_scores: seen and seen_starts belong together")
    if seen is None or seen_starts is None:
        return
    if seen.dim() != 1 or seen_starts.shape != (len(users) + 1,):
        raise ValueError(
            f"top_k_scores: seen must be [S] and seen_starts [{len(users) + 1}], got {tuple(seen.shape)} and"
            f" {tuple(seen_starts.shape)}"
        )


@triton.jit(do_not_specialize=["M"])
def _hide_kernel(scores_ptr, seen_ptr, starts_ptr, stride, M, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    # A score of -inf for each item that a user has seen.
    follow(OVERLAP)
    user = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + user).to(tl.int64)
    end = tl.load(starts_ptr + user + 1).to(tl.int64)
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        item = tl.load(seen_ptr + places, mask=places < end, other=-1).to(tl.int64)
        worst = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(scores_ptr + user * stride + item, worst, mask=(item >= 0) & (item < M))


@triton.jit
def _ordered(score):
    # Integers in the order of float32 scores: one zero, and one NaN, which is the largest.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(score == score, bits, 0x7FC00000)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


NOTHING = tl.constexpr(-0x80000000)  # below the integers of all scores


@triton.jit(do_not_specialize=["M", "groups"])
def _maxima_kernel(
    scores_ptr, maxima_ptr, stride, M, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    # The best score of each group of GROUP items next to each other. Rows are padded: loads of 16 bytes need no mask.
    follow(OVERLAP)
    user = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    items = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    order = _ordered(tl.load(scores_ptr + user * stride + items, mask=items < stride, other=0.0))
    best = tl.max(tl.where(items < M, order, NOTHING), 1)
    tl.store(maxima_ptr + user * groups + group, best, mask=group < groups)


@triton.jit
def _places(order, k, HELD: tl.constexpr):
    # Where each of the k largest integers goes, in their order in memory; k for the others. Of equal ones the first are
    # taken. A binary search finds a limit that k of them reach, bit by bit, without a sort.
    limit = k * 0  # unsigned
    bit = limit + 31
    found = limit + HELD
    while (bit >= 0) & (found != k):
        higher = limit | (1 << bit)
        count = tl.sum((order >= (higher ^ -0x80000000)).to(tl.int32), 0)
        limit = tl.where(count >= k, higher, limit)
        found = tl.where(count >= k, count, found)
        bit -= 1
    limit = limit ^ -0x80000000
    above, equal = (order > limit).to(tl.int32), (order == limit).to(tl.int32)
    before = tl.cumsum(above + (equal << 16), 0)  # both counts: there are fewer than 2 ** 15 integers
    left = k - tl.sum(above, 0)  # to be taken of the equal ones
    places = (before & 0xFFFF) + tl.minimum(before >> 16, left) - 1
    return tl.where((above > 0) | ((equal > 0) & (before >> 16 <= left)), places, k)


@triton.jit(do_not_specialize=["M", "k", "groups", "chosen"])
def _choose_kernel(
    scores_ptr, maxima_ptr, group_ptr, key_ptr, best_ptr, ids_ptr, stride, M, k, groups, chosen,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per user. The k best items are in the k groups with the best maxima: each of these has an item that is
    # as good as those of any other group.
    follow(OVERLAP)
    user = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + user * groups + group, mask=group < groups, other=NOTHING)
    place = _places(maxima, chosen, GROUPS)
    tl.store(group_ptr + user * CHOSEN + place, group, mask=place < chosen)
    tl.debug_barrier()  # the program reads what it wrote
    places = tl.arange(0, CHOSEN)
    of = tl.load(group_ptr + user * CHOSEN + places, mask=places < chosen, other=0)
    items = of[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = (places < chosen)[:, None]
    order = _ordered(tl.load(scores_ptr + user * stride + items, mask=there & (items < stride), other=0.0))
    order = tl.reshape(tl.where(there & (items < M), order, NOTHING), [CHOSEN * GROUP])
    items = tl.reshape(items, [CHOSEN * GROUP])
    place = _places(order, k, CHOSEN * GROUP)
    # Among equal scores the smaller id has the larger key.
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - items).to(tl.int64)
    tl.store(key_ptr + user * CHOSEN + place, key, mask=place < k)
    tl.debug_barrier()
    found = tl.load(key_ptr + user * CHOSEN + places, mask=places < k, other=-0x7FFFFFFFFFFFFFFF)
    found = tl.sort(found, descending=True)
    order = (found >> 32).to(tl.int32)
    score = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    ids = 0x7FFFFFFF - (found & 0x7FFFFFFF)
    tl.store(best_ptr + user * k + places, score, mask=places < k)
    tl.store(ids_ptr + user * k + places, tl.where(score == float("-inf"), -1, ids), mask=places < k)


def _fake(users: torch.Tensor, items: torch.Tensor, k: int, *_: Any, **__: Any) -> Any:
    dtype = torch.promote_types(users.dtype, torch.float32)
    made = torch.empty((users.shape[0], k), dtype=dtype, device=users.device)
    return made, torch.empty(made.shape, dtype=torch.int64, device=users.device)


def _supports_triton(
    users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if users.dtype not in FLOATS or items.dtype != users.dtype:
        return f"dtypes {users.dtype}, {items.dtype} are not both float16, bfloat16 or float32"
    if any(held > MOST_HELD for held in _held(len(items), k)):
        return f"the best {k} of {len(items)} items are not found among {MOST_HELD}"
    return None


def _held(count: int, k: int) -> tuple[int, int, int]:
    """Items of a group, and how many groups and items of the best k groups a program holds: powers of 2."""
    kept = max(next_power_of_2(k), 2)
    group = 8
    while group * group * kept < count:  # as many groups as items of the best ones
        group *= 2
    return group, max(next_power_of_2(cdiv(count, group)), 2), kept * group


def _triton(
    users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(users, items, k, seen_starts, seen)
    batch, count = len(users), len(items)
    best, ids = _fake(users, items, k)
    if not batch:
        return best, ids
    scores = _scores(users, items)[1]
    group, groups_held, held = _held(count, k)
    groups, kept = cdiv(count, group), held // group
    if seen is not None and seen_starts is not None:
        launch_kernel(
            _hide_kernel, (batch,), scores, seen.contiguous(), seen_starts.contiguous(), scores.stride(0), count,
            BLOCK=128, num_warps=1,
        )  # fmt: skip
    maxima = torch.empty(batch, groups, dtype=torch.int32, device=users.device)
    chosen = torch.empty(batch, kept, dtype=torch.int32, device=users.device)
    keys = torch.empty(batch, kept, dtype=torch.int64, device=users.device)
    block = max((4096 if batch >= 32 else 1024) // group, 1)
    launch_kernel(
        _maxima_kernel, (batch, cdiv(groups, block)), scores, maxima, scores.stride(0), count, groups, GROUP=group,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    launch_kernel(
        _choose_kernel, (batch,), scores, maxima, chosen, keys, best, ids, scores.stride(0), count, k, groups,
        min(k, groups), GROUP=group, GROUPS=groups_held, CHOSEN=kept,
        num_warps=min(max(max(groups_held, held) // 512, 1), 16),
    )  # fmt: skip
    return best, ids


ROW = 16  # scores of a row in memory are a multiple: Triton's loads of 16 bytes need strides divisible by 16


def _scores(users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores in float32, as a vector of rows with one cell behind them, and as [B, M]."""
    (batch, count), device = (len(users), len(items)), users.device
    half = users.dtype in (torch.float16, torch.bfloat16) and users.dtype == items.dtype
    stride = cdiv(count, ROW) * ROW
    cells = torch.empty(batch * stride + 1, dtype=torch.float32, device=device)
    scores = cells[:-1].view(batch, stride)[:, :count]
    if half and users.is_cuda:
        torch.mm(users, items.t(), out_dtype=torch.float32, out=scores)
    else:
        torch.mm(users.float(), items.float().t(), out=scores)
    return cells, scores


def _torch(
    users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A product, and torch.topk. No synchronization."""
    _check(users, items, k, seen_starts, seen)
    cells, scores = _scores(users, items)
    _fill_seen(cells, scores.stride(0), float("-inf"), users, items, seen_starts, seen)
    best, ids = scores.topk(k, 1)
    return best, ids.masked_fill_(best == float("-inf"), -1)


def _runs_torch(users: torch.Tensor, items: torch.Tensor, *_: Any, **__: Any) -> str | None:
    floats = users.dtype in FLOATS and items.dtype in FLOATS
    return None if floats else f"scores are float32, of {users.dtype}"


top_k_scores = define(
    "top_k_scores(Tensor users, Tensor items, SymInt k, Tensor? seen_starts=None, Tensor? seen=None)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("torch", _torch, devices=("cuda", "cpu"), supports=_runs_torch),
        Provider("triton", _triton, supports=_supports_triton),  # not timed on a GPU yet
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, torch.Tensor]:
    """Users of a few tastes, with items of clearly different scores for each: few near ties among the best."""
    batch, count, dim, k = call["users"], call["items"], call["dim"], call["k"]
    device, generator = call.device, call.generator
    tastes = min(dim, 4)
    users = 0.02 * call.randn(batch, dim)
    users[torch.arange(batch, device=device), torch.arange(batch, device=device) % tastes] = 1.0
    items = 0.5 * call.randn(count, dim)
    for taste in range(tastes):
        chosen = torch.randperm(count, generator=generator, device=device)[: 3 * k]
        items[chosen, taste] = 3.0 + torch.arange(len(chosen), device=device) * 0.25
    dtype = getattr(torch, call["dtype"])
    made = {"users": users.to(dtype), "items": items.to(dtype)}
    if call["excludes"]:
        size = call["seen"]
        of = torch.randint(max(batch, 1), (size,), generator=generator, device=device)
        ends = torch.bincount(of, minlength=batch).cumsum(0)
        made["seen_starts"] = torch.cat((ends.new_zeros(1), ends))
        # At least k items are left of few: seen ones are drawn from the others
        most = count if count > 4 * k + size else max(count - k, 1)
        made["seen"] = zipf(size, most, generator)
    return made


def _seen(args: SimpleNamespace) -> int | None:
    return None if args.seen is None else len(args.seen)


def _case(
    name: str, tag: str, users: int, items: int, dim: int, k: int, seen: int = 0, dtype: str = "float32",
    weight: float = 1,
) -> Case:  # fmt: skip
    dims: dict[str, Any] = {"users": users, "items": items, "dim": dim, "k": k}
    if seen:
        dims |= {"excludes": True, "seen": seen}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="top_k_scores",
    level=2,
    reference=reference,
    op=top_k_scores,
    arguments=(
        Tensor("users", "users dim"),
        Tensor("items", "items dim"),
        Scalar("k"),
        Tensor("seen_starts", "users+1", "int64", when="excludes", bytes="0"),
        Tensor("seen", "seen", "int64", when="excludes"),
    ),
    outputs=(Tensor("scores", "users k", "float32"), Tensor("ids", "users k", "int64")),
    axes={
        "users": Axis.per_call(),
        "items": Axis.per_call(),
        "dim": Axis.width(),
        "k": Axis.count(),
        "seen": Axis.per_call(0, read=_seen),
        "excludes": Axis.option(False),
    },
    constraints=("k <= items",),
    values=_values,
    flops="2 * users * items * dim",
    cases=(  # LightGCN's data sets: Gowalla, Yelp2018, Amazon-Book; the 20 best, without the items of the training set
        _case("gowalla_1", "model", 1, 40_981, 64, 20, 27, weight=16),
        _case("gowalla_32", "model", 32, 40_981, 64, 20, 868, weight=16),
        _case("yelp2018_256", "model", 256, 38_048, 64, 20, 10_000, weight=4),
        _case("amazon_book_2048", "model", 2048, 91_599, 64, 20, 92_600),
        _case("amazon_book_256_half", "model", 256, 91_599, 64, 20, 11_600, "float16"),
        _case("one", "odd", 1, 1, 1, 1),
        _case("odd_63", "odd", 7, 301, 63, 5, 40),
        _case("all_items", "odd", 3, 9, 8, 9),
        _case("half", "odd", 5, 150, 32, 10, 20, "float16"),
        _case("odd_bf16", "odd", 4, 80, 16, 3, 0, "bfloat16"),
        _case("many_users", "odd", 35, 60, 24, 4, 100),
        _case("spans", "odd", 2, 600, 8, 20, 30),
        _case("none", "odd", 0, 20, 8, 3),
    ),
    tie_sensitive=True,
    ranking=Ranking(ids=1, scores=0, score=_score),
    permutable=lambda *args: Permutable(rows=(0,) if len(args) < 4 or args[3] is None else ()),
    activations=("users",),
    baseline="torch",
)  # fmt: skip
