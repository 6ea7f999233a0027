"""Run one decode step of vLLM's recurrent functions twice, under TRITON_INTERPRET=1.

Prints {function: [the PyTorch operations of its second call, the largest error]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels.core import registry
from fastkernels.overrides.recurrence import vllm

T = torch.Tensor
BATCH, HEADS, SIZE, STATES, SLOTS = 3, 2, 16, 16, 5
CHANNELS = HEADS * SIZE


class Recorded(TorchDispatchMode):
    """The names of the operations that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def rand(*shape: int) -> T:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


SLOT_OF = torch.tensor([3, 1, 4], dtype=torch.int32)
BORDERS, OLD = torch.arange(BATCH + 1, dtype=torch.int32), torch.zeros(BATCH, dtype=torch.bool)


def mamba2(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    x, step = rand(BATCH, HEADS, SIZE), rand(BATCH, HEADS)
    keys, queries = rand(BATCH, 1, STATES), rand(BATCH, 1, STATES) * 0.5
    rate, skip, bias = -rand(HEADS).exp(), rand(HEADS), rand(HEADS) + 1
    wide = (BATCH, HEADS, SIZE)
    host = (
        state, x, step[..., None].expand(wide), rate[:, None, None].expand(HEADS, SIZE, STATES), keys, queries,
        skip[:, None].expand(HEADS, SIZE), bias[:, None].expand(HEADS, SIZE),
    )  # fmt: skip
    more = {"dt_softplus": True, "state_batch_indices": SLOT_OF, "out": out}
    return lambda: vllm.vllm_selective_state_update(*host, **more), (
        x, step, rate, keys, queries, skip, bias, state.clone(), BORDERS, SLOT_OF, OLD,
    ), "ssd"  # fmt: skip


def mamba(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    x, step, gate = rand(BATCH, CHANNELS), rand(BATCH, CHANNELS), rand(BATCH, CHANNELS) + 1
    joined = rand(BATCH, 2 * STATES)  # as of one product: rows that are not contiguous
    keys, queries = joined[:, :STATES], joined[:, STATES:]
    rate, skip, bias = -rand(CHANNELS, STATES).exp(), rand(CHANNELS), rand(CHANNELS) + 1
    host = (state, x, step, rate, keys, queries, skip, bias, gate)
    more = {"dt_softplus": True, "state_batch_indices": SLOT_OF, "out": out}
    return lambda: vllm.vllm_mamba_selective_state_update(*host, **more), (
        x, step, rate, keys, queries, skip, gate, bias, state.clone(), BORDERS, SLOT_OF, OLD,
    ), "mamba_scan"  # fmt: skip


def convolution(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    x, weight, bias = rand(BATCH, CHANNELS), rand(CHANNELS, 4), rand(CHANNELS)

    def call() -> None:
        out.copy_(vllm.vllm_causal_conv1d_update(x, state, weight, bias, "silu", SLOT_OF))

    return call, (x, weight, bias, state.clone(), BORDERS, SLOT_OF, OLD, "silu"), "causal_conv1d"


def filled_convolution(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    _, args, op = convolution(state, out)
    host = (args[0], state, *args[1:3], "silu", SLOT_OF)
    return lambda: vllm.vllm_causal_conv1d_update(*host, out=out), args, op


def gated_delta(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    mixed = rand(BATCH, HEADS * (2 * STATES + SIZE))
    a, b, rate, bias = rand(BATCH, HEADS), rand(BATCH, HEADS), rand(HEADS), rand(HEADS) + 1
    q, k, v = mixed.split([HEADS * STATES, HEADS * STATES, HEADS * SIZE], 1)
    wide = q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1)), v.unflatten(1, (HEADS, -1))
    host = (mixed, a, b, rate, bias, 0.25, state, out, SLOT_OF, True)
    return lambda: vllm.vllm_fused_recurrent_gated_delta_rule_packed_decode(*host), (
        *wide, a, b, state.clone().transpose(2, 3), BORDERS, SLOT_OF, OLD, 0.25, True, rate, bias, True,
    ), "gated_delta_rule"  # fmt: skip


def kimi_delta(state: T, out: T) -> tuple[Callable[[], Any], tuple[Any, ...], str]:
    mixed = rand(BATCH, HEADS * (2 * STATES + SIZE))
    g, b, rate, bias = rand(1, BATCH, HEADS, STATES), rand(1, BATCH, HEADS), rand(HEADS), rand(HEADS * STATES)
    wide = (
        t.unflatten(1, (HEADS, -1)) for t in mixed.split([HEADS * STATES, HEADS * STATES, HEADS * SIZE], 1)
    )
    host = (mixed, g, b, rate, bias, -5.0, state, SLOT_OF, 0.25, out)
    return lambda: vllm.vllm_fused_recurrent_kda_packed_decode(*host), (
        *wide, g[0], b[0], state.clone().transpose(2, 3), BORDERS, SLOT_OF, OLD, 0.25, True, rate,
        bias.view(HEADS, STATES), True, -5.0,
    ), "kda"  # fmt: skip


def measured(made: Any, state: T, out: T) -> list[Any]:
    call, args, op = made(state, out)
    want, after = registry.get(op).reference(*args)
    begin = state.clone()
    call()
    state.copy_(begin)
    out.fill_(float("nan"))
    with Recorded() as seen:
        call()
    after = after.transpose(2, 3) if op in ("gated_delta_rule", "kda") else after
    wrong = (out.view(want.shape) - want).abs().max(), (state - after).abs().max()
    return [seen.names, float(max(wrong))]


def main() -> None:
    print(json.dumps({
        "mamba2": measured(mamba2, rand(SLOTS, HEADS, SIZE, STATES), torch.empty(BATCH, HEADS, SIZE)),
        "mamba": measured(mamba, rand(SLOTS, CHANNELS, STATES), torch.empty(BATCH, CHANNELS)),
        "convolution": measured(convolution, rand(SLOTS, CHANNELS, 3), torch.empty(BATCH, CHANNELS)),
        "gated delta": measured(
            gated_delta, rand(SLOTS, HEADS, SIZE, STATES), torch.empty(BATCH, 1, HEADS, SIZE)
        ),
        "kimi delta": measured(
            kimi_delta, rand(SLOTS, HEADS, SIZE, STATES), torch.empty(1, BATCH, HEADS, SIZE)
        ),
        "convolution with a result": measured(
            filled_convolution, rand(SLOTS, CHANNELS, 3), torch.empty(BATCH, CHANNELS)
        ),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
