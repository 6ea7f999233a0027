"""CUDA graphs of prompts that are longer than those vLLM captures: without one, each kernel waits for its launch.

vLLM captures up to 512 tokens. A longer prompt's kernels are launched one by one, and a call of our ops costs more
there than one of inductor's own kernels; a replayed graph calls neither. Only the graphs that run prompts (PIECEWISE)
are added: the full graphs of decodes, and with them how FlashAttention splits a batch of their size, stay as they were.
A live engine has buffers of its largest graph's size by the time that it is patched: its sizes stay.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import torch

from fastkernels.core.env import Environment

log = logging.getLogger("fastkernels")
STATE = "_fastkernels_graphs"
# Tokens of the longest prompt in a graph: about where the chip takes as long for a layer as the CPU for its launches. A
# longer one would only be padded. Measured with Llama-3.1-8B's layers; with 8 bits they take half the time.
LONGEST, LONGEST_8_BIT, MEASURED = 2048, 4096, 4096 * 14336
EIGHT_BITS = ("fp8", "fbgemm_fp8", "modelopt")


def refusal(config: Any) -> str | None:
    """Why the sizes of `config`, vLLM's VllmConfig, stay whatever FASTKERNELS_GRAPH_TOKENS says, or None."""
    compilation, parallel, model = config.compilation_config, config.parallel_config, config.model_config
    if config.device_config.device_type != "cuda" or torch.version.hip is not None:
        return "CUDA graphs are CUDA's"
    if getattr(compilation.mode, "name", None) != "VLLM_COMPILE":
        return "the model is not compiled in pieces, so no graph can leave attention out"
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.mixed_mode().name != "PIECEWISE":
        return f"cudagraph_mode {getattr(compilation.cudagraph_mode, 'name', None)} has no graphs of pieces for prompts"
    if config.lora_config is not None:
        return "with LoRA every size is captured more than once"
    if config.speculative_config is not None:
        return "with speculative decoding the draft model would capture them too"
    if parallel.enable_dbo or getattr(parallel, "ubatch_size", 0) > 1:
        return "micro-batching (DBO) splits batches of its own sizes"
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism sizes buffers by the largest graph"
    if parallel.tensor_parallel_size > 1 and compilation.pass_config.enable_sp:
        return "sequence parallelism chooses sizes that its ranks can share out"
    if model.use_mla or model.is_hybrid or model.is_attention_free:
        return "the model's attention or state layers (MLA, Mamba, linear) size their decodes by the largest graph"
    own = compilation.cudagraph_capture_sizes
    if not own or own != own_sizes(config):
        return "cudagraph_capture_sizes are not vLLM's default"
    return None


def own_sizes(config: Any) -> list[int]:
    """The sizes that vLLM itself chooses for `config`, by its own method on a copy of it."""
    asked = copy.copy(config)
    asked.compilation_config = copy.copy(config.compilation_config)
    asked.compilation_config.cudagraph_capture_sizes = None
    asked.compilation_config.max_cudagraph_capture_size = None
    asked._set_cudagraph_sizes()
    sizes: list[int] = asked.compilation_config.cudagraph_capture_sizes
    return sizes


