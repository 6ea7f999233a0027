"""Script for TRITON_INTERPRET=1: the kernel that fills slots against PyTorch; prints [case, wrong tensors]."""

from __future__ import annotations

import json

import torch
from fk_bench.kernels.judge.memory import filling, layout
from fk_bench.kernels.judge.memory.slots import Slots, scalable

from fastkernels.core import registry

DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
CASES = (
    ("rms_norm", "odd_63"), ("grouped_topk", "strided"), ("linear", "odd_63"), ("store_kvcache", "padded"),
    ("embedding", "shard"), ("topk_softmax", "odd_63"), ("attention_decode", "window"), ("attention_decode", "fp8"),
)  # fmt: skip


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.dtype is torch.bfloat16:  # the interpreter truncates
        got, want = (t.contiguous().view(torch.int16).int() for t in (got, want))
        return bool(((got - want).abs() <= 1).all())
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def alone(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Two masters, four slots with a gap behind each; shifts at both ends."""
    masters = [torch.randn(shape).mul(50).to(dtype) for _ in range(2)]
    numel, scales = masters[0].numel(), scalable(masters[0])
    room = torch.zeros(4, numel + 24, dtype=dtype)
    shifts, factors = [0, 1, numel - 1, numel // 2], [1.0, 0.8000001, 0.93, 0.97]
    sources, wrong = [masters[m] for m in (0, 1, 1, 0)], 0
    filling.fill(room[0, :numel].view(shape), numel + 24, sources, shifts, factors if scales else None)
    for slot, (source, shift, factor) in enumerate(zip(sources, shifts, factors, strict=True)):
        want = source.view(torch.uint8).view(numel, -1).roll(-shift, 0).view(-1).view(dtype)
        want = want * torch.tensor(factor).to(dtype) if scales else want
        wrong += not same(room[slot, :numel], want) or bool(room[slot, numel:].view(torch.uint8).any())
    return wrong


def slots(op: str, name: str) -> int:
    """All tensors of all slots, after a refresh of all and a renewal of one."""
    spec = registry.get(op)
    case = next(c for c in spec.cases if c.name == name)
    made = Slots(spec, lambda g: spec.inputs(case, "cpu", g), "cpu", 6, "op", True)
    made.by_kernel = True
    made.refresh()
    made.renew(2)
    pairs = [
        (got, want)
        for s in range(made.count)
        for got, want in zip(layout.tensors(made.args_of(s)), made.expected(s), strict=True)
    ]
    return sum(not same(got, want) for got, want in pairs)


if __name__ == "__main__":
    for dtype in DTYPES:
        for shape in ((3, 1000), (9001,)):
            print(json.dumps([f"{dtype} {shape}", alone(dtype, shape)]))
    for op, name in CASES:
        print(json.dumps([f"{op} {name}", slots(op, name)]))
