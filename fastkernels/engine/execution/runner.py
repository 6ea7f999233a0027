"""Turns a StepInput into tokens: the model of one rank, its inputs, KV cache, graphs and sampler, on its device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core import compile_cache
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.cache import kv_cache
from fastkernels.engine.cache.kv_cache import Limits
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.execution.attention import AttentionBackend, make_backend
from fastkernels.engine.execution.graphs import Graphs, Outputs
from fastkernels.engine.execution.input_batch import InputBatch, Inputs
from fastkernels.engine.execution.profile import activation_bytes
from fastkernels.engine.execution.startup import Phases
from fastkernels.engine.execution.step import PromptTargets, StepInput, StepOutput, TokenLogprobs
from fastkernels.engine.execution.step_kernels import begin, finish
from fastkernels.engine.execution.warm_up import warm_up
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import LogprobsTensors
from fastkernels.models.common import build
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.sampling.sampling import sampling

log = logging.getLogger("fastkernels")
PROMPT_LOGITS = 1 << 26  # logits that prompt_logprobs makes at once


class ModelRunner:
    """The model of one rank. Every rank runs the same launches; a rank's own are only its weights and its caches.

    bind_cache=False leaves the KV cache out: ranks that must agree on its size call num_fitting_blocks() and then
    bind(num_blocks) with the smallest of their numbers. `phases` is told what each part of this took.
    Raises CheckpointError, UnknownName, or ValueError for a model that does not fit or an option that cannot be served.
    """

    backend: AttentionBackend
    limits: Limits
    batch: InputBatch

    def __init__(
        self, config: EngineConfig, folder: Path, hf_config: Any, rank: int = 0, bind_cache: bool = True,
        phases: Phases | None = None,
    ):  # fmt: skip
        self.config, self.hf_config, self.rank = config, hf_config, rank
        self._phases = phases or Phases()
        self.device = _device(config.device, rank)
        if self.device.type == "cuda":
            compile_cache.prepare_triton()
        self._mark("device")
        self.dtype = pick_dtype(config.dtype, hf_config, self.device)
        self.cache_dtype = kv_cache.cache_dtype(config.kv_cache_dtype, self.dtype)
        self.max_model_len = kv_cache.wanted_model_len(config, hf_config)
        self.model: Any = self._build(folder)
        self._mark("weights")
        self.layers = [m for m in self.model.modules() if isinstance(m, PagedAttention)]
        self._events = [torch.cuda.Event() if self.device.type == "cuda" else None for _ in range(2)]
        self.sampler = Sampler(self.device, hf_config.vocab_size, config.max_num_seqs)
        self.graphs: Graphs | None = None
        if bind_cache:
            self.bind(self.num_fitting_blocks())

    def num_fitting_blocks(self) -> int:
        """KV blocks that this rank has room for. On CUDA this runs the largest step. Raises ValueError for too few."""
        config, each = self.config, self.block_bytes()
        if config.num_blocks is not None:
            return config.num_blocks
        if config.kv_cache_memory is not None:
            return config.kv_cache_memory // each
        if self.device.type == "cpu":
            return kv_cache.CPU_CACHE // each
        self._bind(2, min(self.max_model_len, config.max_num_batched_tokens))
        weights, activations = activation_bytes(self)
        self._mark("largest step")
        del self.backend  # and its workspaces
        kv_cache.unbind(self.layers)
        budget = kv_cache.cuda_budget(config)
        blocks = (budget - weights - activations) // each
        least = -(-(config.max_model_len or 1) // config.block_size) + 1
        if blocks < least:
            length = config.max_model_len or config.block_size
            raise kv_cache.too_large(weights, activations, least * each, length, budget, config)
        return blocks

    def bind(self, num_blocks: int) -> None:
        """Make the KV cache and what depends on its size, capture graphs, and run steps of many sizes (warm_up.py).

        Raises ValueError for too few blocks.
        """
        self.limits = kv_cache.limits(self.config, self.max_model_len, num_blocks)
        self._bind(num_blocks, self.limits.max_model_len)
        self._mark("KV cache")
        self.capture()
        self._mark("graphs")
        if self.device.type == "cuda":
            warm_up(self)
            self._mark("warm-up")

    def capture(self) -> None:
        """Capture CUDA graphs (again): needed after every change of the model's code. Does nothing on the CPU."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        old, self.graphs = self.graphs, None  # old graphs' memory must stay until the new ones are captured
        self.graphs = Graphs(
            self._captured, self.backend, self.batch, self.device, self.config.max_num_seqs,
            self.limits.max_model_len, self.config.max_num_batched_tokens,
        )  # fmt: skip
        del old

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Step:
        """Start a step; does not wait for the device. At most two may be under way: the one before and this one."""
        if step.new_rows:
            self.sampler.set_rows(step.new_rows)
        plan = self.sampler.plan(self.batch.sample_slots(step), np.maximum(step.offsets, 0))
        self.batch.update(step.block_updates)
        inputs, outputs = self._run(step)
        rows = inputs.num_rows
        hidden, logits, drawn = outputs
        if logits is None:
            last = hidden[:rows] if inputs.decode_only else hidden.index_select(0, inputs.last_index[:rows])
            logits = self.model.compute_logits(last)
        drawn = drawn[:rows] if drawn is not None and plan.from_raw else None
        tokens, logprobs = self.sampler(
            logits[:rows], inputs.sample_slots[:rows], inputs.offsets[:rows], plan, drawn
        )
        if drawn is None:
            self.batch.keep(tokens, inputs)
        prompt = {t.row: self._prompt_logprobs(hidden, step, t) for t in step.prompt_targets}
        return Step(
            self.batch.sampled[inputs.host_turn, :rows], logprobs, prompt, self._events[inputs.host_turn]
        )

    def _run(self, step: StepInput) -> tuple[Inputs, Outputs]:
        """The step's inputs and outputs, as a graph where there is one, which may also have sampled."""
        found = self.graphs.run(step) if self.graphs is not None else None
        if found is not None:
            return found
        inputs = self.batch.load(step)
        metadata = self.backend.plan(inputs, self.batch.rows_table(inputs))
        return inputs, Outputs(self._forward(self.batch.known_ids(inputs), inputs, metadata))

    def _captured(self, inputs: Inputs, metadata: AttentionMetadata) -> Outputs:
        """What a graph runs. That of a decode batch goes on to the tokens: most requests sample from the logits as they
        are, and for those that do not, the launch samples again. In a mixed batch few rows are at the end of their
        prompt, and the head would run for all.
        """
        ids, drawing = begin(inputs, metadata.block_table, self.batch, self.sampler)
        hidden = self._forward(ids, inputs, metadata)
        if not inputs.decode_only:
            return Outputs(hidden)
        logits = self.model.compute_logits(hidden)
        tokens = sampling(logits, *drawing, inputs.offsets)
        finish(tokens, inputs, self.batch)
        return Outputs(hidden, logits, tokens)

    def _forward(self, ids: torch.Tensor, inputs: Inputs, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [T, H]."""
        with forward_context(metadata):
            return self.model(ids, inputs.positions)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: StepInput, wanted: PromptTargets
    ) -> list[LogprobsTensors]:
        """In slices, so that the logits of a long prompt need bounded memory."""
        start = int(step.query_lens[: wanted.row].sum())
        n, size = len(wanted.targets), max(1, PROMPT_LOGITS // self.hf_config.vocab_size)
        targets = torch.from_numpy(np.ascontiguousarray(wanted.targets, dtype=np.int64))
        if self.device.type == "cuda":
            targets = targets.pin_memory().to(self.device, non_blocking=True)
        return [
            self.sampler.prompt_logprobs(
                self.model.compute_logits(hidden[start + i : start + min(i + size, n)]),
                targets[i : i + size],
                wanted.num_logprobs,
            )
            for i in range(0, n, size)
        ]

    def block_bytes(self) -> int:
        """Bytes of one block in all layers, keys and values."""
        return kv_cache.block_bytes(self.layers, self.config.block_size, self.cache_dtype)

    def _mark(self, phase: str) -> None:
        """What ran until now was that phase of the start; on CUDA it has ended on the device, too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the first makes the device's context
        self._phases.mark(phase)

    def _bind(self, num_blocks: int, max_model_len: int) -> None:
        config = self.config
        kv_cache.bind(self.layers, num_blocks, config.block_size, self.cache_dtype, self.device)
        self.batch = InputBatch(self.device, config.max_num_seqs, max_model_len, config.block_size)
        self.backend = make_backend(config.attention_backend, self.layers, self.device, self.dtype)

    def _build(self, folder: Path) -> Any:
        config = self.config
        try:
            return build.build(
                folder, self.hf_config, self.device, self.dtype, config.load_format, config.seed
            )
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise ValueError(
                f"the model's weights do not fit: the GPU has {total / kv_cache.GIB:.2f} GiB, of which"
                f" {free / kv_cache.GIB:.2f} GiB are free now; take a larger tensor_parallel_size or a smaller model,"
                f" or end what else uses the GPU ({error})"
            ) from error


class Step:
    """A launched step (step.Pending). Its results are on their way to page-locked memory: its tokens to `tokens`, which
    the step after the next one takes again, as it does `event`.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs: LogprobsTensors | None,
        prompt: Mapping[int, list[LogprobsTensors]],
        event: torch.cuda.Event | None,
    ):
        self._tokens, self._event = tokens, event
        self._logprobs = None if logprobs is None else _parts_to_host(logprobs)
        self._prompt = {row: [_parts_to_host(p) for p in parts] for row, parts in prompt.items()}
        if event is not None:
            event.record()

    def result(self) -> StepOutput:
        """Wait for this step, and for nothing that was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        prompt = {}
        for row, parts in self._prompt.items():
            joined = (np.concatenate([p[i].numpy() for p in parts]) for i in range(3))
            prompt[row] = TokenLogprobs(*joined)
        logprobs = None if self._logprobs is None else TokenLogprobs(*(t.numpy() for t in self._logprobs))
        return StepOutput(self._tokens.numpy().copy(), logprobs, prompt)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _parts_to_host(parts: LogprobsTensors) -> tuple[torch.Tensor, ...]:
    return tuple(_to_host(t) for t in (parts.token_ids, parts.logprobs, parts.ranks))


def _device(name: str | None, rank: int) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, and there is none; use device='cpu'")
    if rank >= torch.cuda.device_count():
        raise ValueError(f"tensor_parallel_size needs GPU {rank}, and there are {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def pick_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype for EngineConfig.dtype. 'auto' is the checkpoint's, but bfloat16 for float32 on CUDA, and float32 for
    bfloat16 on a CPU that does not compute in bfloat16: there PyTorch emulates it, slower and less exactly.
    """
    if name != "auto":
        return getattr(torch, name)
    found = getattr(hf_config, "dtype", None) or torch.float32
    found = getattr(torch, found) if isinstance(found, str) else found
    if found == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    if found == torch.bfloat16 and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.info("this CPU does not compute in bfloat16: the dtype is float32")
        return torch.float32
    return found
