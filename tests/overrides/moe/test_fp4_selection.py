"""The choice of blocks for experts with 4-bit floats: proposals fit the chip, and uneven or many pairs change them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.core.tuning import Chip
from fastkernels.overrides.moe import fp4_selection as selection
from fastkernels.overrides.moe import fused_experts_nvfp4 as nvfp4
from fastkernels.overrides.moe import fused_experts_swigluoai as mxfp4
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe.selection import Call
from fastkernels.verify import measure

QWEN3_30B, GPT_OSS_20B = (128, 128, 8, 2048, 768), (32, 32, 4, 2880, 2880)
H200 = Chip("NVIDIA H200", 132, 4.8e12, 50 << 20, (9, 0))


@pytest.mark.parametrize("tokens", [8, 64, 256])
@pytest.mark.parametrize(("sizes", "glu", "form"), [(QWEN3_30B, 2, few.NVFP4), (GPT_OSS_20B, 1, few.MXFP4)])
def test_ranked_blocks_fit_an_sm(sizes: tuple[int, ...], glu: int, form: int, tokens: int) -> None:
    found = selection.ranked(Call(*sizes, tokens), glu, form)
    assert sorted(b.tokens for b in found) == [8, 16, 24, 32]
    for blocks in found:
        for p in blocks.plans(sizes[3], sizes[2], sizes[4], glu, form):
            assert p.ring and p.shared <= few.SHARED and p.threads <= 1024


def test_more_pairs_of_an_expert_lead_to_larger_blocks() -> None:
    """As timed on an H200: 16 pairs were faster for GPT-OSS-20B at 64 and Qwen3-30B at 128 tokens, not with fewer."""
    of_gpt = [selection.default(Call(*GPT_OSS_20B, n), 1, few.MXFP4) for n in (8, 32, 64)]
    of_qwen = [selection.default(Call(*QWEN3_30B, n), 2, few.NVFP4) for n in (32, 64, 128)]
    assert list(map(str, of_gpt)) == ["None", "None", "16 10x1/3/2 10x1/3/2"]
    assert list(map(str, of_qwen)) == ["None", "None", "16 10x1/3/2 6x1/3/1"]
    assert selection.ranked(Call(*GPT_OSS_20B, 256), 1, few.MXFP4)[0].tokens == 32


@pytest.mark.parametrize("op", ["fused_experts_nvfp4", "fused_experts_swigluoai"])
def test_proposals_are_parameters_of_the_op(op: str) -> None:
    spec = registry.get(op)
    key, sizes = spec.op.key, QWEN3_30B if op == "fused_experts_nvfp4" else (*GPT_OSS_20B, True)
    found = key.propose((*sizes, torch.bfloat16), (64,), H200)
    assert len(found) == 3 and len({params["blocks"] for _, params in found}) == 3
    provider = next(p for p in spec.op.providers if p.name == found[0][0])
    assert {name for params in provider.params for name in params} == {"blocks"}
    assert key.propose((*sizes, torch.float16), (64,), H200) == ()
    assert key.propose((*sizes, torch.bfloat16), (64,), replace(H200, capability=(10, 0))) == ()
    assert key.propose((*sizes, torch.bfloat16), (1,), H200) == ()  # too few pairs to be sorted


@pytest.mark.parametrize(
    ("op", "dims"), [(nvfp4, {}), (mxfp4, {"mxfp4": True}), (mxfp4, {})], ids=["nvfp4", "mxfp4", "floats"]
)
def test_key_of_a_call_gives_back_its_case(op: object, dims: dict[str, bool]) -> None:
    sizes = {"tokens": 3, "experts": 5, "topk": 2, "hidden": 64, "intermediate": 96}
    spec = op.SPEC  # type: ignore[attr-defined]
    args = spec.inputs(Case("case", {**sizes, **dims}, "bfloat16"), "cpu", torch.Generator().manual_seed(0))
    key = spec.op.key
    shape, found = key.of(*args)
    named = key.dims(**dict(zip((*key.shape, *key.sizes), (*shape, *found), strict=True)))
    assert named == {**sizes, **dims}


def test_plans_follow_the_given_blocks() -> None:
    ids = torch.zeros(64, 8, dtype=torch.int32)
    w1, w2 = torch.zeros(128, 1536, 1024, dtype=torch.uint8), torch.zeros(128, 2048, 384, dtype=torch.uint8)
    first, second = nvfp4._plans(ids, w1, w2, None, "24 8x1/3/3 6x1/3/1")
    assert (first.tokens, first.rows, first.phases, second.rows) == (24, 8, 3, 6)
    assert first.glu == 2 and not first.weighted and second.weighted and second.topk == 1


def test_proposal_that_cannot_take_a_matrix_does_not_run() -> None:
    """Half of GPT-OSS's inner size is a multiple of 32, and the kernel of prompts takes multiples of 64."""
    sizes = {"tokens": 64, "experts": 4, "topk": 2, "hidden": 64, "intermediate": 96}
    case = Case("case", {**sizes, "mxfp4": True}, "bfloat16")
    args = mxfp4.SPEC.inputs(case, "cpu", torch.Generator().manual_seed(0))
    provider = next(p for p in mxfp4.SPEC.op.providers if p.name == "mxfp4-cuda")
    proposal = measure.Subject(provider, {"blocks": mxfp4.PROMPT})
    assert "rows of w2 have 96 weights, not a multiple of 64" in str(proposal.unsupported(args))
    point = measure.Point("fused_experts_swigluoai", (), ())
    assert "not a multiple of 64" in str(measure.wrong(point, proposal, proposal, args))
