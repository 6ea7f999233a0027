"""Tests of fused_experts_fp8: a naive loop, tiles and tables, host functions, errors."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kernels import warm

from fastkernels.core import cuda_rtc, registry
from fastkernels.core.dispatch import ForOthers
from fastkernels.core.spec import Case
from fastkernels.overrides.kit import hopper
from fastkernels.overrides.moe import expert_libraries, fused_experts_fp8, moe_tiles
from fastkernels.overrides.moe.fused_experts_fp8 import SPEC
from fastkernels.overrides.moe.vllm import vllm_fused_experts

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "moe_sets.py"
FP8 = torch.float8_e4m3fn
KINDS = {
    "tensor": {"block": 0, "act": 0}, "found": {"block": 0, "act": 2}, "token": {"block": 0, "act": 1},
    "channel": {"block": 1, "act": 1}, "block": {"block": 128, "act": 128},
    "powers": {"block": 128, "act": 128, "ue8m0": True},
}  # fmt: skip


def arguments(kind: str, tokens: int = 9, seed: int = 0, **more: Any) -> list[Any]:
    sizes = {"tokens": tokens, "experts": 5, "topk": 2, "hidden": 256, "intermediate": 128}
    case = Case("c", {**sizes, **KINDS[kind], **more}, "float32")
    return SPEC.inputs(case, "cpu", torch.Generator().manual_seed(seed))


def float8(x: torch.Tensor, size: int, given: torch.Tensor | None, powers: bool) -> torch.Tensor:
    """Round x [N] to scaled float8; size: values that share a scale."""
    out = []
    for part in x.split(size):
        scale = given if given is not None else part.abs().max() / 448
        if powers:
            scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
        out.append((part / scale).clamp(-448, 448).to(FP8).float() * scale)
    return torch.cat(out)


def weight(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of one expert's w [N, K]."""
    if scale.dim() < 2:
        return w.float() * (scale[:, None] if scale.numel() > 1 else scale)
    n, k = w.shape
    return w.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def by_hand(kind: str, args: list[Any]) -> torch.Tensor:
    """Compute pair by pair; not for one scale of all tokens."""
    x, w1, w2, s1, s2, weights, ids, a1, a2 = args[:9]
    size, powers = (128 if kind in ("block", "powers") else 1 << 20), kind == "powers"
    out = torch.zeros_like(x)
    for t in range(len(x)):
        token = float8(x[t], size, a1, powers)
        for e, share in zip(ids[t].tolist(), weights[t], strict=True):
            if 0 <= e < len(w1):
                gate, up = (weight(w1[e], s1[e]) @ token).chunk(2)
                out[t] += share * (weight(w2[e], s2[e]) @ float8(F.silu(gate) * up, size, a2, powers))
    return out


def rms(found: torch.Tensor, want: torch.Tensor) -> float:
    return ((found - want).square().mean() / want.square().mean()).sqrt().item()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "found"])
def test_experts_equal_naive_loop(kind: str) -> None:
    args = arguments(kind)
    args[6][3] = torch.tensor([-1, 7])  # a padded token
    found = fused_experts_fp8.fused_experts_fp8(*args)
    assert rms(found, by_hand(kind, args)) < 2e-3
    assert not found[3].any()


def test_shared_scale_ignores_absent_experts() -> None:
    args = arguments("found")
    want = fused_experts_fp8.reference(*args)
    one = [*args[:7], *(torch.tensor([1.0]) for _ in range(2)), *args[9:]]
    one[7] = args[0].abs().max()[None] / 448
    inner = []
    for token, ids in zip(args[0], args[6].tolist(), strict=True):
        for e in ids:
            gate, up = (weight(args[1][e], args[3][e]) @ float8(token, 1 << 20, one[7], False)).chunk(2)
            inner.append((F.silu(gate) * up).abs().max())
    one[8] = torch.stack(inner).max()[None] / 448
    assert rms(want, by_hand("tensor", one)) < 2e-3
    # Tokens whose experts are elsewhere do not change the scale of the others.
    alone = [args[0][:4], *args[1:5], args[5][:4], args[6][:4], *args[7:]]
    more = list(args)
    more[0] = torch.cat((args[0][:4], args[0][:4].abs().max().expand(5, 256)))
    more[6] = torch.cat((args[6][:4], torch.full((5, 2), -1, dtype=torch.int32)))
    found = fused_experts_fp8.fused_experts_fp8(*more)
    assert rms(found[:4], fused_experts_fp8.reference(*alone)) < 2e-3


