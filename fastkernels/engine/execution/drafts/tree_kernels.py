"""The bookkeeping of trees of drafts between the passes of target and draft, one kernel each; PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.engine.execution.drafts.draft_kernels import Rows
from fastkernels.engine.options.draft_tree import DraftTree


class Tables(NamedTuple):
    """A tree on the device, of its N nodes with node 0.

    children [N, most children of a node] int64, by rank, 0 where there is none
    masks    [N] int64: DraftTree.masks
    back     [N] int64: the number of a node less its depth
    """

    children: torch.Tensor
    masks: torch.Tensor
    back: torch.Tensor


def tables_of(tree: DraftTree, device: torch.device) -> Tables:
    width = max(map(len, tree.children))
    children = [[*kids, *[0] * (width - len(kids))] for kids in tree.children]
    back = [node - depth for node, depth in enumerate(tree.depths)]
    return Tables(*(torch.tensor(x, dtype=torch.int64, device=device) for x in (children, tree.masks, back)))


def accept_tree(
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, path: torch.Tensor, order: torch.Tensor,
    children: torch.Tensor,
) -> None:  # fmt: skip
    """Find the drafts of each row that are accepted, and fill `out`, `path` and `order`.

    packed, ids, sampled  see draft_kernels.accept; forced counts first children
    path    [R, depth] int64: the accepted nodes of each row, then 0
    order   [T] int64: where the token at each place of the draft's first pass is in `ids`: accepted drafts follow the
            row's known tokens
    """
    torch.arange(len(ids), out=order)
    if ids.is_cuda:
        accept_tree_triton(packed, ids, sampled, out, path, order, children)
        return
    start, n, drafts, place, offset, known, forced, _, _, before, slot, room, _ = packed.unbind()
    root, node, free = start + n - drafts - 1, torch.zeros_like(n), forced < 0
    going = torch.ones_like(free)
    for depth in range(path.shape[1]):
        kids = children[node]
        there = (kids > 0) & (kids <= drafts[:, None])
        theirs = ids[(root[:, None] + kids).clamp_max(len(ids) - 1)]
        same = there & ((theirs == sampled[place + node][:, None]) | ~free[:, None])
        going = going & same.any(1) & (free | (depth < forced))
        found = kids.gather(1, same.long().argmax(1, keepdim=True))[:, 0]
        node = torch.where(going, found, node)
        path[:, depth] = torch.where(going, found, 0)
        order[(root + depth + 1)[going]] = (root + found)[going]
    accepted = (path > 0).sum(1)
    last = n - drafts + accepted - 1
    token = torch.where(known < 0, sampled[place + node], known)
    for target, value in zip(
        out, (start + last, token, before + last, offset + accepted, slot, room), strict=True
    ):
        target.copy_(value)


def accept_tree_triton(
    packed: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, out: Rows, path: torch.Tensor, order: torch.Tensor,
    children: torch.Tensor,
) -> None:  # fmt: skip
    rows = packed.shape[1]
    _accept_tree_kernel[(rows,)](
        packed, ids, sampled, *out, path, order, children, rows, children.shape[1], DEPTH=path.shape[1]
    )


class Caches:
    """The paged caches of layers, whose keys move to the places of accepted drafts.

    caches: [blocks, block_size, ...], contiguous, of one group of layers
    """

    def __init__(self, caches: Sequence[torch.Tensor]):
        for cache in caches:
            assert cache.is_contiguous(), f"a cache with strides {cache.stride()} is not contiguous"
        # [slots, words] each
        self._caches = [_words(cache.flatten(0, 1).flatten(1)) for cache in caches]
        device = caches[0].device
        pairs = [(cache.data_ptr(), cache.shape[1], cache.element_size()) for cache in self._caches]
        # By bytes of a word: (address, words of a slot) of each cache
        self._table = {
            size: torch.tensor([pair[:2] for pair in pairs if pair[2] == size], device=device)
            for size in {size for *_, size in pairs}
        }

    def keep(self, slots: torch.Tensor, roots: torch.Tensor, path: torch.Tensor) -> None:
        """Move the keys of accepted drafts behind their row's known tokens.

        slots  [T] int64: slot_mapping of the step
        roots  [B] int64: each row's token before its drafts
        path   [B, depth] int64: see accept_tree
        """
        if slots.is_cuda:
            self.keep_triton(slots, roots, path)
            return
        at = torch.arange(1, path.shape[1] + 1, device=path.device)
        moved = path > at
        source = slots[(roots[:, None] + path)[moved]]
        target = slots[(roots[:, None] + at)[moved]]
        for cache in self._caches if len(source) else ():
            cache[target] = cache[source]

    def keep_triton(self, slots: torch.Tensor, roots: torch.Tensor, path: torch.Tensor) -> None:
        kinds = {8: tl.int64, 2: tl.int16, 1: tl.int8}
        for size, table in self._table.items():
            _keep_kernel[(len(roots), len(table))](
                table, slots, roots, path, DEPTH=path.shape[1], KIND=kinds[size], BLOCK=512
            )


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The rows of a cache as integers, as large as its rows allow."""
    size = cache.shape[1] * cache.element_size()
    for dtype in (torch.int64, torch.int16):
        if size % dtype.itemsize == 0 and cache.element_size() <= dtype.itemsize:
            return cache.view(dtype)
    return cache.view(torch.int8)


