"""Axes, values and lengths that the ops over packed sequences share.

Axes of a case:
  seq_lens     tokens of each sequence
  new          sequences that begin at zero (the first ones)
  padding      sequences without a slot (the last ones)
  decode       whether borders are absent: one token of each sequence
  running      whether flags are absent: no sequence begins
  rows         of the state; by default two more than are needed
  state_dtype  of the state
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Call, Tensor
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import near


def _drawn_lengths(lens: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Other sequences with about as many tokens in all; all of one token where these are."""
    count = near(len(lens), rng)
    if set(lens) <= {1}:
        return (1,) * count
    parts = [rng.uniform(0.3, 1.0) for _ in range(count)]
    total = near(sum(lens), rng)
    return tuple(max(int(total * part / sum(parts)), 1) for part in parts)


def _lengths(a: Any) -> tuple[int, ...]:
    return (1,) * len(a.slots) if a.cu_seqlens is None else tuple(a.cu_seqlens.diff().tolist())


AXES: dict[str, Axis] = {
    "seq_lens": Axis.per_call(draw=_drawn_lengths, read=_lengths),
    "new": Axis.per_call(
        0, draw=lambda n, rng: rng.randint(0, n), read=lambda a: 0 if a.fresh is None else int(a.fresh.sum())
    ),
    "padding": Axis.option(0, read=lambda a: int((a.slots == 0).sum())),
    "sequences": Axis(Expr("len(seq_lens)"), varies=True),
    "tokens": Axis(Expr("sum(seq_lens)"), varies=True),
    "rows": Axis(Expr("len(seq_lens) + 2"), stated=True),
    "state_dtype": Axis.dtype("float32"),
}
CONSTRAINTS = (
    "new + padding <= len(seq_lens)",
    "rows > len(seq_lens)",
    "not decode or tokens == len(seq_lens)",
    "not running or new == 0",
)
TAIL = (
    Tensor("cu_seqlens", "sequences+1", "int32", when="not decode", bytes="0"),
    Tensor("slots", "sequences", "int32", bytes="0"),
    Tensor("fresh", "sequences", "bool", when="not running", bytes="0"),
)


def keys_inside(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """States [..., K, V] whose keys, or channels, are contiguous, as our engine and vLLM store them."""
    return call.randn(*shape).to(dtype).mT.contiguous().mT


def state(axes: str, of: str, **more: Any) -> Tensor:
    """The state of the declaration: one row a slot, of which `of` numbers are read (unless new) and written."""
    return Tensor(
        "state", axes, "state_dtype", mutated=True, **more,
        bytes=f"max(2 * (sequences - padding) - new, 0) * {of} * itemsize(state_dtype)",
    )  # fmt: skip


def values(call: Call) -> dict[str, torch.Tensor]:
    """The tail: sequences one after the other, in slots at random."""
    lens, padding = call["seq_lens"], call["padding"]
    starts = torch.tensor([0, *lens], device=call.device).cumsum(0)
    order = 1 + torch.randperm(call["rows"] - 1, generator=call.generator, device=call.device)
    slots = order[: len(lens)].to(torch.int32)
    slots[len(lens) - padding :] = 0
    fresh = torch.arange(len(lens), device=call.device) < call["new"]
    found = {"cu_seqlens": starts.to(torch.int32), "slots": slots, "fresh": fresh}
    absent = {name for name, flag in (("cu_seqlens", "decode"), ("fresh", "running")) if call[flag]}
    return {name: tensor for name, tensor in found.items() if name not in absent}


def of_length_one(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Keys: longer ones let a delta rule diverge."""
    made = call.randn(*shape)
    return (made / made.norm(dim=-1, keepdim=True).clamp_min(1e-6)).to(dtype)


def log_decay(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """From nearly 0 (a decay near 1) to about -3."""
    return (-torch.nn.functional.softplus(2 * call.randn(*shape) - 2)).to(dtype)


def steps(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uniform from 0 to 1."""
    return call.rand(*shape).to(dtype)


def prompts(*lens: int, **more: Any) -> dict[str, Any]:
    """The dims of sequences that all begin."""
    return {"seq_lens": lens, "new": len(lens), **more}


def decode(sequences: int, **more: Any) -> dict[str, Any]:
    """The dims of one token for each sequence, none of which begins."""
    return {"seq_lens": (1,) * sequences, "decode": True, "running": True, **more}


PACKED = tuple(100 + 1259 * i % 3901 for i in range(32))  # 32 prompts of 100 to 4,000 tokens


def model_cases(name: str, **sizes: Any) -> tuple[Case, ...]:
    """Calls of a served model: decodes of four batches and prompts of three kinds."""
    kinds = {"8k": (8192,), "8x2k": (2048,) * 8, "packed_32": PACKED}
    of_prompts = (
        Case(f"{name}_{kind}", prompts(*lens, **sizes), weight=1, tags=("model",))
        for kind, lens in kinds.items()
    )
    return *model_decodes(name, **sizes), *of_prompts


_DECODES = ((1, 16), (8, 16), (32, 32), (256, 8))


def model_decodes(name: str, **sizes: Any) -> tuple[Case, ...]:
    """Decodes of a served model, of four batches."""
    return tuple(
        Case(f"{name}_decode_{n}", decode(n, **sizes), weight=w, tags=("model",)) for n, w in _DECODES
    )


def odd(name: str, dims: dict[str, Any], dtype: str = "bfloat16") -> Case:
    return Case(name, dims, dtype, tags=("odd",))


def bf16_states(**sizes: Any) -> tuple[Case, ...]:
    """A prompt of two chunks and a decode whose states are bfloat16."""
    dims = {**sizes, "state_dtype": "bfloat16"}
    return odd("bf16_state", {"seq_lens": (66,), **dims}), odd("bf16_state_5", decode(5, **dims))