def test_expert_parallel_parts_add_up() -> None:
    args = arguments("channel")
    args[1:5] = [t[:4] for t in args[1:5]]
    args[6] %= 4
    parts = torch.zeros_like(args[0])
    for rank in range(2):
        here, mine = torch.full((4,), -1, dtype=torch.int32), slice(2 * rank, 2 * rank + 2)
        here[mine] = torch.arange(2, dtype=torch.int32)
        parts += fused_experts_fp8.fused_experts_fp8(
            args[0], *(t[mine] for t in args[1:5]), *args[5:12], here, False
        )
    assert rms(parts, by_hand("channel", args)) < 2e-3


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """Run the script in its own process: Triton interprets kernels from import on."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env, timeout=400)
    assert done.returncode == 0, done.stderr
    return {r["case"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_every_tile_set_is_correct(interpreted: dict[str, str | None]) -> None:
    found = {k: v for k, v in interpreted.items() if k.endswith((" sorted", " few"))}
    assert {k: v for k, v in found.items() if v} == {}
    assert len(found) == 2 * (len(moe_tiles.sets(2)) + 3 * len(moe_tiles.sets(1)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["other tiles", "ids of no expert", "by table"])
def test_tiles_tables_and_providers(case: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[case] is None


def test_tile_names_are_parsed() -> None:
    for text in ("16/64/128/1/4/4", "32/128/64/8/8/3/s", "64/64/64/1/4/5/e", "16/64/128/1/4/4/se"):
        assert str(moe_tiles.parsed(text)) == text
    for text in ("16/64/128/1/4", "16/64/128/1/4/4/x", "16/64/-1/1/4/4", "a"):
        with pytest.raises(ValueError, match="want block_m/block_n"):
            moe_tiles.parsed(text)
    own = moe_tiles.tiles_fp8(8, True, True)
    assert moe_tiles.chosen(own, None, None) == (own, own)
    with pytest.raises(ValueError, match="must have one block_m"):
        moe_tiles.chosen(own, "32/64/128/1/4/4", "64/64/128/1/4/4")


@pytest.mark.parametrize("itemsize", [1, 2])
def test_tile_sets_fit_shared_memory_and_some_call(itemsize: int) -> None:
    for params in moe_tiles.sets(itemsize):
        tiles = moe_tiles.parsed(params["gate_up"])
        assert tiles.shared(itemsize) <= moe_tiles.SHARED
        assert any(moe_tiles.fits(params, rows) for rows in (1, 8, 32, 64, 1024)), str(tiles)
    for rows in (0, 1, 8, 32, 64, 1024):
        for blocks in (False, True):
            own = moe_tiles.tiles_fp8(rows, blocks, True)
            assert own.shared(1) <= moe_tiles.SHARED
            found = [p for p in moe_tiles.sets(1) if moe_tiles.fits(p, rows, blocks)]
            assert len(found) >= 4
            assert not blocks or all("/256/" not in p["gate_up"][7:] for p in found)


def test_host_functions_equal_reference() -> None:
    args = arguments("channel")
    x, w1, w2, s1, s2, weights, ids = args[:7]
    want = fused_experts_fp8.reference(*args)
    config = SimpleNamespace(use_fp8_w8a8=True, w1_scale=s1, w2_scale=s2, per_act_token_quant=True)
    assert rms(vllm_fused_experts(x, w1, w2, weights, ids, quant_config=config), want) < 2e-3
    runner = SimpleNamespace(inplace=False)
    for name in (
        t.cls
        for t in registry.get("fused_experts_fp8").targets
        if t.host == "sglang" and t.seam == "function"
    ):
        found = registry.op_class("fused_experts_fp8", name)(
            x, w1, w2, (weights, ids, None), runner, use_fp8_w8a8=True, per_channel_quant=True, w1_scale=s1,
            w2_scale=s2,
        )  # fmt: skip
        assert rms(found, want) < 2e-3
    x, w1, w2, s1, s2, weights, ids = (args := arguments("block"))[:7]
    config = SimpleNamespace(use_fp8_w8a8=True, w1_scale=s1, w2_scale=s2, block_shape=[128, 128])
    found = vllm_fused_experts(x, w1, w2, weights, ids, quant_config=config)
    assert rms(found, fused_experts_fp8.reference(*args)) < 2e-3


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("tensor", {3: torch.ones(4)}, r"w1_scale \(4,\) must be \(5,\) or \(5, 1\)"),
        ("channel", {4: torch.ones(5)}, "must both be per expert or both per row"),
        ("block", {3: torch.ones(5, 2, 1)}, r"w1_scale \(5, 2, 1\) must be \(5, 2, 2\)"),
        ("block", {10: [64, 128]}, r"block_shape \[64, 128\]"),
        ("block", {9: True}, "per_act_token_quant True: blocks are 128 x 128"),
        ("tensor", {8: None}, "a1_scale and a2_scale must both be None, or both"),
        ("tensor", {7: torch.ones(2)}, "a1_scale and a2_scale must both be None, or both"),
        ("channel", {7: torch.ones(1), 8: torch.ones(1)}, "without per_act_token_quant"),
        ("channel", {11: True}, "scale_ue8m0 needs scales of blocks"),
        ("tensor", {0: torch.zeros(9, 255)}, r"hidden_states \(9, 255\) must be \[tokens, 256\]"),
    ],
)
def test_mismatched_scales_are_rejected(kind: str, change: dict[int, Any], message: str) -> None:
    args = [change.get(i, a) for i, a in enumerate(arguments(kind))]
    with pytest.raises(ValueError, match=message):
        fused_experts_fp8.fused_experts_fp8(*args)


def test_groups_need_whole_blocks() -> None:
    with pytest.raises(ValueError, match="w2 has 64 columns, not a multiple of 128"):
        fused_experts_fp8.fused_experts_fp8(*arguments("block", intermediate=64))


def half(kind: str, tokens: int = 9, **more: Any) -> list[Any]:
    args = arguments(kind, tokens, **more)
    return [args[0].bfloat16(), *args[1:]]


@pytest.mark.parametrize(
    ("supports", "args", "message"),
    [
        (expert_libraries.supports_vllm_fp8, half("token"), "scales per token and per channel, or neither"),
        (expert_libraries.supports_vllm_fp8, arguments("channel"), "float16 or bfloat16, got torch.float32"),
        (expert_libraries.supports_vllm_fp8, half("channel", elsewhere=True), "without an expert_map"),
        (expert_libraries.supports_vllm_fp8, half("channel"), "for Hopper GPUs"),
        (expert_libraries.supports_vllm_fp8, half("tensor", 0), "an empty tensor"),
        (expert_libraries.supports_cutlass, half("block"), "do not support scales of blocks"),
        (expert_libraries.supports_cutlass, half("channel", on_input=True), "the router's weights to the output"),
        (expert_libraries.supports_deepgemm, half("channel"), "needs scales of blocks"),
        (expert_libraries.supports_deepgemm, half("block"), "at least 128 tokens"),
        (expert_libraries.supports_deepgemm, half("block", 128, intermediate=640), "for Hopper GPUs"),
    ],
)  # fmt: skip
def test_libraries_reject_unsupported_calls(supports: Any, args: list[Any], message: str) -> None:
    assert message in supports(*args)


def test_libraries_reject_other_weight_dtypes() -> None:
    args = half("tensor")
    args[1] = args[1].float()
    assert "not float8_e4m3fn" in expert_libraries.supports_vllm_fp8(*args)


def test_calls_without_tiles_are_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))
    w1, w2 = torch.zeros(2, 256, 256).to(FP8), torch.zeros(2, 256, 128).to(FP8)
    s1, s2 = torch.ones(2, 2, 2), torch.ones(2, 2, 1)

    def reason(tokens: int, *rest: Any) -> str | None:
        x, ids = torch.zeros(tokens, 256, dtype=torch.bfloat16), torch.zeros(tokens, 2, dtype=torch.int32)
        return fused_experts_fp8._supports_tiled(
            x, w1, w2, s1, s2, torch.ones(tokens, 2), ids, None, None, False, *rest
        )

    assert reason(32, [128, 128]) is None
    assert "fewer than 32 rows" in str(few := reason(31, [128, 128])) and isinstance(few, ForOthers)
    assert "needs scales of blocks" in str(reason(32, None))
