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
MOST_K = 128  # that a program of the Triton kernel keeps of its items
MOST_DIM = 512
SPAN = 1024  # items of such a program


def reference(
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """users: [B, D]; items: [M, D]. Returns scores [B, k] float32, the largest first, and the items' ids [B, k] int64.

    seen [S] int are the items that users have seen: of user b those at seen_starts[b] to seen_starts[b + 1],
    seen_starts [B + 1] int. They are left out; ids beyond the items exclude nothing. A user with fewer than k items
    left has -inf and the id -1 for the rest. Of equal scores the smaller id comes first. NaN is larger than all
    numbers. float64 inputs give float64 scores. Raises ValueError for shapes that do not fit, and for k outside of
    1 .. M.
    """
    _check(users, items, k, seen_starts, seen)
    acc = torch.promote_types(users.dtype, torch.float32)
    scores = users.to(acc) @ items.to(acc).t()
    hidden = _hidden(users, items, seen_starts, seen)
    # A stable sort puts seen items last, even behind scores of -inf.
    best, ids = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True, stable=True)
    order = hidden.gather(1, ids).to(torch.int8).argsort(dim=1, stable=True)[:, :k]
    best, ids = best.gather(1, order), ids.gather(1, order)
    out = hidden.gather(1, ids)
    return best.masked_fill(out, float("-inf")), ids.masked_fill(out, -1)


def _hidden(
    users: torch.Tensor, items: torch.Tensor, seen_starts: torch.Tensor | None, seen: torch.Tensor | None
) -> torch.Tensor:
    """The items that each user has seen: [B, M] bool. Does not synchronize, so that it can be captured in a graph."""
    cells = len(users) * len(items)
    hidden = torch.zeros(
        cells + 1, dtype=torch.bool, device=users.device
    )  # the last is for ids beyond the items
    if seen is not None and seen_starts is not None:
        place = torch.arange(len(seen), device=seen.device)
        # Not of seen_starts[1:]: Inductor 2.11 searches views from their storage's first value on.
        user = torch.searchsorted(seen_starts.long(), place, right=True) - 1
        kept = (seen >= 0) & (seen < len(items)) & (user >= 0) & (user < len(users))
        hidden.index_fill_(0, torch.where(kept, user * len(items) + seen, cells), True)
    return hidden[:-1].view(len(users), len(items))


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


