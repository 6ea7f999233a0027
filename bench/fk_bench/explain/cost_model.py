"""The calls of a model's step, each with its bytes and operations, computed before anything is installed.

The model is built from its config (model_configs) without memory, on the device 'meta', and run once under a mode that
answers every op with the op's shape function. So there is no list of layers that could differ from the engine's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fastkernels.core import parallel, registry
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import StateSpec
from fastkernels.core.spec import Case
from fastkernels.models.common.layers.cross import CrossAttention
from fastkernels.models.common.plans import build
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.sampling.sampling import sampling
from fk_bench.kernels.judge.clock import roofline

PHASES = ("decode", "prefill")
BLOCK_SIZE = 16  # of the KV cache: the default of EngineConfig and of vLLM
GROUPS = {
    "linear": "linears", "logits_processor": "linears",
    "attention_decode": "attention", "attention_prefill": "attention", "store_kvcache": "attention",
    "rope_store_kvcache": "attention", "concat_and_cache_mla": "attention", "mla_decode": "attention",
    "mla_prefill": "attention", "mla_sparse": "attention", "paged_mqa_logits": "attention",
    "indexer_k_quant_and_cache": "attention", "top_k_per_row": "attention",
    "topk_softmax": "experts", "grouped_topk": "experts", "fused_experts": "experts",
    "fused_experts_fp8": "experts", "fused_experts_gelu": "experts", "fused_experts_swigluoai": "experts",
    "all_reduce": "collectives", "all_gather": "collectives",
}  # fmt: skip
REST = "rest"
ROUTERS = ("topk_softmax", "grouped_topk")  # their outputs decide which weights are read


@dataclass(frozen=True)
class Call:
    """One line of a step: `count` calls of an op with the same sizes from modules of the same name.

    label    last part of the name of the module that owns the weight, or makes the call: 'qkv_proj', 'sampler'
    case     the call as a case of the op's SPEC; None for a collective
    bytes    of device memory that one call must move; flops: operations
    weights  bytes of its parameters (an embedding reads only some rows of them)
    """

    op: str
    label: str
    dtype: str
    bytes: int
    flops: int
    case: Case | None = None
    weights: int = 0
    count: int = 1

    @property
    def group(self) -> str:
        return GROUPS.get(self.op, REST)

    def floor_us(self, gpu: roofline.Peaks | None) -> float | None:
        """Lower bound of one call in microseconds on this GPU; None if the GPU is unknown."""
        return roofline.floor_us(self.bytes, self.flops, self.dtype, gpu)


@dataclass(frozen=True)
class Step:
    """One step of one rank. tokens: computed in it; sampled: new tokens generated."""

    model: str
    architecture: str
    phase: str
    batch: int
    context: int
    tensor_parallel: int
    dtype: str
    tokens: int
    calls: tuple[Call, ...]
    weights: int = 0  # bytes of this rank's parameters and buffers; tied ones count once

    @property
    def sampled(self) -> int:
        return self.batch

    def floor_ms(self, gpu: roofline.Peaks | None) -> float | None:
        floors = [(c.floor_us(gpu), c.count) for c in self.calls]
        if any(f is None for f, _ in floors):
            return None
        return sum((f or 0.0) * n for f, n in floors) / 1e3


def group_sums(calls: Iterable[Call], value: Callable[[Call], float | None]) -> dict[str, float | None]:
    """{group: sum of count x value(call)}: the step's linears, attention, experts, rest. None if a call of the group
    has no value. Groups are in the order of their first call."""
    found: dict[str, float | None] = {}
    for call in calls:
        one, before = value(call), found.get(call.group, 0.0)
        found[call.group] = None if one is None or before is None else before + call.count * one
    return found


def step(
    model: str,
    config: Any,
    phase: str = "decode",
    batch: int = 1,
    context: int = 1024,
    tensor_parallel: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """The calls of one step of rank 0: `batch` sequences of `context` tokens each.

    decode: the last token of each is computed, the others are cached; prefill: all of them are computed. Sampling is
    greedy. Experts are drawn at random with equal probability.
    Raises ValueError for a phase, batch, context or number of ranks that the model does not support, and for a model
    that attends to an encoder.
    """
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r} is not {' or '.join(PHASES)}")
    if batch < 1 or context < 1:
        raise ValueError(f"batch {batch} and context {context} must be 1 or more")
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and context > most:
        raise ValueError(f"context {context} is more than the {most} positions of {model}")
    trace = _Trace()
    with torch.no_grad(), trace.collectives(tensor_parallel):
        skeleton: Any = build.skeleton(Path(model), config, dtype).eval().requires_grad_(False)
        if any(isinstance(layer, CrossAttention) for layer in skeleton.modules()):
            raise ValueError(
                f"{model} attends to an encoder's states: only steps of decoders alone are modelled"
            )
        tokens = trace.run(skeleton, config.vocab_size, phase, batch, context, dtype)
    return Step(
        model, build.architecture_of(config, Path(model)), phase, batch, context, tensor_parallel,
        str(dtype).removeprefix("torch."), tokens, trace.calls(), build.weight_bytes(skeleton),
    )  # fmt: skip


def calls_of(
    skeleton: Any, vocab: int, phase: str, batch: int, context: int, dtype: torch.dtype
) -> tuple[Call, ...]:
    """The calls of such a step of modules on the device 'meta', with the interface of a language model's."""
    trace = _Trace()
    with torch.no_grad():
        trace.run(skeleton, vocab, phase, batch, context, dtype)
    return trace.calls()


