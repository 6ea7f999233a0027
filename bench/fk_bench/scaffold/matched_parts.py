"""The parts of a model of transformers that ops compute, as modules that call these ops at the model's real sizes.

For models whose whole no description expresses: their matched modules still get task files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from fk_integrations.transformers.matching import Kind, Match, attention_call, match
from torch import nn

from fastkernels.core import registry
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.layers.decoder import NoRope, make_rope
from fastkernels.overrides.attention.vllm import VllmAttention

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
GATES = {"gated_mlp": "silu_and_mul", "gated_gelu_mlp": "gelu_and_mul"}
NORMS = ("rms_norm", "gemma_rms_norm", "layer_norm", "t5_layer_norm")
EPS = 1e-6  # where a norm's own cannot be read

Arguments = Callable[[int], Sequence[Any]]  # of the op, for a number of tokens


class NoCall(ValueError):
    """A matched module whose call does not follow from the module alone; the message says why."""


@dataclass(frozen=True)
class Step:
    """The input of each part in a step."""

    tokens: int
    positions: torch.Tensor


class _Op(nn.Module):
    """`count` calls of an op, as that many modules of one name make."""

    def __init__(self, op: str, arguments: Arguments, count: int) -> None:
        super().__init__()
        self.op, self.arguments, self.count = op, arguments, count

    def forward(self, step: Step) -> None:
        function: Any = registry.get(self.op).op
        given = self.arguments(step.tokens)
        for _ in range(self.count):
            function(*given)


class _Head(nn.Module):
    """The projection to logits, of the tokens that are sampled."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        function: Any = registry.get("logits_processor").op
        return function(hidden, torch.empty(self.shape))


class _Attention(nn.Module):
    """Causal attention over the cache, and the rotary embedding of its queries and keys."""

    def __init__(self, a: d.Attention, rope: nn.Module, count: int) -> None:
        super().__init__()
        self.a, self.count, self.rotary_emb = a, count, rope
        self.attn = VllmAttention(
            a.heads, a.head_size, a.head_size**-0.5 if a.scale is None else a.scale, num_kv_heads=a.kv_heads,
            logits_soft_cap=a.softcap or None, per_layer_sliding_window=a.window,
        )  # fmt: skip

    def forward(self, step: Step) -> None:
        for _ in range(self.count):
            q, k, v = (
                torch.empty(step.tokens, n * self.a.head_size)
                for n in (self.a.heads, self.a.kv_heads, self.a.kv_heads)
            )
            q, k = self.rotary_emb(step.positions, q, k)
            self.attn(q, k, v)


