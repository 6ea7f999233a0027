"""Compare the kernels for trees of drafts with PyTorch under TRITON_INTERPRET=1; print differences as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from fastkernels.engine.execution.drafts.draft_kernels import COLUMNS, Rows
from fastkernels.engine.execution.drafts.tree_kernels import (
    Caches,
    accept_tree,
    accept_tree_triton,
    tables_of,
)
from fastkernels.engine.options.draft_tree import DraftTree

TREE = DraftTree.read("[(0,),(1,),(2,),(0,0),(0,1),(1,0),(2,0),(0,0,0),(1,0,0),(1,0,1)]")


def problems(device: str = "cpu") -> list[str]:
    """Return the differences from PyTorch, and from DraftTree.accepted on the host."""
    found: list[str] = []
    rng, size = np.random.default_rng(0), 60
    drafts, own = rng.integers(0, len(TREE) + 1, size), rng.integers(1, 6, size)
    tokens = own + drafts
    forced = np.where(rng.random(size) < 0.3, rng.integers(0, TREE.depth + 1, size), -1)
    columns = {
        "start": tokens.cumsum() - tokens, "tokens": tokens, "drafts": drafts,
        "place": (drafts + 1).cumsum() - drafts - 1, "offset": rng.integers(0, 50, size),
        "known": np.where(drafts == 0, rng.integers(-1, 9, size), -1), "forced": forced,
        "own_start": tokens.cumsum() - tokens, "extra": np.zeros(size), "before": rng.integers(0, 20, size),
        "slot": rng.permutation(size), "room": rng.integers(5, 40, size), "unsure": np.zeros(size),
    }  # fmt: skip
    packed = torch.from_numpy(np.stack([columns[name] for name in COLUMNS]).astype(np.int64))
    ids, sampled = (torch.from_numpy(rng.integers(0, 3, n)) for n in (tokens.sum(), (drafts + 1).sum()))
    made: list[Any] = []
    for run, where in ((accept_tree, "cpu"), (accept_tree_triton, device)):
        rows = Rows(*torch.zeros(6, size, dtype=torch.int64, device=where).unbind())
        path = torch.full((size, TREE.depth), -1, dtype=torch.int64, device=where)
        order = torch.arange(len(ids), device=where)
        children = tables_of(TREE, torch.device(where)).children
        run(packed.to(where), ids.to(where), sampled.to(where), rows, path, order, children)
        made.append([*(t.cpu() for t in (*rows, path, order))])
    names = (*Rows._fields, "path", "order")
    found += [f"{name}: {a} {b}" for name, a, b in zip(names, *made, strict=True) if not torch.equal(a, b)]
    path, lengths = made[0][-2], set()
    for row in range(size):
        end, at = int(columns["start"][row] + tokens[row]), int(columns["place"][row])
        want = TREE.accepted(
            ids[end - drafts[row] : end].tolist(), sampled[at : at + drafts[row] + 1].tolist(),
            None if forced[row] < 0 else int(forced[row]),
        )  # fmt: skip
        lengths.add(len(want))
        if path[row].tolist() != [*want, *[0] * (TREE.depth - len(want))]:
            found.append(f"path of row {row}: {path[row].tolist()}, not {want}")
    if lengths != {0, 1, 2, 3}:
        found.append(f"numbers of accepted drafts are {sorted(lengths)}")
    slots, roots = torch.randperm(800)[: len(ids)], torch.from_numpy(tokens.cumsum() - drafts - 1)
    for shape, dtype in (((3, 64), torch.float32), ((1, 3), torch.float16), ((5, 3), torch.uint8)):
        caches = [torch.randint(0, 99, (200, 4, *shape)).to(dtype) for _ in range(3)]
        want, got = [c.clone() for c in caches], [c.to(device, copy=True) for c in caches]
        Caches(want).keep(slots, roots, path)
        moving = [t.to(device) for t in (slots, roots, path)]
        Caches(got).keep_triton(*moving)
        for before, a, b in zip(caches, want, got, strict=True):
            if not torch.equal(a, b.cpu()) or torch.equal(before, a):
                found.append(f"moved keys of {dtype}")
            flat, old = a.flatten(0, 1), before.flatten(0, 1)
            for row in range(size):
                for depth, node in enumerate(path[row].tolist()):
                    there, here = slots[roots[row] + depth + 1], slots[roots[row] + node]
                    if node and not torch.equal(flat[there], old[here]):
                        found.append(f"keys of row {row}")
    return found


if __name__ == "__main__":
    print(json.dumps(problems()))