def sizes_above(last: int, most: int) -> list[int]:
    """Sizes over `last` that end with `most` tokens: padding is at most an eighth of a prompt, or 16 tokens."""
    sizes, size = [], last
    while size < most:
        step = max(16, (1 << size.bit_length()) // 16)
        size = min((size // step + 1) * step, most)
        sizes.append(size)
    return sizes


def longest(config: Any) -> int:
    """Tokens of the longest prompt in a graph, where nobody says: fewer of a model with larger layers."""
    text, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
    widths = getattr(text, "intermediate_size", None) or text.hidden_size  # a list where layers differ
    values = text.hidden_size * (max(widths) if isinstance(widths, list) else widths) // ranks
    most = LONGEST_8_BIT if multiplies_8_bits(config.quant_config) else LONGEST
    return most if values <= MEASURED else most * MEASURED // values // 64 * 64


def multiplies_8_bits(quantization: Any) -> bool:
    """Whether a checkpoint's linear layers multiply values of 8 bits, by vLLM's QuantizationConfig.

    Weights alone are not enough. Layers that are quantized while they are loaded are not looked at.
    """
    if quantization is None or quantization.get_name() in EIGHT_BITS:
        return quantization is not None
    schemes = getattr(quantization, "target_scheme_map", {}).values()  # of compressed-tensors
    return any(
        scheme.get("input_activations") is not None and scheme["weights"].num_bits == 8
        for scheme in schemes if scheme and scheme.get("weights") is not None
    )  # fmt: skip


class Graphs:
    """The added sizes of a worker. largest_own: the largest of vLLM's own."""

    def __init__(self, worker: Any, more: list[int]):
        self.worker, config = worker, worker.vllm_config.compilation_config
        self.largest_own: int = config.max_cudagraph_capture_size
        config.cudagraph_capture_sizes = [*config.cudagraph_capture_sizes, *more]
        config.max_cudagraph_capture_size = more[-1]

    def before_capture(self) -> None:
        """Settle when the runner, which is there now, has a KV cache: its tables are there then, graphs come later."""
        runner = self.worker.model_runner
        stock = runner.initialize_kv_cache

        @functools.wraps(stock)
        def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            self.settle()
            return result

        runner.initialize_kv_cache = initialize_kv_cache

    def settle(self) -> None:
        """Take the added sizes from the full graphs of decodes.

        FlashAttention's builder has a batch up to the largest graph use a fixed number of splits, for which as many
        float32 outputs of the batch are allocated; a longer prompt shall not.
        """
        runner, most = self.worker.model_runner, self.largest_own
        for builder in _builders(runner):
            if hasattr(builder, "max_cudagraph_size"):
                builder.max_cudagraph_size = most
        dispatcher, manager = _tables(runner)
        if dispatcher is not None:
            for mode, keys in dispatcher.cudagraph_keys.items():
                keys -= {k for k in keys if mode.name == "FULL" and k.num_tokens > most}
        if manager is not None:
            for table in (manager._candidates, manager._capture_descs):
                for key, found in table.items():
                    table[key] = [d for d in found if d.cg_mode.name != "FULL" or d.num_tokens <= most]


def _tables(runner: Any) -> tuple[Any, Any]:
    """(the V1 runner's dispatcher, the V2 runner's manager), those that are there; else None."""
    return getattr(runner, "cudagraph_dispatcher", None), getattr(runner, "cudagraph_manager", None)


def _builders(runner: Any) -> list[Any]:
    groups = (g for groups in getattr(runner, "attn_groups", []) for g in groups)
    return [builder for group in groups for builder in group.metadata_builders]


def extend(worker: Any) -> Graphs | None:
    """Add sizes up to FASTKERNELS_GRAPH_TOKENS tokens to the configuration of a worker, and say so; None: they stay.

    The worker has no runner yet, which reads them; `before_capture` is for when it has one.
    """
    config, asked = worker.vllm_config, Environment.read().graph_tokens
    if asked == 0:
        return None
    most = 0
    try:
        reason = refusal(config)
        if reason is None:
            most = longest(config) if asked is None else asked
    except Exception as error:  # another version's configuration: its model can be patched all the same
        reason = f"this vLLM's configuration is not known ({type(error).__name__}: {error})"
    if reason is not None:
        log.debug("vLLM's CUDA graph sizes stay: %s", reason)
        return None
    own = config.compilation_config.cudagraph_capture_sizes
    more = sizes_above(own[-1], min(most, config.scheduler_config.max_num_batched_tokens))
    if not more:
        return None
    if worker.rank == 0:
        log.info(
            "prompts of up to %d tokens run in CUDA graphs, not %d: %d more sizes are captured"
            " (FASTKERNELS_GRAPH_TOKENS=0 leaves vLLM's)", more[-1], own[-1], len(more),
        )  # fmt: skip
    return Graphs(worker, more)
