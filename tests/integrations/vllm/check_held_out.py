"""Held-out architectures in vLLM: each one unpatched, patched and after undo."""

import gc

import pytest
from support.checks import PROMPTS
from support.hosts.held_out import ARCHITECTURES, check_same, make_held_out, transformers_logprobs
from support.hosts.vllm_engine import generate, make_llm

import fastkernels
from fastkernels.core import registry
from fastkernels.core.reasons import Kind
from fastkernels.models.common.descriptions.registry import architectures

# vLLM's CPU kernel for rotary embeddings misreads three-dimensional queries, which these models have.
WRONG_IN_VLLM = ("deepseek_v2", "deepseek_v3")
# vLLM's NewGELU rounds after each of its operations and ours once, so close choices differ in bfloat16.
ROUNDED_IN_VLLM = ("gptj",)


def unnamed(report, llm) -> set[str]:
    """The classes of modules without parts that no row names, without methods and the layers that they compute.

    A private class counts as its base: MLAAttention has a _DecodeConcatQuantFP8, which is a QuantFP8, for fp8 caches.
    """
    (leaves,) = llm.apply_model(
        lambda model: {
            next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("_"))
            for module in model.modules()
            if not list(module.children())
            and not hasattr(module, "quant_method")
            and type(module).__name__ not in ("ModuleList", "Dropout")  # of no layers; without effect
        }
    )
    text = " ".join([row.host_class for row in report.rows] + [row.reason for row in report.rows])
    return {name for name in leaves if name not in text and not name.endswith("Method")}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_held_out_model_is_patched_and_undone(name, tmp_path):
    dtype = "float32" if name in WRONG_IN_VLLM + ROUNDED_IN_VLLM else "bfloat16"
    model = make_held_out(tmp_path / name, name, dtype)
    # vLLM's latent attention for CPUs with AMX cannot pack float32 weights.
    backend = "CPU_MLA" if name in WRONG_IN_VLLM else None
    llm = make_llm(
        str(model), dtype=dtype, max_model_len=128, num_gpu_blocks_override=32, attention_backend=backend
    )
    try:
        stock = generate(llm)
        report = fastkernels.patch(llm, ops=registry.op_names())
        patched = generate(llm)
        report.refresh()
        print(report)
        if name in WRONG_IN_VLLM:
            for prompt, (tokens, logprobs) in zip(PROMPTS, patched, strict=True):
                assert logprobs == pytest.approx(transformers_logprobs(model, prompt, tokens), abs=0.01)
        else:
            check_same(patched, stock)
        assert report.active and not any(row.fallbacks for row in report.rows)
        if ARCHITECTURES[name][0] in architectures():
            assert not any(kind is Kind.UNKNOWN_VERSION for row in report.rows for kind in row.kinds)
            assert not unnamed(report, llm)
        report.undo()
        assert generate(llm) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