@triton.jit(do_not_specialize=["size", "width"])
def _accept_tree_kernel(
    packed_ptr, ids_ptr, sampled_ptr, last_ptr, token_ptr, at_ptr, offset_ptr, slot_ptr, room_ptr, path_ptr, order_ptr,
    children_ptr, size, width, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = packed_ptr + row
    start, n = tl.load(column), tl.load(column + size)
    drafts, place = tl.load(column + 2 * size), tl.load(column + 3 * size)
    offset, known = tl.load(column + 4 * size), tl.load(column + 5 * size)
    forced, before = tl.load(column + 6 * size), tl.load(column + 9 * size)
    root = start + n - drafts - 1
    node, accepted = tl.zeros_like(n), tl.zeros_like(n)
    going = accepted + 1
    for depth in tl.static_range(DEPTH):
        token, found = tl.load(sampled_ptr + place + node), tl.zeros_like(n)
        for i in range(0, width):
            kid = tl.load(children_ptr + node * width + width - 1 - i)  # the first of several is taken
            there = (kid > 0) & (kid <= drafts)
            draft = tl.load(ids_ptr + root + kid, mask=there, other=-2)
            found = tl.where(there & ((draft == token) | (forced >= 0)), kid, found)
        going *= ((found > 0) & ((forced < 0) | (depth < forced))).to(tl.int64)
        node = tl.where(going > 0, found, node)
        tl.store(path_ptr + row * DEPTH + depth, found * going)
        tl.store(order_ptr + root + depth + 1, root + found, mask=going > 0)
        accepted += going
    last = n - drafts + accepted - 1
    token = tl.where(known < 0, tl.load(sampled_ptr + place + node), known)
    tl.store(last_ptr + row, start + last)
    tl.store(token_ptr + row, token)
    tl.store(at_ptr + row, before + last)
    tl.store(offset_ptr + row, offset + accepted)
    tl.store(slot_ptr + row, tl.load(column + 10 * size))
    tl.store(room_ptr + row, tl.load(column + 11 * size))


@triton.jit
def _keep_kernel(
    table_ptr, slots_ptr, roots_ptr, path_ptr, DEPTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    # One program per (row, cache). Drafts move to earlier places, in ascending order: none is overwritten before.
    row, cache = tl.program_id(0), tl.program_id(1)
    base = tl.load(table_ptr + 2 * cache).to(tl.pointer_type(KIND))
    words = tl.load(table_ptr + 2 * cache + 1)
    root = tl.load(roots_ptr + row)
    for depth in range(0, DEPTH):
        node = tl.load(path_ptr + row * DEPTH + depth)
        if node > depth + 1:
            source = tl.load(slots_ptr + root + node) * words
            target = tl.load(slots_ptr + root + depth + 1) * words
            for begin in range(0, words, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                tl.store(base + target + at, tl.load(base + source + at, mask=at < words), mask=at < words)
