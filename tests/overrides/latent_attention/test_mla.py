"""Multi-head latent attention: the absorbed form and its kernels against the paper's equations with expanded keys."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.step_driver import Driver, make_runner
from support.tiny import make_tiny
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

from fastkernels import LLM, SamplingParams
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.execution.attention import make_backend
from fastkernels.overrides.latent_attention import mla_decode, mla_prefill
from fastkernels.overrides.latent_attention.expansion import Expansion
from fastkernels.overrides.latent_attention.mla_attention import LatentAttention

PROMPT = [(i * 37) % 500 for i in range(150)]
HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 24, 16, 20, 48, 8


def made(dtype: torch.dtype, seed: int = 0) -> tuple[LatentAttention, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=generator, dtype=torch.float64) * RANK**-0.5
    projection = SimpleNamespace(weight=weight.to(dtype))
    layer = LatentAttention(HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, VALUE, RANK, projection)
    return layer, generator


def expanded(
    layer: LatentAttention, q: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor
) -> torch.Tensor:
    """Equations 10 to 19 of arXiv 2405.04434 in float64: one sequence whose last tokens have queries q [n, H, D]."""
    weight = layer._kv_b_proj[0].weight.double().view(HEADS, NOPE + VALUE, RANK)
    up = torch.einsum("hdr,kr->khd", weight, latents.double())
    keys = torch.cat((up[..., :NOPE], rope.double()[:, None].expand(-1, HEADS, -1)), dim=-1)
    scores = torch.einsum("nhd,khd->hnk", q.double(), keys) / math.sqrt(NOPE + ROPE)
    n, k = len(q), len(latents)
    scores = scores.masked_fill(torch.arange(k) > torch.arange(k - n, k)[:, None], -math.inf)
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), up[..., NOPE:]).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [False, True])
@torch.inference_mode()
def test_layer_equals_expanded_equations(dtype: torch.dtype, backend: bool) -> None:
    """Two prompts, then a mixed batch: one decode, and a chunk that follows a cached prefix."""
    layer, generator = made(dtype)
    layer.kv_cache = tuple(torch.full(s, math.nan, dtype=dtype) for s in layer.cache_shapes(12, BLOCK))
    own: Any = make_backend(None, [layer], torch.device("cpu"), dtype) if backend else None
    steps = ([(17, 17), (9, 9)], [(1, 18), (5, 14)], [(1, 19), (1, 15)])
    data = [
        torch.randn(32, HEADS * (NOPE + ROPE) + RANK + ROPE, generator=generator).to(dtype) for _ in range(2)
    ]
    for step in steps:
        parts = [data[i][k - n : k] for i, (n, k) in enumerate(step)]
        q, latents, rope = torch.cat(parts).split([HEADS * (NOPE + ROPE), RANK, ROPE], dim=1)
        q = q.view(-1, HEADS, NOPE + ROPE)
        found = step_metadata(step, own)
        with forward_context(found):
            out = layer(q, latents, rope)
        expected = []
        for i, (n, k) in enumerate(step):
            queries, c, r = data[i][:k].split([HEADS * (NOPE + ROPE), RANK, ROPE], dim=1)
            expected.append(expanded(layer, queries[k - n :].view(n, HEADS, -1), c, r))
        error = 2e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(out.double(), torch.cat(expected), atol=error, rtol=error)


def step_metadata(step: list[tuple[int, int]], backend: Any) -> AttentionMetadata:
    """Metadata of sequences with (queries, keys) in scattered blocks; those with one query come first."""
    table = torch.tensor([[7, 1, 4], [2, 9, 5]], dtype=torch.int32)
    slots = [
        int(table[i, p // BLOCK]) * BLOCK + p % BLOCK
        for i, (n, k) in enumerate(step)
        for p in range(k - n, k)
    ]
    starts = torch.tensor([0, *(n for n, _ in step)]).cumsum(0).to(torch.int32)
    lens = torch.tensor([k for _, k in step], dtype=torch.int32)
    decoded = [k for n, k in step if n == 1]
    return AttentionMetadata(
        torch.tensor(slots), starts, lens, table, max(n for n, _ in step), max(k for _, k in step), len(decoded),
        max(decoded, default=0), backend,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_scores_are_not_rounded(dtype: torch.dtype) -> None:
    """Scores of about 200, whose rounding to the queries' dtype would change their softmax by 10 to 100%."""
    generator = torch.Generator().manual_seed(0)
    q = (torch.randn(7, HEADS, RANK + ROPE, generator=generator) * 32).to(dtype)
    cache = torch.randn(4, BLOCK, RANK + ROPE, generator=generator).to(dtype)
    cu, lens = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([9, 14], dtype=torch.int32)
    table, scale = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), (RANK + ROPE) ** -0.5
    for module, args in (
        (mla_prefill, (q, cache, cu, lens, table, 4, 14, scale, RANK)),
        (mla_decode, (q[:2], cache, lens, table, 14, scale, RANK)),
    ):
        wide = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
        one_rounding = torch.finfo(dtype).eps
        expected = module.reference(*wide)
        torch.testing.assert_close(
            module.SPEC.op(*args).double(), expected, atol=one_rounding, rtol=one_rounding
        )


