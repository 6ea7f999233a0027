"""Compare the kernels of a captured step with PyTorch under TRITON_INTERPRET=1; print differences as JSON."""

from __future__ import annotations

import json

import numpy as np
import torch

from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps import step_kernels
from fastkernels.engine.steps.input_batch import InputBatch
from fastkernels.engine.steps.step import SAMPLED, StepInput


def problems(device: str = "cpu") -> list[str]:
    """Return the differences from PyTorch, in batches of decodes and of prompts, padded and not."""
    found, slots = [], 6
    params = [
        SamplingParams(temperature=0.1 * i, top_k=7 * i, top_p=1 - 0.1 * i, min_p=0.02 * i)
        for i in range(slots)
    ]
    for case, (lens, seqs, tokens, rows) in enumerate(
        [([1], [1], 1, 1), ([1, 1, 1], [9, 1, 40], 4, 4), ([1, 3, 2], [16, 30, 2], 8, 5), ([5], [4999], 8, 6)]
    ):
        batch = InputBatch(torch.device(device), slots, 5000, 4, groups=1 + case % 2)
        sampler = Sampler(device, 512, slots)
        sampler.set_rows([NewRow(i, params[i], 2**62 - i) for i in range(slots)])
        generator = torch.Generator().manual_seed(case)
        table = torch.randint(1, 99, batch.block_table.shape, dtype=torch.int32, generator=generator)
        batch.block_table.copy_(table)
        batch.last_tokens.copy_(100 + torch.arange(slots + 1))
        n = len(lens)
        ids = np.arange(sum(lens), dtype=np.int64)
        ids[::2] = SAMPLED
        step = StepInput(
            np.arange(n)[::-1] + 2, np.array(lens, np.int32), np.array(seqs, np.int32), np.arange(n) - 1, ids,
            sum(x == 1 for x in lens), np.empty((0, 3), np.int32),
        )  # fmt: skip
        inputs = batch.load(step, tokens, rows)
        got = torch.zeros(batch.groups, rows, batch.width, dtype=torch.int32, device=device)
        input_ids, drawing = step_kernels.begin_triton(inputs, got, batch, sampler)
        want = torch.stack([batch.group_table(g).index_select(0, inputs.slots) for g in range(batch.groups)])
        for row, length in enumerate(inputs.seq_lens.tolist()):
            used = -(-length // 4)
            if not torch.equal(got[:, row, :used], want[:, row, :used]):
                found.append(f"case {case}: block table of row {row}")
        if not torch.equal(input_ids, batch.known_ids(inputs)):
            found.append(f"case {case}: ids {input_ids} {batch.known_ids(inputs)}")
        for name, x, y in zip(drawing._fields, drawing, sampler.drawing(inputs.sample_slots), strict=True):
            if x.dtype != y.dtype or not torch.equal(x, y):
                found.append(f"case {case}: {name} {x} {y}")
        tokens_of = 7 * torch.arange(rows, device=device)
        before = batch.last_tokens.clone().scatter_(0, inputs.slots, tokens_of)
        step_kernels.finish_triton(tokens_of, inputs, batch)
        if not torch.equal(before[:slots], batch.last_tokens[:slots]):
            found.append(f"case {case}: last tokens {batch.last_tokens} {before}")
        if device == "cuda":
            torch.cuda.synchronize()
        if batch.sampled[inputs.host_turn, :rows].tolist() != tokens_of.tolist():
            found.append(f"case {case}: the host reads {batch.sampled}, turn {inputs.host_turn}")
    return found


if __name__ == "__main__":
    print(json.dumps(problems()))
