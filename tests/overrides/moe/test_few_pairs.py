"""Experts of few tokens in two launches: few_pairs.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import warm
from support.kernels.ahead import compile_for, launched, usage

from fastkernels.core import registry
from fastkernels.core.dispatch import ForOthers
from fastkernels.core.spec import Case
from fastkernels.overrides.moe import few_pairs
from fastkernels.overrides.moe import fused_experts as experts
from fastkernels.overrides.moe.cases import router_choice

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "few_pairs_cases.py"
SPEC = registry.get("fused_experts")
OLMOE, QWEN15 = (64, 8, 2048, 1024), (60, 4, 2048, 1408)


def layer(sizes: tuple[int, ...], tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Return the arguments of a call with these experts, top k, hidden and intermediate size."""
    count, topk, hidden, inner = sizes
    if device == "meta":
        made = [
            torch.empty(s, dtype=dtype, device=device) for s in ((tokens, hidden), (count, 2 * inner, hidden))
        ]
        made.append(torch.empty(count, hidden, inner, dtype=dtype, device=device))
        kinds = (torch.float32, torch.int32)
        return [*made, *(torch.empty(tokens, topk, dtype=kind, device=device) for kind in kinds)]
    generator = torch.Generator(device).manual_seed(tokens)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    weights = (
        randn(count, 2 * inner, hidden, scale=hidden**-0.5),
        randn(count, hidden, inner, scale=inner**-0.5),
    )
    return [randn(tokens, hidden), *weights, *router_choice(tokens, count, topk, False, generator, device)]


def test_kernels_match_the_reference() -> None:
    done = warm.run([SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == dict.fromkeys(found) and len(found) == 6


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda a: (torch.cat([a[0]] * 9), *a[1:3], *(torch.cat([t] * 9) for t in a[3:])),
            "9 tokens, not 1 to 8",
        ),
        (lambda a: (a[0], a[1].half(), *a[2:]), "w1 is torch.float16"),
        (lambda a: (*a[:2], a[2].transpose(1, 2), *a[3:]), "w2 is torch.float32 with strides"),
        (lambda a: (a[0][:0], *a[1:3], *(t[:0] for t in a[3:])), "0 tokens"),
        (lambda a: (a[0].double(), *a[1:]), "dtype torch.float64"),
    ],
)
def test_other_calls_are_for_other_kernels(change: Any, why: str) -> None:
    args = layer((4, 2, 16, 16), 1, "cpu", torch.float32)
    assert experts._supports_few(*args) is None
    assert why in str(experts._supports_few(*change(args)))
    assert why.startswith("dtype") or isinstance(experts._supports_few(*change(args)), ForOthers)


def test_only_a_table_or_a_measurement_runs_it() -> None:
    names = [p.name for p in experts.fused_experts.providers]
    assert names.index("triton") < names.index("triton-few")


@pytest.mark.parametrize("params", few_pairs.PARAMS[:2], ids=str)
def test_two_launches_read_ahead_without_spills(params: dict[str, int], tmp_path: Path) -> None:
    found = launched(lambda: experts._few(*layer(OLMOE, 1, "meta"), **params))
    assert {launch[0].fn.__name__ for launch in found} == {"gate_up_kernel", "down_kernel"}
    for launch in found:
        compiled = compile_for(launch, 90)
        assert usage(compiled, tmp_path)["STACK"] == 0
        assert "cp.async" in compiled.asm["ptx"]  # loads of later steps are under way
        assert compiled.metadata.shared <= 48 << 10  # several programs of an SM


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("params", few_pairs.PARAMS, ids=str)
@pytest.mark.parametrize("sizes", [OLMOE, QWEN15, (7, 3, 1000, 328)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_gpu_result_matches_the_reference(
    sizes: tuple[int, ...], tokens: int, params: dict[str, int]
) -> None:
    args = layer(sizes, tokens, "cuda")
    want = SPEC.reference(*args)
    got = experts._few(*args, **params)
    case = Case(
        "gpu", dict(zip(("experts", "topk", "hidden", "intermediate"), sizes, strict=True)), "bfloat16"
    )
    limit = SPEC.tolerance_for(case, torch.bfloat16)
    torch.testing.assert_close(got.float(), want.float(), atol=limit.atol, rtol=limit.rtol)
    assert torch.equal(got, experts._few(*args, **params))


@pytest.mark.gpu
def test_gpu_graph_is_valid_for_any_routing() -> None:
    args = layer(OLMOE, 2, "cuda")
    experts._few(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts._few(*args)
    for shift in (0, 5):
        args[4].add_(shift).remainder_(64)
        graph.replay()
        torch.testing.assert_close(out, SPEC.reference(*args), atol=3e-2, rtol=3e-2)
