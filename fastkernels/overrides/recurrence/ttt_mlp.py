"""SwiGLU MLP with weights of each sequence, y = (silu(x G^T) * (x U^T)) D^T, as in TTT-E2E (arXiv 2512.23675).

The weights are in slots, as other states of sequences are. A token's slot selects its weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.moe.grouped_gemm import grouped_gemm
from fastkernels.overrides.moe.moe_tiles import tiles, wide
from fastkernels.overrides.routing.sorted_pairs import sort_pairs

T = torch.Tensor


def check(x: T, gate_up: T, down: T, slots: T) -> None:
    """Raise ValueError for arguments that contradict each other."""
    hidden = x.shape[-1]
    fits = gate_up.dim() == 3 and down.dim() == 3 and gate_up.shape[1] % 2 == 0
    if x.dim() != 2 or not fits or gate_up.shape[2] != hidden:
        raise ValueError(
            f"ttt_mlp: x {tuple(x.shape)} must be [T, H] and gate_up {tuple(gate_up.shape)} [S, 2 I, H]"
        )
    if down.shape != (gate_up.shape[0], hidden, gate_up.shape[1] // 2):
        raise ValueError(
            f"ttt_mlp: down {tuple(down.shape)} must be [S, H, I] = {(gate_up.shape[0], hidden, gate_up.shape[1] // 2)}"
        )
    if slots.shape != x.shape[:1] or slots.dtype != torch.int32:
        raise ValueError(f"ttt_mlp: slots {tuple(slots.shape)} in {slots.dtype} must be [T] in torch.int32")


def reference(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> T:
    """x: [T, H]; gate_up: [S, 2 I, H], gate rows first; down: [S, H, I]; slots: [T] int32.

    longest: about the largest number of tokens with the same slot, on which no result depends. Returns [T, H] in x's
    dtype. The first product and its activation are rounded to x's dtype.
    """
    check(x, gate_up, down, slots)
    dtype, acc = x.dtype, torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=acc, device=x.device)
    for slot in slots.unique().tolist():
        own = slots == slot
        gate, up = (x[own].to(acc) @ gate_up[slot].to(acc).t()).to(dtype).chunk(2, dim=-1)
        out[own] = (F.silu(gate) * up).to(acc) @ down[slot].to(acc).t()
    return out.to(dtype)


def _torch(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> T:
    check(x, gate_up, down, slots)
    out = torch.zeros_like(x)
    for slot in slots.unique().tolist():
        own = slots == slot
        out[own] = F.linear(silu_and_mul.run(F.linear(x[own], gate_up[slot])), down[slot])
    return out


def _supports_triton(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> str | None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is not float32, float16 or bfloat16"
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return "Triton's interpreter computes tl.dot of bfloat16 on its bits as integers"
    for name, w in (("gate_up", gate_up), ("down", down)):
        if w.dtype != x.dtype or w.stride(-1) != 1:
            return (
                f"{name} is {w.dtype} with strides {tuple(w.stride())}, x {x.dtype}: rows must be contiguous"
            )
    return None


def _triton(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> T:
    """The grouped products of experts, with a slot in an expert's place."""
    check(x, gate_up, down, slots)
    x, ids = x.contiguous(), slots.contiguous()[:, None]
    if x.numel() == 0 or gate_up.numel() == 0:
        return torch.zeros_like(x)
    # By the longest sequence: in a prompt one slot has all tokens, and its average is far too small a tile
    shape = tiles(longest, x.dtype, wide(x.device))
    pairs = sort_pairs(ids, len(gate_up), None, shape.block_m)
    inner = silu_and_mul.run(grouped_gemm(x, gate_up, pairs, 1, None, shape))
    return grouped_gemm(inner, down, pairs, 1, None, shape)


def _fake(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> T:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


ttt_mlp = define(
    "ttt_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor slots, int longest=1) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("torch", _torch, devices=("cpu",)),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _values(call: Call) -> dict[str, Any]:
    """Sequences of equal length, whose slots are in any order."""
    tokens, slots = call.sizes["tokens"], call.sizes["rows"]
    each = -(-tokens // slots)
    order = torch.randperm(slots, generator=call.generator, device=call.device)
    return {"slots": order.repeat_interleave(each)[:tokens].to(torch.int32)}


def _read(columns: str) -> str:
    """Bytes of the slots that tokens have: at most one each."""
    return f"min(tokens, rows) * hidden * {columns} * itemsize(dtype)"


def _case(
    name: str, tokens: int, rows: int, hidden: int, inner: int, tag: str = "odd", dtype: str = "float32"
) -> Case:
    dims = {"tokens": tokens, "rows": rows, "hidden": hidden, "inner": inner, "longest": -(-tokens // rows)}
    return Case(name, dims, dtype, tags=(tag,))


SPEC = OpSpec(
    name="ttt_mlp",
    level=2,
    reference=reference,
    op=ttt_mlp,
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("gate_up", "rows 2*inner hidden", values=fan_in, bytes=_read("2 * inner")),
        Tensor("down", "rows hidden inner", values=fan_in, bytes=_read("inner")),
        Tensor("slots", "tokens", "int32"),
        Scalar("longest", default=1),
    ),
    outputs=(Tensor("y", "tokens hidden"),),
    axes={
        "tokens": Axis.per_call(), "rows": Axis.per_call(), "hidden": Axis.width(), "inner": Axis.width(),
    },
    values=_values,
    flops="6 * tokens * hidden * inner",
    cases=(
        # TTT-E2E 3B: decodes, and a chunk of a prompt
        _case("decode_1", 1, 1, 2560, 5632, "model", "bfloat16"),
        _case("decode_8", 8, 8, 2560, 5632, "model", "bfloat16"),
        _case("decode_32", 32, 32, 2560, 5632, "model", "bfloat16"),
        _case("chunk", 1024, 1, 2560, 5632, "model", "bfloat16"),
        _case("one", 1, 1, 1, 1),
        _case("odd_5", 5, 2, 20, 33),
        _case("decode_3", 3, 3, 40, 24, dtype="float16"),
        _case("half", 6, 2, 64, 48, dtype="bfloat16"),
        _case("rows_4", 19, 4, 33, 20),
        _case("many", 40, 3, 16, 70, dtype="float16"),
        _case("alone", 33, 1, 48, 32),
    ),
    activations=("x",),
)  # fmt: skip