def test_long_prompts_attend_to_expanded_keys(tmp_path: Path) -> None:
    """A prompt, and then a chunk after a cached prefix next to a decode: tokens as with latents alone."""
    folder = make_tiny(tmp_path, "deepseek_v3", "float32")
    ids, found = PROMPT, []
    for name in (None, "reference"):
        runner = make_runner(folder, attention_backend=name, max_model_len=200, max_num_batched_tokens=128)
        plans: list[Any] = []
        plan = runner.backend.plan
        runner.backend.plan = lambda *args, plan=plan, plans=plans: plans.append(plan(*args)) or plans[-1]
        driver = Driver(runner)
        for slot in (0, 1):
            driver.enter(slot)
        tokens = [
            driver.run((0, ids[:100])),
            driver.run((0, ids[100:101]), (1, ids[:70])),
            driver.run((0, [5]), (1, ids[70:140])),
        ]
        found.append(tokens)
        expanded = [isinstance(p.plan, Expansion) for p in plans]
        assert expanded == ([True] * 3 if name is None else [False] * 3)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "deepseek_v32"])
def test_model_with_the_fused_op_equals_the_separate_ops(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with expanded keys, then a short one next to a decode, and decodes."""
    folder = make_tiny(tmp_path, kind, "float32")
    found = []
    for fused in (False, True):
        if fused:
            monkeypatch.setenv("FASTKERNELS_PROVIDER", "mla_rope_store:reference")
        OPS["mla_rope_store"].reset()
        runner = make_runner(folder, max_model_len=200, max_num_batched_tokens=128)
        driver = Driver(runner)
        for slot in (0, 1):
            driver.enter(slot)
        steps = [((0, PROMPT[:100]),), ((0, PROMPT[100:101]), (1, PROMPT[:3])), ((0, [5]), (1, [7]))]
        found.append([driver.run(*rows) for rows in steps])
        layers = len([m for m in runner.model.modules() if isinstance(m, LatentAttention)])
        assert OPS["mla_rope_store"].calls == (len(steps) * layers if fused else 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("step", [64, 13])  # prompts with expanded keys, and in parts
def test_fp8_cache_equals_rounded_latents(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers with latents and rotary keys rounded to e4m3. The second run finds the prompt in the cache."""
    rotate = modeling.apply_rotary_pos_emb_interleave

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    def rotated(q: torch.Tensor, k: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(q, k, *more)
        return q, rounded(k)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb_interleave", rotated)
    folder = make_tiny(tmp_path, "deepseek_v3", "float32")
    model = modeling.DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda module, args, out: rounded(out))
    llm = LLM(
        str(folder), device="cpu", max_model_len=128, kv_cache_dtype="fp8", max_num_batched_tokens=step,
        max_num_seqs=4,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    for _ in range(2):
        out = llm.generate([PROMPT[:60]], sampling)[0].outputs[0]
        with torch.inference_mode():
            expected = model(torch.tensor([[*PROMPT[:60], *out.token_ids]])).logits[0, 59:-1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == out.token_ids
        for row, token, found in zip(expected, out.token_ids, out.logprobs, strict=True):
            assert found[token].logprob == pytest.approx(row[token].item(), abs=2e-3)


def test_backend_refuses_kernels_of_other_layers() -> None:
    layer, _ = made(torch.float32)
    layer.kv_cache = tuple(torch.zeros(s) for s in layer.cache_shapes(2, BLOCK))
    with pytest.raises(
        ValueError, match="attention_backend 'flashinfer' is not supported: mla_decode has no such"
    ):
        make_backend("flashinfer", [layer], torch.device("cpu"), torch.float32)


def test_layer_without_cache_is_refused() -> None:
    layer, _ = made(torch.float32)
    with pytest.raises(RuntimeError, match="no KV cache is bound"):
        layer(torch.zeros(1, HEADS, NOPE + ROPE), torch.zeros(1, RANK), torch.zeros(1, ROPE))