@triton.jit(do_not_specialize=["words"])
def _hide_kernel(seen_ptr, starts_ptr, mask_ptr, M, words, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    # Set the bit of each item that a user has seen: bit m % 32 of word m // 32 of the user's row.
    follow(OVERLAP)
    user = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + user).to(tl.int64)
    n = (tl.load(starts_ptr + user + 1).to(tl.int64) - begin).to(tl.int32)
    for first in range(0, n, BLOCK):
        places = first + tl.arange(0, BLOCK)
        item = tl.load(seen_ptr + begin + places, mask=places < n, other=-1).to(tl.int64)
        there = (item >= 0) & (item < M)
        item = tl.where(there, item, 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (item % 32).to(tl.int32)
        tl.atomic_or(mask_ptr + user * words + item // 32, bit, mask=there)


@triton.jit(do_not_specialize=["B", "words"])
def _top_k_kernel(
    users_ptr, items_ptr, mask_ptr, keys_ptr, u_stride, i_stride, B, M, D, words, spans,
    MASKED: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The K largest scores of BLOCK_B users among SPAN items, as keys: the score's bits, ordered like the score, then
    # the complement of the id. Among equal scores the smaller id has the larger key.
    follow(OVERLAP)
    span = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    ids = span * SPAN + tl.arange(0, SPAN)
    acc = tl.zeros([BLOCK_B, SPAN], tl.float32)
    for first in range(0, D, BLOCK_D):
        dims = first + tl.arange(0, BLOCK_D)
        u_at = users_ptr + rows[:, None] * u_stride + dims[None, :]
        u = tl.load(u_at, mask=(rows < B)[:, None] & (dims < D)[None, :], other=0.0)
        i_at = items_ptr + ids.to(tl.int64)[:, None] * i_stride + dims[None, :]
        i = tl.load(i_at, mask=(ids < M)[:, None] & (dims < D)[None, :], other=0.0)
        acc = tl.dot(u, tl.trans(i), acc, input_precision=PRECISION)
    bits = tl.where(acc == 0.0, 0.0, acc).to(tl.int32, bitcast=True)  # one zero
    bits = tl.where(acc == acc, bits, 0x7FC00000)  # one NaN
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)[None, :]
    there = (ids < M)[None, :] & (rows < B)[:, None]
    if MASKED:
        word = tl.load(mask_ptr + rows[:, None] * words + (ids // 32)[None, :], mask=there, other=0)
        there = there & (((word >> (ids % 32)[None, :]) & 1) == 0)
    key = tl.where(there, key, -0x7FFFFFFFFFFFFFFF)
    best = tl.topk(key, K, 1)
    places = tl.arange(0, K)
    out = keys_ptr + (rows[:, None] * spans + span) * K + places[None, :]
    tl.store(out, best, mask=(rows < B)[:, None] & (places >= 0)[None, :])


NONE = -0x7FFFFFFFFFFFFFFF  # the key of no item, as in the kernel


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
    if users.device.type == "cpu" and users.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if k > MOST_K or users.shape[1] > MOST_DIM:
        return f"k {k} is over {MOST_K}, or vectors of {users.shape[1]} are over {MOST_DIM}"
    for name, t in (("users", users), ("items", items)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(users, items, k, seen_starts, seen)
    (batch, dim), count, device = users.shape, len(items), users.device
    if not batch:
        return _fake(users, items, k)
    words, mask = cdiv(count, 32), None
    if seen is not None and seen_starts is not None:
        mask = torch.zeros(batch, words, dtype=torch.int32, device=device)
        launch_kernel(
            _hide_kernel, (batch,), seen.contiguous(), seen_starts.contiguous(), mask, count, words, BLOCK=256,
            num_warps=4,
        )  # fmt: skip
    kept = max(next_power_of_2(k), 2)
    block_b, span = 16, max(SPAN // 4, kept) if count > SPAN // 4 else max(next_power_of_2(count), kept, 16)
    spans = cdiv(count, span)
    keys = torch.empty(batch, spans * kept, dtype=torch.int64, device=device)
    launch_kernel(
        _top_k_kernel, (spans, cdiv(batch, block_b)), users, items, mask, keys, users.stride(0), items.stride(0), batch,
        count, dim, words, spans, MASKED=mask is not None, K=kept, SPAN=span, BLOCK_B=block_b,
        BLOCK_D=min(max(next_power_of_2(dim), 16), 64), PRECISION="ieee" if users.dtype == torch.float32 else "tf32",
        num_warps=8,
    )  # fmt: skip
    if spans * kept < k:
        keys = torch.cat((keys, keys.new_full((batch, k - spans * kept), NONE)), 1)
    return _decoded(keys, k)


def _decoded(keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and ids of the k largest keys of each row."""
    best = keys.topk(k, 1).values
    order = (best >> 32).int()
    scores = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)
    none = best == NONE
    ids = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    return scores.masked_fill(none, float("-inf")), ids.masked_fill(none, -1)


def _torch(
    users: torch.Tensor, items: torch.Tensor, k: int, seen_starts: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A product, and torch.topk of the kernel's keys: the order of equal scores is defined. No synchronization."""
    _check(users, items, k, seen_starts, seen)
    scores = users.float() @ items.float().t() + 0.0  # one zero
    bits = scores.masked_fill(scores.isnan(), float("nan")).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (order << 32) | (0x7FFFFFFF - torch.arange(len(items), device=users.device))
    if seen is not None:
        keys = keys.masked_fill(_hidden(users, items, seen_starts, seen), NONE)
    return _decoded(keys, k)


def _runs_torch(users: torch.Tensor, items: torch.Tensor, *_: Any, **__: Any) -> str | None:
    floats = users.dtype in FLOATS and items.dtype in FLOATS
    return None if floats else f"keys hold float32 scores, not {users.dtype}"


top_k_scores = define(
    "top_k_scores(Tensor users, Tensor items, SymInt k, Tensor? seen_starts=None, Tensor? seen=None)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu"), supports=_runs_torch),
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