class MatchedParts(nn.Module):
    """Calls each op once for each module that it computes, with the interface of a language model's skeleton.

    without: {op: why some of its modules make no call here}
    """

    def __init__(self, model: Any, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.without: dict[str, str] = {}
        matched = {
            path: match(module) for path, module in model.named_modules()
        }  # its probes need real tensors
        with _of_dtype(dtype):
            self._build(model, config, matched)

    def _build(self, model: Any, config: Any, matched: dict[str, Match]) -> None:
        head = model.get_output_embeddings()
        self.head = None if head is None else (head.weight.shape[0], head.weight.shape[1])
        if self.head is not None:
            self.lm_head = _Head(self.head)
        modules = dict(model.named_modules())
        groups: dict[Any, list[tuple[str, Any, Match]]] = {}
        covered: set[str] = set()  # activations in an MLP that one op computes
        for path, module in modules.items():
            found = matched[path]
            if found.kind is not Kind.OP or not found.strict or module is head or path in covered:
                continue
            if found.op in GATES:
                covered |= {
                    f"{path}.{name}" for name, child in module.named_children() if match(child).op != "linear"
                }
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
            key = found.op, path.rpartition(".")[2], shapes, repr(found.arguments), _window(module)
            groups.setdefault(key, []).append((path, module, found))
        self.parts = nn.ModuleList()
        for members in groups.values():
            path, module, found = members[0]
            parent = modules.get(path.rpartition(".")[0])
            try:
                made = _part(module, found, parent, model, config, len(members))
            except NoCall as error:
                self.without[found.op] = f"{path}: {error}"
                continue
            self.parts.append(_named(path.rpartition(".")[2], made))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        step = Step(len(input_ids), positions)
        with _of_dtype(self.dtype):
            for part in self.parts:
                for call in part.children():
                    call(step)
            return torch.empty(len(input_ids), self.head[1] if self.head else 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with _of_dtype(self.dtype):
            return (
                torch.empty(len(hidden), self.config.vocab_size)
                if self.head is None
                else self.lm_head(hidden)
            )


@contextmanager
def _of_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are on the device 'meta' and of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _named(name: str, call: nn.Module) -> nn.Module:
    """A container in which the call has this name."""
    holder = nn.Module()
    holder.add_module(name if not hasattr(holder, name) else f"{name}_", call)
    return holder


def _window(module: Any) -> int | None:
    found = getattr(module, "sliding_window", None)
    return found if isinstance(found, int) else None


def _part(module: Any, found: Match, parent: Any, model: Any, config: Any, count: int) -> nn.Module:
    """The calls of modules that are equal to this one. Raises NoCall."""
    op = found.op
    weight = getattr(module, "weight", None)
    if op == "attention":
        return _causal(module, model, config, count)
    if op == "rotary_emb":
        raise NoCall("its calls are those of the attention that reads it")
    make: Callable[..., Arguments]
    if op == "linear":
        make = _linear
    elif op == "embedding":
        make = _embedding
    elif op in NORMS:
        make = _norm
    elif op in GATES:
        op, make = GATES[op], _gate
    elif op in ("topk_softmax", "grouped_topk"):
        make = _router
    elif op in ("fused_experts", "fused_experts_gelu"):
        make = _experts
    elif op == "rms_norm_gated":
        make = _gated_norm
    elif op == "convolution" and isinstance(module, nn.Conv1d):
        make = _convolution
    elif weight is None and not list(module.children()) and not list(module.parameters()):
        make = _activation
    else:
        raise NoCall(f"the sizes of its inputs do not follow from {type(module).__name__} alone")
    return _Op(op, make(module, found, parent, config), count)


def _like(t: Any) -> torch.Tensor:
    return torch.empty(tuple(t.shape))


def _optional(t: Any) -> torch.Tensor | None:
    return None if t is None else _like(t)


def _linear(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    if module.weight.dim() != 2:
        raise NoCall("patches of an image or of sound, not tokens")
    turned = type(module).__name__ == "Conv1D"
    outs, ins = reversed(module.weight.shape) if turned else module.weight.shape
    weight, bias = torch.empty(outs, ins), _optional(module.bias)
    return lambda tokens: (torch.empty(tokens, ins), weight, bias)


def _embedding(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    weight = _like(module.weight)

    def arguments(tokens: int) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(len(weight), (tokens,), generator=generator, device="cpu"), weight

    return arguments


def _eps(module: Any) -> float:
    small = (v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2)
    return next(small, EPS)


def _norm(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    if getattr(module, "weight", None) is None:
        raise NoCall("a norm without a weight does not show how wide its rows are")
    weight, bias, eps = _like(module.weight), _optional(getattr(module, "bias", None)), _eps(module)
    parameters = (weight, bias, eps) if found.op == "layer_norm" else (weight, eps)
    size, heads = len(weight), _of(config, "num_attention_heads")
    rows = (heads, size) if size != config.hidden_size and heads * size <= 4 * config.hidden_size else (size,)
    return lambda tokens: (torch.empty(tokens, *rows), *parameters)


def _of(config: Any, name: str) -> int:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else 0


def _last_linear(parent: Any) -> Any:
    """The linear layer that reads what the others of a block lead to."""
    linears = [c for c in parent.children() if match(c).op == "linear"] if parent is not None else []
    if not linears:
        raise NoCall("no linear layer next to it shows how wide its rows are")
    return linears[-1]


def _width(linear: Any) -> int:
    """The inputs of a linear layer."""
    return int(linear.weight.shape[0 if type(linear).__name__ == "Conv1D" else 1])


def _gate(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    inner = _width(_last_linear(module))
    inside = [match(c) for c in module.children()]
    given = next((m.arguments for m in inside if m.op == "gelu"), {})
    more = (given.get("approximate", "none"),) if found.op == "gated_gelu_mlp" else ()
    return lambda tokens: (torch.empty(tokens, 2 * inner), *more)


def _activation(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    inner = _width(_last_linear(parent))
    schema: Any = registry.get(found.op).op
    names = [a.name for a in schema.overload._schema.arguments]
    more = [found.arguments[n] for n in names[1:] if n in found.arguments]
    return lambda tokens: (torch.empty(tokens, inner), *more)


def _router(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    if not matrices:
        raise NoCall("no projection shows the number of experts")
    count, a = len(matrices[0]), found.arguments
    if found.op == "topk_softmax":
        return lambda tokens: (torch.empty(tokens, count), a["topk"], a["renormalize"])
    tensors = [*module.named_parameters(), *module.named_buffers()]
    bias = next(
        (torch.empty(count, dtype=torch.float32) for n, _ in tensors if n.endswith("correction_bias")), None
    )
    names = ("topk", "renormalize", "num_expert_group", "topk_group", "scoring_func")
    return lambda tokens: (
        torch.empty(tokens, count), *(a[n] for n in names), bias, a.get("routed_scaling_factor", 1.0)
    )  # fmt: skip


def _experts(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    held = dict(module.named_parameters())
    top_k = next((n for name in TOP_K if (n := _of(config, name))), 0)
    if set(held) != {"gate_up_proj", "down_proj"} or not top_k:
        raise NoCall(f"its sizes do not follow from {', '.join(held)} and the config")
    both = tuple(held["gate_up_proj"].shape)
    hidden = config.hidden_size
    if both[2] != hidden:
        both = (both[0], both[2], both[1])
    w1, w2 = torch.empty(both), torch.empty(both[0], hidden, both[1] // 2)

    def arguments(tokens: int) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(tokens, both[0], generator=generator, dtype=torch.float32, device="cpu")
        weights, ids = scores.topk(top_k)
        return torch.empty(tokens, hidden), w1, w2, weights.to("meta"), ids.int()

    return arguments


def _gated_norm(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    weight, eps = _like(module.weight), _eps(module)
    before = bool(found.arguments.get("norm_before_gate", True))
    return lambda tokens: (
        torch.empty(tokens, len(weight)), weight, torch.empty(tokens, len(weight)), eps, None, before
    )  # fmt: skip


def _convolution(module: Any, found: Match, parent: Any, config: Any) -> Arguments:
    """A window over the tokens, as an image of one row."""
    weight, bias = _like(module.weight)[:, :, None], _optional(module.bias)
    padding = [0, *module.padding] if not isinstance(module.padding, str) else [0, 0]
    more = ([1, *module.stride], padding, [1, *module.dilation], module.groups)
    window = module.dilation[0] * (module.kernel_size[0] - 1) + 1
    return lambda tokens: (torch.empty(1, module.in_channels, 1, max(tokens, window)), weight, bias, *more)


def _causal(module: Any, model: Any, config: Any, count: int) -> nn.Module:
    """Attention with the heads, window and soft cap of one call on the meta device, and a rotary embedding."""
    seen = attention_call(module)
    if seen is None:
        raise NoCall("its attention cannot be called alone")
    query, key, _, given = seen
    a = d.Attention(
        query.shape[1], key.shape[1], query.shape[-1], scale=given.get("scaling"), softcap=given.get("softcap") or 0.0,
        window=given.get("sliding_window"), max_positions=_of(config, "max_position_embeddings") or 8192,
    )  # fmt: skip
    rope: nn.Module = NoRope()
    if any(match(m).op == "rotary_emb" and match(m).strict for m in model.modules()):
        try:
            rope = make_rope(replace(a, rope=d.rope(config, partial=True)))
        except (
            ValueError,
            AttributeError,
            KeyError,
            TypeError,
        ):  # a table for each type of layer, or of another kind
            rope = NoRope()
    return _Attention(a, rope, count)
