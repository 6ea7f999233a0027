"""What servers warm up with needs the kernels that prompts need later, so that none waits for a compiler."""

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

# Tokens: vLLM runs its largest step, then the sizes of its graphs, which our plugin has more of; SGLang a short prompt,
# then the sizes of its decode graphs.
VLLM = (8192, 1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *sizes_above(512, 2048))
SGLANG = (7, 1, 2, 4, *range(8, 257, 8))
SHORT = (3, 5, 63, 65, 127, 777, 1000, 1001, 1025, 1999, 2049, 3585, 3589, 4095, 4096)
LONG = (4097, 5001, 6000, 8191)
OPS: dict[str, Callable[[int], None]] = {
    "llama": partial(kernels.step, LLAMA, fp8=False), "llama-fp8": partial(kernels.step, LLAMA, fp8=True),
    "qwen": partial(kernels.step, QWEN, fp8=False, norms=True), "qwen-fp8": partial(kernels.step, QWEN, fp8=True),
    "others": partial(kernels.others, LLAMA),
}  # fmt: skip
# Larger tiles for larger tensors: where one scale is for all of it, and of element-wise kernels.
TILES = {"_absmax_kernel", "_tensor_kernel", "_gelu_kernel", "_quick_gelu_kernel", "_l2_norm_kernel"}
TWICE = {"_rms_norm_kernel", "_gemma_rms_norm_kernel"}  # many long rows are read twice


def names(found: set[str]) -> list[str]:
    return sorted(kernel.split()[0] for kernel in found)


@pytest.mark.parametrize("ops", OPS)
def test_vllm_serves_prompts_with_what_it_warmed_up(ops: str) -> None:
    warm = of(OPS[ops], VLLM)
    assert len(warm) > 15
    assert not names(of(OPS[ops], SHORT + LONG) - warm)


@pytest.mark.parametrize("ops", OPS)
def test_sglang_serves_prompts_with_what_its_graphs_needed(ops: str) -> None:
    """Its warm-up has no launch large enough to start in turn: such kernels are compiled with the early ones."""
    warm = of(OPS[ops], SGLANG)
    assert set(names(of(OPS[ops], SHORT) - warm)) <= TILES
    assert set(names(of(OPS[ops], LONG) - warm)) <= TILES | TWICE


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (128, 8), (256, 8)])
def test_experts(experts: int, topk: int) -> None:
    """Chunks of pairs grow with the prompt, so that of 2,049 to 4,096 tokens there may be a size for itself."""
    ops = partial(kernels.experts, {**MIXTRAL, "experts": experts, "topk": topk})
    warm = of(ops, VLLM)
    assert not names(of(ops, (n for n in SHORT if n <= 2048)) - warm)
    missing = names(of(ops, SHORT + LONG) - warm)
    assert set(missing) <= {"_count_kernel", "_place_kernel"} and len(missing) <= 4  # early and in turn


def test_batches() -> None:
    ops = partial(kernels.batch, LLAMA)
    assert not names(of(ops, (3, 5, 63, 65, 127, 255)) - of(ops, SGLANG))


def test_a_count_that_is_specialized_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would say if an activation's `total` were not in do_not_specialize."""
    monkeypatch.setattr(silu, "_silu_quant_kernel", JITFunction(silu._silu_quant_kernel.fn))
    ops = OPS["llama-fp8"]
    assert set(names(of(ops, SHORT + LONG) - of(ops, VLLM))) == {"_silu_quant_kernel"}


def test_a_kernel_is_compiled_for_large_launches_with_the_early_one() -> None:
    with kernels.compiled() as found:
        kernels.triton("embedding", kernels.empty(4, dtype=torch.int64), kernels.empty(1000, 4096))
        both = set(found)
        assert names(both) == ["_embedding_kernel"] * 2
        kernels.triton("embedding", kernels.empty(5000, dtype=torch.int64), kernels.empty(1000, 4096))
    assert found == both
