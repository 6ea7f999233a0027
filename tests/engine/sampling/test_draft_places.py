"""Penalties behind drafts: each place has those of its own path, and the accepted path is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkernels.engine.options.draft_tree import DraftTree
from fastkernels.engine.sampling.draft_places import DraftPlaces
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampling_params import SamplingParams

VOCAB, PROMPT = 11, (1, 2, 2)
TREES = {
    "chain": [(0,), (0, 0), (0, 0, 0)],
    "tree": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)],
}


def sampler(rows: int, outputs: list[list[int]]) -> Sampler:
    made = Sampler("cpu", VOCAB, rows)
    wanted = SamplingParams(
        temperature=0.9, presence_penalty=1.1, frequency_penalty=0.6, repetition_penalty=1.7
    )
    made.set_rows(
        [NewRow(i, wanted, 7 + i, prompt_token_ids=PROMPT, output_token_ids=t) for i, t in enumerate(outputs)]
    )
    return made


def sampled_alone(logits: torch.Tensor, row: int, output: list[int]) -> int:
    """The token behind this output."""
    one = sampler(3, [output if i == row else [] for i in range(3)])
    at, slots = np.array([len(output)]), np.array([row])
    ids, _ = one(logits[None], torch.tensor([row]), torch.from_numpy(at), one.plan(slots, at))
    return int(ids)


@pytest.mark.parametrize("name", TREES)
def test_places_are_sampled_as_one_after_another(name: str) -> None:
    """Three sequences in more places than slots; the drafts are right in half of the cases."""
    paths = DraftTree.read(TREES[name])
    size, accepted_lengths = len(paths) + 1, set[int]()
    for seed in range(12):
        random = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(3 * size, VOCAB, generator=random)
        outputs = [torch.randint(VOCAB, (4 + i,), generator=random).tolist() for i in range(3)]
        before = [list(tokens) for tokens in outputs]
        tokens, expected = [0] * (3 * size), [0] * (3 * size)
        for row in range(3):
            paths_to: list[list[int]] = [[]]
            for node in range(size):
                at = row * size + node
                if node:
                    parent = row * size + paths.parents[node]
                    right = expected[parent]
                    used = {
                        tokens[row * size + kid] for kid in paths.children[paths.parents[node]] if kid < node
                    }
                    wrong = next(t for t in range(VOCAB) if t not in used | {right})
                    take = right not in used and bool(torch.rand((), generator=random) < 0.6)
                    tokens[at] = right if take else wrong
                    paths_to.append([*paths_to[paths.parents[node]], tokens[at]])
                expected[at] = sampled_alone(logits[at], row, [*outputs[row], *paths_to[node]])
            drafts, found = tokens[row * size + 1 : (row + 1) * size], expected[row * size : (row + 1) * size]
            kept = paths.accepted(drafts, found)
            accepted_lengths.add(len(kept))
            before[row] += [found[0], *(found[node] for node in kept)]
        together = sampler(3, outputs)
        slots = torch.arange(3).repeat_interleave(size)
        offsets = torch.tensor([len(outputs[row]) + d for row in range(3) for d in paths.depths])
        parents = torch.tensor([row * size + parent for row in range(3) for parent in paths.parents])
        places = DraftPlaces(torch.tensor(tokens), parents, paths.depth)
        plan = together.plan(slots.numpy(), offsets.numpy())
        ids, _ = together(logits, slots, offsets, plan, places=places)
        assert ids.tolist() == expected
        counted = [np.bincount(tokens, minlength=VOCAB).tolist() for tokens in before]
        assert together.output_counts is not None and together.output_counts[:3].tolist() == counted
    assert accepted_lengths == set(range(paths.depth + 1))
