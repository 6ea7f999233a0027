"""decode_attention.py --few: calls of few keys, in which most of the chip has nothing to do.

The sets of ours that may be the default there (FEW of _attention_decode_cuda.py), and what each is checked with.
"""

from __future__ import annotations

import decode_attention_check as checks
from decode_attention_check import EDGES, Batch, Layout, parsed_sets

from fastkernels.overrides.kit.launch import tickets

TINY, SMOLLM2, LLAMA = Layout(3, 1, 64), Layout(9, 3, 64), Layout()
BLOCKS = 12  # of the tables that the judge's captures of SmolLM2 have
COMPILE_S = 45  # of all that is compiled
SERVER = 2048  # keys that the graph of a server is for
# Lengths, layout, what the graph is for
CASES: tuple[tuple[list[int], Layout, int], ...] = (
    ([5, 17, 131, 1], TINY, 131), ([4, 0, 19], TINY, 19),
    *(
        (lens, SMOLLM2, BLOCKS * SMOLLM2.block_size)
        for lens in ([58], [102, 110], [92, 95, 125, 90, 98], [113, 81, 84, 114, 79, 87])
    ),
    *(
        (lens, LLAMA, most)
        for lens in ([17], [100], [100] * 8, [20, 46, 71, 97, 123, 149, 174, 200], [64] * 32)
        for most in (max(lens), SERVER)
    ),
)  # fmt: skip
# warps / keys / stages / per_sm / least / ahead / cluster / whole; of triton-split as its PARAMS say
SETS = ",".join((
    "cuda-split:8/16/3/1/128/2/1",  # the default elsewhere
    "cuda-split:8/16/3/1/16/2/1", "cuda-split:8/16/3/1/32/2/1", "cuda-split:4/16/3/1/512/2/2",  # smaller shares
    "cuda-split:8/16/3/1/128/2/1/256", "cuda-split:8/16/3/1/128/0/1/256",  # none is cut; nothing is asked for early
    "cuda-split:8/16/2/1/128/1/1/256", "cuda-split:4/16/3/1/128/2/1/256", "cuda-split:4/16/3/2/64/2/1/256",
    "cuda-split:4/32/3/1/128/2/1/256", "cuda-split:4/16/3/1/512/2/2/256",
    "triton-split:2/64/4/4/128/0", "triton-split:3/64/4/3/256/0", "triton-split:4/32/2/4/256/0",
))  # fmt: skip
# As timed; around a block, a unit and `whole`; more sequences than workers; longer than the set is for.
BATCHES = (
    *(Batch(lens, most, layout) for lens, layout, most in CASES),
    *(Batch([0], most, layout) for most, layout in ((0, TINY), (SERVER, LLAMA))),
    *(Batch(EDGES, 8192, layout) for layout in (TINY, SMOLLM2, LLAMA)),
    Batch([255, 256, 0, 1], 256, LLAMA), Batch([257, 3, 0], 4096, LLAMA), Batch([5000, 1], 8192, LLAMA),
    Batch([0] * 7, 16, LLAMA), Batch([129] * 40, 256, LLAMA), Batch([*range(0, 256, 7)] * 4, 256, TINY),
    Batch([3, 250, 0, 31], 256, Layout(16, 2, 128, 5)), Batch(EDGES, 2048, Layout(6, 6, 64, 1), "float16"),
    Batch([1] * 257, 8, LLAMA),
)  # fmt: skip


def use() -> None:
    """These sets and checks in the place of all."""
    checks.SETS.update(parsed_sets(SETS))
    checks.ONLY.extend(BATCHES)
    tickets.CAPTURED = 1 << 24  # of a case's graphs: none takes a node of its own for zeros