def _bind(model: nn.Module, blocks: int, dtype: torch.dtype) -> int:
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = layer.new_cache(blocks, BLOCK_SIZE, dtype, "meta")  # type: ignore[assignment]
        if isinstance(kept := getattr(layer, "keeps", None), StateSpec):
            layer.states = kept.new(blocks, dtype, "meta")  # type: ignore[assignment]
    return blocks


def _batch(
    vocab: int, q_lens: Sequence[int], context: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """input_ids [T], positions [T] and the metadata with values, as the engine makes them; block 0 stays unused."""
    batch, each = len(q_lens), -(-context // BLOCK_SIZE)
    table = torch.arange(1, blocks, dtype=torch.int32).view(batch, each)
    positions = torch.cat([torch.arange(context - n, context) for n in q_lens])
    rows = torch.arange(batch).repeat_interleave(torch.tensor(q_lens))
    slots = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    lens = torch.full((batch,), context, dtype=torch.int32)
    decodes = batch if max(q_lens) == 1 else 0
    ids = torch.randint(vocab, (sum(q_lens),), generator=torch.Generator().manual_seed(0))
    return ids, positions, AttentionMetadata(
        slots, starts, lens, table, max(q_lens), context, decodes, context if decodes else 0,
        state_slots=torch.arange(1, batch + 1, dtype=torch.int32), fresh=starts.diff() == lens,
    )  # fmt: skip


class _Trace(TorchDispatchMode):
    """Answers our ops without running them, and records each call with the module that made it.

    Tensors of which only sizes matter are on 'meta'; those with values that a case depends on (ids, slots, lengths, a
    router's output) are on the CPU. Results of calls are on 'meta' again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[str] = []
        self._unsummed = ""  # label of the last module that left the sum over ranks to the norm behind it
        self._parameters: dict[int, tuple[str, int]] = {}  # id: (label of its module, bytes)
        self._lines: dict[tuple[str, ...], Call] = {}
        # Keeps the arguments alive: keys contain their addresses
        self._cases: dict[Any, tuple[Case, list[Any]]] = {}

    def watch(self, model: nn.Module) -> None:
        """Record the names of this model's modules and parameters."""
        for name, module in model.named_modules():
            label = name.rpartition(".")[2]
            module.register_forward_pre_hook(lambda *_, label=label: self._inside.append(label))
            module.register_forward_hook(lambda module, *_, label=label: self._leave(module, label))
            for p in module.parameters(recurse=False):
                self._parameters.setdefault(id(p), (label, p.numel() * p.element_size()))

    def run(self, skeleton: Any, vocab: int, phase: str, batch: int, context: int, dtype: torch.dtype) -> int:
        """Run one step of a model's skeleton; returns the number of its tokens."""
        q_lens = [1 if phase == "decode" else context] * batch
        self.watch(skeleton)
        blocks = _bind(skeleton, batch * -(-context // BLOCK_SIZE) + 1, dtype)
        ids, positions, metadata = _batch(vocab, q_lens, context, blocks)
        with self, forward_context(metadata):
            hidden = skeleton(ids, positions)
            # The last token of each sequence: [B, H]; which rows they are does not matter.
            self.sample(skeleton.compute_logits(hidden[:batch]))
        return sum(q_lens)

    def _leave(self, module: nn.Module, label: str) -> None:
        self._inside.pop()
        if getattr(module, "leaves_sum", False):
            self._unsummed = label

    @contextmanager
    def collectives(self, size: int) -> Iterator[None]:
        """Act as rank 0 of `size` ranks and record their collectives. Raises ValueError for an impossible size."""
        if size < 1:
            raise ValueError(f"tensor-parallel size {size} must be 1 or more")
        if parallel.get_tp_size() != 1:
            raise ValueError("this process is itself a rank of a tensor-parallel group")
        if size > 1:
            parallel.bind(0, size, self._all_reduce, lambda t, dim: self._all_gather(t, dim, size))
        try:
            yield
        finally:
            parallel.reset()

    def _all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        # The layer whose output is summed is more informative than the norm or the decoder layer that sums it.
        label, self._unsummed = self._unsummed or self._inside[-1], ""
        self._collective("all_reduce", label, t, 2 * t.numel() * t.element_size())
        return t

    def _all_gather(self, t: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        self._collective("all_gather", self._inside[-1], t, (1 + size) * t.numel() * t.element_size())
        shape = list(t.shape)
        shape[dim] *= size
        return t.new_empty(shape)

    def _collective(self, op: str, label: str, t: torch.Tensor, size: int) -> None:
        """Record a collective. Its floor is this rank's own memory traffic; the link is slower."""
        self._note(Call(op, label, str(t.dtype).removeprefix("torch."), size, 0))

    def sample(self, logits: torch.Tensor) -> None:
        """The engine's sampler on [B, V], greedy."""
        rows = logits.shape[0]
        zero, one = torch.zeros(rows), torch.ones(rows)
        whole = torch.zeros(rows, dtype=torch.int64)
        self._inside.append("sampler")
        sampling(logits, zero, whole.int(), one, zero.clone(), whole, whole.clone())
        self._inside.pop()

    def calls(self) -> tuple[Call, ...]:
        """The calls, in the order of their first occurrence in the step."""
        return tuple(self._lines.values())

    def _note(self, call: Call) -> None:
        dims = "" if call.case is None else repr(sorted(call.case.dims.items()))
        key = (call.op, call.label, call.dtype, str(call.bytes), dims)
        before = self._lines.get(key)
        self._lines[key] = call if before is None else replace(before, count=before.count + 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "fastkernels":
            # Values do not matter once one tensor is on 'meta'.
            every = args, kwargs or {}
            found = [leaf for leaf in tree_leaves(every) if isinstance(leaf, torch.Tensor)]
            if any(t.is_meta for t in found) and not all(t.is_meta for t in found):
                every = tree_map(
                    lambda a: a.to("meta") if isinstance(a, torch.Tensor) and a.dim() else a, every
                )
            return func(*every[0], **every[1])
        schema = func._schema
        given = [
            args[i] if i < len(args) else (kwargs or {}).get(a.name, a.default_value)
            for i, a in enumerate(schema.arguments)
        ]
        name = schema.name.partition("::")[2]
        self._see(name, given)
        answer = func(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given))
        return _routed(name, given, answer) if name in ROUTERS else answer

    def _see(self, op: str, given: list[Any]) -> None:
        spec, key = registry.get(op), (op, *map(_key, given))
        if key not in self._cases:
            self._cases[key] = spec.case_of(given, op), given
        case = self._cases[key][0]
        owned = [self._parameters[id(a)] for a in given if id(a) in self._parameters]
        # A layer calls its norms as functions: the owner of the weight is more informative than the caller.
        label = owned[0][0] if owned else self._inside[-1]
        label = "lm_head" if op == "logits_processor" else label  # a tied weight belongs to the embedding
        weights = sum(size for _, size in owned)
        self._note(Call(op, label, case.dtype, spec.bytes_moved(case), spec.flops(case), case, weights))


def _key(value: Any) -> Any:
    """The properties of an argument that a case depends on, without reading the tensor."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    place = None if value.is_meta else value.data_ptr()
    return place, tuple(value.shape), value.stride(), value.dtype


def _routed(op: str, given: list[Any], answer: Any) -> tuple[torch.Tensor, ...]:
    """A router's output with values, from random logits that are the same in every layer."""
    generator = torch.Generator().manual_seed(0)

    def random(value: Any) -> Any:
        return torch.randn(value.shape, generator=generator) if isinstance(value, torch.Tensor) else value

    found = registry.get(op).reference(*map(random, given))
    return tuple(f.to(a.dtype) for f, a in zip(found, answer, strict=True))
