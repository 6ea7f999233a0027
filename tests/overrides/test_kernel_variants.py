"""The warm-up of a server compiles all kernels that later prompts need, so no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from fk_integrations.vllm.graphs import sizes_above
from support.kernels import kernel_variants as kernels
from support.kernels.kernel_variants import LLAMA, MIXTRAL, QWEN, of
from triton.runtime.jit import JITFunction

from fastkernels.overrides.kit.overlap import follow
from fastkernels.overrides.quant import silu_mul_quant_fp8 as silu

if not isinstance(follow, JITFunction):
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

# Numbers of tokens: vLLM runs its largest step, then the sizes of its graphs, to which our plugin adds some. SGLang
# runs a short prompt, then the sizes of its decode graphs.
VLLM = (8192, 1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *sizes_above(512, 2048))
SGLANG = (7, 1, 2, 4, *range(8, 257, 8))
SHORT = (3, 5, 63, 65, 127, 777, 1000, 1001, 1025, 1999, 2049, 3585, 3589, 4095, 4096)
LONG = (4097, 5001, 6000, 8191)
OPS: dict[str, Callable[[int], None]] = {
    "llama": partial(kernels.step, LLAMA, fp8=False), "llama-fp8": partial(kernels.step, LLAMA, fp8=True),
    "qwen": partial(kernels.step, QWEN, fp8=False, norms=True), "qwen-fp8": partial(kernels.step, QWEN, fp8=True),
    "others": partial(kernels.others, LLAMA),
}  # fmt: skip
# Kernels with larger tiles for larger tensors: those with one scale per tensor, elementwise ones, and those of a
# recurrence whose long prompts are cut into segments.
TILES = {
    "_absmax_kernel", "_tensor_kernel", "_gelu_kernel", "_quick_gelu_kernel", "_l2_norm_kernel", "_softplus_kernel",
    "_swiglu_transition_kernel", "linear_kernel", "_join_kernel",
}  # fmt: skip
TWICE = {"_rms_norm_kernel", "_gemma_rms_norm_kernel"}  # kernels that read many long rows twice


def names(found: set[str]) -> list[str]:
    return sorted(kernel.split()[0] for kernel in found)


@pytest.mark.parametrize("ops", OPS)
def test_vllm_warm_up_compiles_all_kernels(ops: str) -> None:
    warm = of(OPS[ops], VLLM)
    assert len(warm) > 15
    assert not names(of(OPS[ops], SHORT + LONG) - warm)


@pytest.mark.parametrize("ops", OPS)
def test_sglang_graph_sizes_compile_almost_all_kernels(ops: str) -> None:
    """No launch of SGLang's warm-up is large enough to start in order; that variant is compiled with the early one."""
    warm = of(OPS[ops], SGLANG)
    assert set(names(of(OPS[ops], SHORT) - warm)) <= TILES
    assert set(names(of(OPS[ops], LONG) - warm)) <= TILES | TWICE


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (128, 8), (256, 8)])
def test_vllm_warm_up_compiles_kernels_of_experts(experts: int, topk: int) -> None:
    """Chunks of pairs grow with the prompt: prompts of 2,049 to 4,096 tokens may need a chunk size of their own."""
    ops = partial(kernels.experts, {**MIXTRAL, "experts": experts, "topk": topk})
    warm = of(ops, VLLM)
    assert not names(of(ops, (n for n in SHORT if n <= 2048)) - warm)
    missing = names(of(ops, SHORT + LONG) - warm)
    assert set(missing) <= {"count_kernel", "place_kernel"} and len(missing) <= 4  # early and in turn


def test_sglang_graph_sizes_compile_kernels_of_batches() -> None:
    ops = partial(kernels.batch, LLAMA)
    assert not names(of(ops, (3, 5, 63, 65, 127, 255)) - of(ops, SGLANG))


def test_specialized_count_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without do_not_specialize for an activation's `total`, the tests above fail."""
    monkeypatch.setattr(silu, "_silu_quant_kernel", JITFunction(silu._silu_quant_kernel.fn))
    ops = OPS["llama-fp8"]
    assert set(names(of(ops, SHORT + LONG) - of(ops, VLLM))) == {"_silu_quant_kernel"}


def test_early_and_in_order_variants_compile_together() -> None:
    with kernels.compiled() as found:
        kernels.triton("embedding", kernels.empty(4, dtype=torch.int64), kernels.empty(1000, 4096))
        both = set(found)
        assert names(both) == ["_embedding_kernel"] * 2
        kernels.triton("embedding", kernels.empty(5000, dtype=torch.int64), kernels.empty(1000, 4096))
    assert found == both
