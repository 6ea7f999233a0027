"""CUDA graphs for longer prompts than vLLM captures.

vLLM captures up to 512 tokens. The kernels of a longer prompt are launched one by one, and there a call of our ops
costs more than one of inductor's own kernels; a replayed graph calls neither. Only graphs that run prompts (PIECEWISE)
are added. The full graphs of decodes stay unchanged, and so does FlashAttention's split of batches of their sizes. A
live engine has allocated buffers for its largest graph, so its sizes stay.
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
# Tokens of the longest prompt in a graph: at about this size the GPU takes as long for a layer as the CPU for its
# launches, and a longer graph only adds padding. Measured with Llama-3.1-8B's layers on an H200; with 8 bits they take
# half the time.
LONGEST, LONGEST_8_BIT, MEASURED = 2048, 4096, 4096 * 14336
EIGHT_BITS = ("fp8", "fbgemm_fp8", "modelopt")


def refusal(config: Any) -> str | None:
    """Why the sizes of `config`, a VllmConfig, cannot be extended; None: they can."""
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
    default = copy.copy(config)
    default.compilation_config = copy.copy(config.compilation_config)
    default.compilation_config.cudagraph_capture_sizes = None
    default.compilation_config.max_cudagraph_capture_size = None
    default._set_cudagraph_sizes()
    sizes: list[int] = default.compilation_config.cudagraph_capture_sizes
    return sizes


def sizes_above(last: int, most: int) -> list[int]:
    """Sizes above `last`, up to `most` tokens; padding is at most an eighth of a prompt, or 16 tokens."""
    sizes, size = [], last
    while size < most:
        step = max(16, (1 << size.bit_length()) // 16)
        size = min((size // step + 1) * step, most)
        sizes.append(size)
    return sizes


def longest(config: Any) -> int:
    """Tokens of the longest prompt in a graph, by default: fewer for a model with larger layers."""
    text, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
    widths = getattr(text, "intermediate_size", None) or text.hidden_size  # a list where layers differ
    values = text.hidden_size * (max(widths) if isinstance(widths, list) else widths) // ranks
    most = LONGEST_8_BIT if multiplies_8_bits(config.quant_config) else LONGEST
    return most if values <= MEASURED else most * MEASURED // values // 64 * 64


def multiplies_8_bits(quantization: Any) -> bool:
    """Whether a checkpoint's linear layers multiply 8-bit values, by vLLM's QuantizationConfig.

    Activations must have 8 bits, too. Layers that are quantized while loading are not considered.
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
        """Call `settle` once the runner has a KV cache: its tables exist then, and graphs are captured later."""
        runner = self.worker.model_runner
        stock = runner.initialize_kv_cache

        @functools.wraps(stock)
        def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            self.settle()
            return result

        runner.initialize_kv_cache = initialize_kv_cache

    def settle(self) -> None:
        """Remove the added sizes from the full graphs of decodes.

        For a batch up to the largest graph, FlashAttention's builder uses a fixed number of splits and allocates as
        many float32 outputs of the batch, which would be too large for a long prompt.
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
    """(the V1 runner's dispatcher, the V2 runner's manager), None for the one that does not exist."""
    return getattr(runner, "cudagraph_dispatcher", None), getattr(runner, "cudagraph_manager", None)


def _builders(runner: Any) -> list[Any]:
    groups = (g for groups in getattr(runner, "attn_groups", []) for g in groups)
    return [builder for group in groups for builder in group.metadata_builders]


def extend(worker: Any) -> Graphs | None:
    """Add sizes up to FASTKERNELS_GRAPH_TOKENS tokens to a worker's configuration and log it; None: they stay.

    Called before the worker has a runner, which reads them; `before_capture` is called when it has one.
    """
    config, requested = worker.vllm_config, Environment.read().graph_tokens
    if requested == 0:
        return None
    most = 0
    try:
        reason = refusal(config)
        if reason is None:
            most = longest(config) if requested is None else requested
    except Exception as error:  # another version's configuration; its model can still be patched
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
