"""Modules of a decoder-only language model, built from its description."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions import description
from fastkernels.models.common.descriptions.description import (
    NUMBERED,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Mixer,
    Mlp,
    NoMixer,
    Norm,
    Recurrent,
)
from fastkernels.models.common.descriptions.registry import describe, find
from fastkernels.models.common.layers import activation_modules, concurrent, state_layers, whole_layers
from fastkernels.models.common.layers.bidirectional import BidirectionalAttention
from fastkernels.models.common.layers.clamped_experts import ClampedExperts
from fastkernels.models.common.layers.cross import CrossAttention
from fastkernels.models.common.layers.gemma4_blocks import ExpertsBesideMlp, LayerInputBlock, LayerInputs
from fastkernels.models.common.layers.inner_learning import InnerMlp, Learner
from fastkernels.models.common.layers.latent import DecoderLatentAttention
from fastkernels.models.common.layers.media import Media
from fastkernels.models.common.layers.sandwich import sandwich_of
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.vllm import VllmSiluAndMul
from fastkernels.overrides.attention.vllm import VllmAttention
from fastkernels.overrides.block.decoder_layer import DecoderLayer as WholeLayer
from fastkernels.overrides.block.decoder_layer import apply_norm
from fastkernels.overrides.block.self_attention import HeadNorms
from fastkernels.overrides.block.vllm import LlamaAttention, VllmLlamaDecoderLayer, VllmQwen3DecoderLayer
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.all_reduce_rms_norm import all_reduce_rms_norm
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.kit.fusion import fuses
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.linear.linear_silu_and_mul import fuses as fuses_swiglu
from fastkernels.overrides.linear.linear_silu_and_mul import linear_silu_and_mul
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
    VllmUnquantizedLinearMethod,
)
from fastkernels.overrides.moe import sparse_moe
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.sandwich_norm import sandwich_norm
from fastkernels.overrides.norm.vllm import VllmGemmaRMSNorm, VllmLayerNorm, VllmRMSNorm
from fastkernels.overrides.rope.vllm import get_rope
from fastkernels.overrides.routing.grouped_topk import grouped_topk
from fastkernels.overrides.routing.topk_softmax import topk_softmax

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the number of experts in configs


def make_norm(norm: Norm, size: int) -> nn.Module:
    """The norm of rows of `size` channels. Raises ValueError for an unknown kind."""
    if norm.kind == "rms":
        return VllmRMSNorm(size, eps=norm.eps)
    if norm.kind == "gemma":
        return VllmGemmaRMSNorm(size, eps=norm.eps)
    if norm.kind == "unit":
        return VllmRMSNorm(size, eps=norm.eps, has_weight=False)
    if norm.kind in ("layer", "layer_1p"):
        made = VllmLayerNorm(size, norm.eps, bias=norm.bias)
        if norm.kind == "layer_1p":
            made.weight.weight_loader = _load_plus_one  # type: ignore[union-attr, attr-defined]
        return made
    raise ValueError(f"norm kind {norm.kind!r} is not one of 'rms', 'gemma', 'unit', 'layer', 'layer_1p'")


def _load_plus_one(param: nn.Parameter, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded + 1)


def add_and_norm(
    norm: nn.Module | None, delta: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(residual + delta), residual + delta); a residual's memory is overwritten."""
    if residual is None:
        return (delta if norm is None else norm(delta)), delta
    if getattr(norm, "sums_ranks", False):
        if type(norm) is VllmRMSNorm:
            return apply_norm(norm, delta, residual), residual
        delta = parallel.all_reduce(delta)  # the class of a candidate gets a sum, as in a model of one rank
    if isinstance(norm, (VllmRMSNorm, VllmGemmaRMSNorm)):
        return norm(delta, residual)
    if isinstance(norm, VllmLayerNorm) and fuses(gated_residual, (layer_norm,), delta):
        added, normed = gated_residual(
            residual[None], delta[None], None, None, None, norm.weight, norm.bias, norm.eps
        )
        return normed[0], added[0]
    residual = residual + delta
    return (residual if norm is None else norm(residual)), residual


def _leave_sums_to_norms(layers: Sequence[Any], last: nn.Module) -> None:
    """Let row-parallel layers in front of a norm return their rank's part, which the norm sums: one kernel, not two."""
    norms = [x.norm_at(0) if isinstance(x, DecoderLayer) else x.input_layernorm for x in layers[1:]]
    for layer, behind in zip(layers, [*norms, last], strict=True):
        if isinstance(layer, WholeLayer):
            _leave_sum(layer.self_attn.o_proj, layer.post_attention_layernorm)
            layer.__dict__["unsummed"] = _leave_sum(layer.mlp.down_proj, behind)
        if not isinstance(layer, DecoderLayer):
            continue
        if layer.parallel or layer.multiplier != 1.0 or layer.cross or layer.moe or layer.layer_input:
            continue
        if layer.layer_scalar is not None or not all(layer.parts):
            continue
        attention, mlp = (getattr(layer, part) for part in layer.parts)
        if layer.norm_at(1) is None and type(attention) in (DecoderAttention, DecoderLatentAttention):
            _leave_sum(attention.o_proj, layer.norm_at(2))
        if layer.norm_at(3) is None and type(mlp) in (DecoderMlp, DecoderExperts):
            row: Any = mlp.down_proj if type(mlp) is DecoderMlp else mlp
            layer.unsummed = _leave_sum(row, behind)


def _leave_sum(row: Any, norm: Any) -> bool:
    """Leave the sum of `row` to a norm behind it that can add ranks; returns whether it can."""
    kind = type(norm)  # a subclass may compute something else
    if kind is not VllmRMSNorm or not norm.has_weight or norm.variance_size_override is not None:
        return False
    row.reduce_results, row.leaves_sum, norm.sums_ranks = False, True, True
    norm.norm_of_sum = _norm_of_sum
    return True


def _norm_of_sum(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """`apply_norm` of the sum of x over the ranks."""
    if fuses(all_reduce_rms_norm, (all_reduce, rms_norm), x):
        return all_reduce_rms_norm(x, norm.weight, norm.variance_epsilon, residual)
    cast_first = not torch.compiler.is_compiling()
    return rms_norm(parallel.all_reduce(x), norm.weight, norm.variance_epsilon, residual, None, cast_first)


def own_sums(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    """Return (module, attribute, value) of the changes with which row-parallel layers sum for themselves again.

    Candidates for a whole layer, and for a part of this model, get and return sums.
    """
    values = {
        "leaves_sum": ("reduce_results", True),
        "sums_ranks": ("sums_ranks", False),
        "unsummed": ("unsummed", False),
    }
    return [
        (module, *change)
        for module in model.modules()
        for marker, change in values.items()
        if getattr(module, marker, False)
    ]


class WideNorm(nn.Module):
    """RMS norm over all heads, of which this rank has a part: x [T, size / ranks] to the same."""

    def __init__(self, norm: Norm, size: int, heads: int) -> None:
        super().__init__()
        self.rank, self.ranks = parallel.get_tp_rank(), parallel.get_tp_size()
        parallel.divide(heads, self.ranks, "heads under one norm")
        self.size, self.eps = size, norm.eps
        self.weight = nn.Parameter(torch.ones(size // self.ranks), requires_grad=False)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        if loaded.shape != (self.size,):
            raise ValueError(f"expected shape ({self.size},)")
        param.data.copy_(loaded.chunk(self.ranks)[self.rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = parallel.all_reduce(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype) * self.weight


def make_wide_norm(norm: Norm, size: int, heads: int) -> nn.Module:
    """The norm of rows of `size` channels, of which a rank has the part of its heads."""
    return WideNorm(norm, size, heads) if parallel.get_tp_size() > 1 else make_norm(norm, size)


class NoRope(nn.Module):
    """A layer without positions."""

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return q, k


def make_rope(a: Attention) -> nn.Module:
    """The rotary embedding of an attention layer."""
    if a.rope is None:
        return NoRope()
    return get_rope(a.head_size, a.max_positions, not a.interleaved, a.rope)


class DecoderAttention(HeadNorms, LlamaAttention):
    """Self-attention of a description: positions [T] and hidden_states [T, H] to [T, H]."""

    def __init__(self, a: Attention, hidden: int, prefix: str) -> None:
        nn.Module.__init__(self)
        self.hidden_size, self.head_dim, self.gated = hidden, a.head_size, a.gated
        self.qkv_proj = VllmQKVParallelLinear(
            hidden, a.head_size, a.heads * (2 if a.gated else 1), a.kv_heads, bias=a.bias,
            prefix=f"{prefix}.qkv_proj", v_head_size=0 if a.keys_as_values else None,
        )  # fmt: skip
        self.o_proj = VllmRowParallelLinear(
            a.heads * a.head_size, hidden, bias=a.out_bias, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb = make_rope(a)
        self._split_heads()
        if a.gated:
            self.num_heads, self.q_size, self._all_heads = self.num_heads // 2, self.q_size // 2, a.heads
            for parameter in self.qkv_proj.parameters():
                parameter.weight_loader = self._load_gated  # type: ignore[attr-defined]
        self.norms = "head" if a.head_norm else "wide" if a.wide_norm else ""
        for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
            if a.head_norm is not None:
                setattr(self, name, make_norm(a.head_norm, a.head_size))
            elif a.wide_norm is not None:
                setattr(self, name, make_wide_norm(a.wide_norm, heads * a.head_size, heads))
        self.v_norm = None if a.value_norm is None else make_norm(a.value_norm, a.head_size)
        if a.out_norm is not None:
            self.attn_sub_norm = make_wide_norm(a.out_norm, a.heads * a.head_size, a.heads)
        if a.sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads), requires_grad=False)
            self.sinks.weight_loader = self._load_sinks  # type: ignore[attr-defined]
        sizes = self.num_heads, a.head_size, a.head_size**-0.5 if a.scale is None else a.scale
        if a.causal:
            self.attn = VllmAttention(
                *sizes, num_kv_heads=self.num_kv_heads, logits_soft_cap=a.softcap or None,
                per_layer_sliding_window=a.window, prefix=f"{prefix}.attn", sinks=getattr(self, "sinks", None),
                alibi_slopes=self._own_slopes(a),
            )  # fmt: skip
        else:
            self.attn = BidirectionalAttention(*sizes, self.num_kv_heads)
        if a.by_head:
            self.queries = a.heads // a.kv_heads  # that share a key head
            for parameter in self.qkv_proj.parameters():
                if not hasattr(parameter, "output_dim"):
                    continue  # a scale of x
                parameter.weight_loader = self._load_by_head  # type: ignore[attr-defined]

    def _attend(self, positions: torch.Tensor, hidden_states: torch.Tensor, *batch: Any) -> torch.Tensor:
        if self.gated:
            return self._attend_gated(positions, hidden_states)
        if self.v_norm is None:
            return super()._attend(positions, hidden_states, *batch)
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, qkv.shape[-1] - self.q_size - self.kv_size], dim=-1)
        v = v if v.shape[-1] else k
        if not torch.compiler.is_compiling() and self._fuses(qkv):
            self._rope_and_store(positions, q, k, v)
            k = v = None
        else:
            v = self.v_norm(v.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            q, k = self.rotary_emb(positions, *self._before_rope(q, k))
        out, _ = self.o_proj(self.attn(q, k, v))
        return out

    def _attend_gated(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, gate, k, v = qkv.split([self.q_size, self.q_size, self.kv_size, self.kv_size], dim=-1)
        if not torch.compiler.is_compiling() and self._fuses(qkv):
            self._rope_and_store(positions, q, k, v)
            k = v = None
        else:
            q, k = self.rotary_emb(positions, *self._before_rope(q, k))
        out, _ = self.o_proj(self.attn(q, k, v) * torch.sigmoid(gate))
        return out

    def _load_gated(
        self, param: nn.Parameter, loaded: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """Sort the rows [heads, 2, head_size] of a projection to queries and gates: those of each rank together."""
        if (
            loaded_shard_id == "q"
            and loaded.dim() > 0
            and loaded.shape[0] == 2 * self._all_heads * self.head_dim
        ):
            ranks = self._all_heads // self.num_heads
            rows = loaded.reshape(ranks, self.num_heads, 2, self.head_dim, *loaded.shape[1:])
            loaded = rows.transpose(1, 2).reshape(loaded.shape)
        self.qkv_proj.weight_loader(param, loaded, loaded_shard_id)

    def _head_norms(self) -> tuple[Any, ...]:
        return (self.q_norm, self.k_norm) if self.norms == "head" else ()

    def _rest_of_norms(self) -> tuple[Any, ...]:
        return super()._rest_of_norms() if self.v_norm is None else (0.0, True)

    def _before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norms == "wide":
            return self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        return super()._before_rope(q, k) if self.norms else (q, k)

    def _after_attention(self, out: torch.Tensor) -> torch.Tensor:
        return self.attn_sub_norm(out) if hasattr(self, "attn_sub_norm") else out

    def _fuses(self, qkv: torch.Tensor) -> bool:
        one_eps = self.v_norm is None or self.v_norm.variance_epsilon == self.q_norm.variance_epsilon
        return self.norms != "wide" and one_eps and super()._fuses(qkv)

    def _own_slopes(self, a: Attention) -> list[float] | None:
        """ALiBi's slopes of this rank's heads."""
        first = self.num_heads * parallel.get_tp_rank()
        return None if a.slopes is None else a.slopes[first : first + self.num_heads]

    def _load_sinks(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        size, rank = len(param), parallel.get_tp_rank()
        if loaded.shape != (size * parallel.get_tp_size(),):
            raise ValueError(f"expected shape ({size * parallel.get_tp_size()},)")
        param.data.copy_(loaded.narrow(0, rank * size, size))

    def _load_by_head(
        self, param: nn.Parameter, loaded: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """Sort the rows [kv_heads, queries + 2, head_size] of a packed projection to those of q, k and v."""
        if loaded_shard_id is None and loaded.numel() > 1:
            rows = loaded.reshape(-1, self.queries + 2, self.head_dim, *loaded.shape[1:])
            parts = rows[:, :-2], rows[:, -2], rows[:, -1]
            loaded = torch.cat([part.reshape(-1, *loaded.shape[1:]) for part in parts])
        self.qkv_proj.weight_loader(param, loaded, loaded_shard_id)


class SharedAttention(nn.Module):
    """Self-attention of a description that reads the keys and values of an earlier layer, through its `attn`."""

    attn: VllmAttention

    def __init__(self, a: Attention, hidden: int, prefix: str, attn: VllmAttention) -> None:
        super().__init__()
        self.q_proj = VllmColumnParallelLinear(
            hidden, a.heads * a.head_size, bias=a.bias, prefix=f"{prefix}.q_proj"
        )
        self.q_norm = None if a.head_norm is None else make_norm(a.head_norm, a.head_size)
        self.rotary_emb = make_rope(a)
        self.__dict__["attn"] = attn  # a module of the earlier layer, not one more of this model
        self.o_proj = VllmRowParallelLinear(
            a.heads * a.head_size, hidden, bias=a.out_bias, prefix=f"{prefix}.o_proj"
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, _ = self.q_proj(hidden_states)
        if self.q_norm is not None:
            q = self.q_norm(q.unflatten(-1, (self.attn.num_heads, self.attn.head_size))).flatten(-2)
        q, _ = self.rotary_emb(positions, q, None)
        out, _ = self.o_proj(self.attn(q, None, None))
        return out


FEW = 64  # tokens, for which kernels of `linear` are faster than cuBLASLt's


class DecoderMlp(nn.Module):
    """The MLP of a description: x [T, H] to the same. reduce: sum the result over the ranks."""

    def __init__(self, mlp: Mlp, hidden: int, prefix: str, reduce: bool = True) -> None:
        super().__init__()
        self.gated = mlp.gated
        self.shift = state_layers.TokenShift(1, hidden) if mlp.shift else None
        if mlp.gated:
            self.gate_up_proj = VllmMergedColumnParallelLinear(
                hidden, [mlp.intermediate] * 2, bias=mlp.bias, prefix=f"{prefix}.gate_up_proj"
            )
        else:
            self.up_proj = VllmColumnParallelLinear(
                hidden, mlp.intermediate, bias=mlp.bias, prefix=f"{prefix}.up_proj"
            )
        self.act_fn = activation_modules.make(mlp.activation, mlp.gated)
        # GELU can be in the product of many tokens: cuBLASLt adds a bias and then computes GELU with tanh.
        self.with_gelu = (
            not mlp.gated and mlp.activation == "gelu_tanh" and mlp.bias
            and isinstance(self.up_proj.quant_method, VllmUnquantizedLinearMethod)
        )  # fmt: skip
        self.ops = (linear_silu_and_mul.name,) if type(self.act_fn) is VllmSiluAndMul else ()
        self.ffn_sub_norm = (
            nn.Identity() if mlp.inner_norm is None
            else make_wide_norm(mlp.inner_norm, mlp.intermediate, mlp.intermediate)
        )  # fmt: skip
        self.down_proj = VllmRowParallelLinear(
            mlp.intermediate, hidden, bias=mlp.bias, reduce_results=reduce, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift is not None:
            (x,) = self.shift(x)
        if self.with_gelu and (len(x) > FEW or not x.is_cuda) and fuses(linear_gelu, (linear, gelu), x):
            inner = linear_gelu(x, self.up_proj.weight, self.up_proj.bias, "tanh")
        elif self._with_swiglu(x):
            inner = linear_silu_and_mul(x, self.gate_up_proj.weight, self.gate_up_proj.bias)
        else:
            inner, _ = self.gate_up_proj(x) if self.gated else self.up_proj(x)
            inner = self.act_fn(inner)
        out, _ = self.down_proj(self.ffn_sub_norm(inner))
        return out

    def _with_swiglu(self, x: torch.Tensor) -> bool:
        """Whether SwiGLU is computed in the product, as in prompts for which that was measured as faster."""
        if len(x) <= FEW or type(self.act_fn) is not VllmSiluAndMul:  # a candidate may have replaced it
            return False
        layer = self.gate_up_proj
        return type(layer.quant_method) is VllmUnquantizedLinearMethod and fuses_swiglu(layer, x)


class DecoderExperts(nn.Module):
    """The mixture of experts of a description: x [T, H] to the same."""

    def __init__(self, experts: Experts, hidden: int, prefix: str) -> None:
        super().__init__()
        self.described, self.reduce_results = experts, True
        self.gate = VllmReplicatedLinear(hidden, experts.count, bias=False, prefix=f"{prefix}.gate")
        self.experts = sparse_moe.Experts(
            experts.count, hidden, experts.intermediate, prefix=f"{prefix}.experts"
        )
        self.ops = ("topk_softmax" if experts.plain else "grouped_topk", self.experts.quant_method.op)
        if experts.correction:
            bias = nn.Parameter(torch.empty(experts.count, dtype=torch.float32), requires_grad=False)
            bias.weight_loader = _load_flat  # type: ignore[attr-defined]
            self.gate.e_score_correction_bias = bias
        self.shared_experts = (
            DecoderMlp(Mlp(experts.shared), hidden, f"{prefix}.shared_experts", reduce=False)
            if experts.shared
            else None
        )
        self.shared_expert_gate = (
            VllmReplicatedLinear(hidden, 1, bias=False, prefix=f"{prefix}.shared_expert_gate")
            if experts.shared_gate
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shared_experts is None:
            out = self._routed(x)
        else:
            routed, shared = concurrent.both(x, lambda: self._routed(x), lambda: self._shared(x))
            out = routed + shared
        return parallel.all_reduce(out) if self.reduce_results else out

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts.compute(x, *self._route(x))

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_experts is not None
        shared: torch.Tensor = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x)[0].sigmoid()
        return shared

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and ids of each token's experts: [T, top_k]."""
        d = self.described
        logits, _ = self.gate(x)
        if d.plain:
            weights, ids, _ = topk_softmax(logits, d.top_k, d.normalize)
            return weights, ids
        bias = self.gate.e_score_correction_bias if d.correction else None
        return grouped_topk(logits, d.top_k, d.normalize, d.groups, d.top_groups, d.scoring, bias, d.scale)


def _load_flat(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
    """Load a vector that some checkpoints (Ernie 4.5) store as one row. Raises ValueError for another size."""
    if loaded.numel() != parameter.numel():
        raise ValueError(f"expected shape {tuple(parameter.shape)}")
    parameter.data.copy_(loaded.reshape(-1))


def expert_mapping(config: Any, names: Sequence[str] = Experts.names) -> list[tuple[str, str, int, str]]:
    """vLLM's expert_params_mapping for checkpoints that name an expert's parts as an MLP's; see sparse_moe.

    names: of an expert's gate, up and down projection in the checkpoint
    """
    count = next(n for name in EXPERTS if (n := getattr(config, name, None)))
    gate, up, down = names
    return [
        (f"experts.{ours}_", f"experts.{expert}.{theirs}.", expert, shard)
        for expert in range(count)
        for ours, theirs, shard in (("w13", gate, "w1"), ("w2", down, "w2"), ("w13", up, "w3"))
    ]


def numbered_expert_mapping(config: Any) -> list[tuple[str, str, int, str]]:
    """The same for checkpoints that name them w1, w3 and w2, as Mixtral's do."""
    return expert_mapping(config, NUMBERED)


def _attention(a: Mixer, hidden: int, prefix: str, source: nn.Module | None = None) -> nn.Module:
    if isinstance(a, Recurrent):
        return state_layers.make(a, make_norm, hidden, prefix, source)
    if isinstance(a, LatentAttention):
        shared = source if isinstance(source, DecoderLatentAttention) else None
        return DecoderLatentAttention(a, make_norm, hidden, prefix, shared)
    if a.shared is not None:
        assert isinstance(source, DecoderAttention)
        return SharedAttention(a, hidden, prefix, source.attn)
    return DecoderAttention(a, hidden, prefix)


def _make_mlp(mlp: Mlp | Experts, hidden: int, prefix: str) -> nn.Module:
    if isinstance(mlp, Mlp):
        return DecoderMlp(mlp, hidden, prefix)
    return (DecoderExperts if mlp.clamped is None else ClampedExperts)(mlp, hidden, prefix)


class DecoderLayer(nn.Module):
    """One layer: positions [T], and hidden [T, H], which is not yet added to the residual [T, H]; returns both.

    source: the layer whose KV cache this one reads, or the one before, whose keys sparse attention may attend to.
    layer_input: [T, size], with a LayerInput.
    unsummed: whether hidden, as returned, is this rank's part of a sum.
    """

    unsummed: bool = False

    def __init__(
        self, layer: Layer, hidden: int, prefix: str, source: DecoderLayer | None = None,
        layer_input: LayerInput | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parallel, self.multiplier = layer.parallel, layer.multiplier
        own, mixes = (layer.name("self_attn"), layer.name("mlp")), not isinstance(layer.attention, NoMixer)
        self.parts: tuple[str, str] = own[0] if mixes else "", own[1] if layer.mlp is not None else ""
        other = None if source is None or not source.parts[0] else getattr(source, source.parts[0])
        if mixes:
            self.add_module(own[0], _attention(layer.attention, hidden, f"{prefix}.{own[0]}", other))
        if layer.mlp is not None:
            self.add_module(own[1], _make_mlp(layer.mlp, hidden, f"{prefix}.{own[1]}"))
        norms = []
        for part in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            norm = getattr(layer, part)
            norms.append(None if norm is None else layer.name(part))
            if norm is not None:
                self.add_module(layer.name(part), make_norm(norm, hidden))
        self.norms = norms
        self.cross: tuple[str, str] | None = None  # the names of cross attention and of the norm before it
        if layer.cross is not None:
            self.cross = layer.name("cross"), layer.name("before_cross")
            self.add_module(self.cross[0], CrossAttention(layer.cross, hidden, f"{prefix}.{self.cross[0]}"))
            self.add_module(self.cross[1], make_norm(layer.cross.norm, hidden))
        self.inner: str | None = None  # the name of an MLP that a sequence changes
        if layer.inner is not None:
            self.inner = layer.name("inner")
            self.add_module(self.inner, InnerMlp(layer.inner, hidden, f"{prefix}.{self.inner}"))
            for part in ("before", "after"):
                norm = getattr(layer.inner, part)
                norms.append(None if norm is None else layer.name(f"{part}_inner"))
                if norm is not None:
                    self.add_module(layer.name(f"{part}_inner"), make_norm(norm, hidden))
        self.moe = (
            None if layer.experts is None
            else ExpertsBesideMlp(layer.experts, make_norm, hidden, f"{prefix}.moe")
        )  # fmt: skip
        self.layer_input = (
            None if layer_input is None
            else LayerInputBlock(layer_input, make_norm, hidden, f"{prefix}.layer_input")
        )  # fmt: skip
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False) if layer.scaled else None

    def norm_at(self, i: int) -> nn.Module | None:
        """The norm before attention (0), after it (1), before the MLP (2), after it (3), before and after `inner`."""
        name = self.norms[i]
        return None if name is None else getattr(self, name)

    @property
    def selects(self) -> bool:
        """Whether each token's result depends on that token alone once attention has run."""
        mlp = getattr(self, self.parts[1]) if self.parts[1] else None
        others = self.cross, self.inner, self.moe, self.layer_input
        return type(mlp) is DecoderMlp and mlp.shift is None and others == (None,) * 4

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None,
        layer_input: torch.Tensor | None = None, rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """rows: of the tokens whose results are needed, for a layer that `selects`; None: all."""
        mlp = getattr(self, self.parts[1]) if self.parts[1] else None
        before_attention, after_attention, before_mlp, after_mlp = (self.norm_at(i) for i in range(4))
        if not self.parts[0]:
            assert mlp is not None
            if rows is not None:
                hidden = hidden.index_select(0, rows)
                residual = None if residual is None else residual.index_select(0, rows)
            x, residual = add_and_norm(before_mlp, hidden, residual)
            done = mlp(x) if after_mlp is None else after_mlp(mlp(x))
            return done if self.multiplier == 1.0 else done * self.multiplier, residual
        attend = getattr(self, self.parts[0])
        x, residual = add_and_norm(before_attention, hidden, residual)
        out = attend(positions, x)
        out = out if after_attention is None else after_attention(out)
        if rows is not None:
            x, out = x.index_select(0, rows), out.index_select(0, rows)
            residual = None if residual is None else residual.index_select(0, rows)
        if self.cross is not None:
            y, residual = add_and_norm(getattr(self, self.cross[1]), out, residual)
            out = getattr(self, self.cross[0])(y)
        if self.inner is not None:
            y, residual = add_and_norm(self.norm_at(4), out, residual)
            out, after_inner = getattr(self, self.inner)(positions, y), self.norm_at(5)
            out = out if after_inner is None else after_inner(out)
        if mlp is None:
            return out if self.multiplier == 1.0 else out * self.multiplier, residual
        if self.parallel:
            y = x if before_mlp is None else before_mlp(residual)
        else:
            out = out if self.multiplier == 1.0 else out * self.multiplier
            y, residual = add_and_norm(before_mlp, out, residual)
        done = mlp(y)
        done = done if self.moe is None else self.moe(done, residual)
        done = done if after_mlp is None else after_mlp(done)
        done = done + out if self.parallel else done
        done = done if self.multiplier == 1.0 else done * self.multiplier
        if self.layer_input is not None:
            residual = residual + done
            done = self.layer_input(residual, layer_input)
        return (
            (done, residual) if self.layer_scalar is None else ((residual + done) * self.layer_scalar, None)
        )


# Classes of whole layers whose parts can run one by one; a candidate's class cannot.
WHOLE = (VllmLlamaDecoderLayer, VllmQwen3DecoderLayer)


def run_for_rows(
    layer: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Run a layer, and all that comes after its attention for these rows alone: (hidden, residual) [rows, H]."""
    if isinstance(layer, DecoderLayer):
        return layer(positions, hidden, residual, rows=rows)  # type: ignore[no-any-return]
    x = apply_norm(layer.input_layernorm, hidden, residual)
    residual = hidden if residual is None else residual
    out = layer.self_attn(positions=positions, hidden_states=x)
    out, residual = out.index_select(0, rows), residual.index_select(0, rows)
    return layer.mlp(apply_norm(layer.post_attention_layernorm, out, residual)), residual


class Taps:
    """Keeps the hidden states after some layers, for a draft model.

    layers  each keeps what goes into the layer of this number; the number of layers: what the last one returns
    states  [tokens, len(layers) * H]: those of a step, in its first rows
    """

    def __init__(
        self, layers: Sequence[int], tokens: int, hidden: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.layers, self._hidden = tuple(layers), hidden
        self.states = torch.zeros(tokens, len(layers) * hidden, dtype=dtype, device=device)

    def keep(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None, unsummed: bool = False
    ) -> None:
        """Keep what goes into this layer: hidden [T, H], which is not yet added to residual [T, H].

        unsummed: hidden is this rank's part of a sum
        """
        if layer not in self.layers:
            return
        hidden = parallel.all_reduce(hidden) if unsummed else hidden
        at = self.layers.index(layer) * self._hidden
        out = self.states[: len(hidden), at : at + self._hidden]
        out.copy_(hidden) if residual is None else torch.add(hidden, residual, out=out)


class DecoderModel(nn.Module):
    """Embedding, layers and final norm."""

    taps: Taps | None = None

    def __init__(self, d: description.Decoder, whole: whole_layers.Build | None = None) -> None:
        """whole: builds layers that are one op each."""
        super().__init__()
        self.embed_tokens = VllmVocabParallelEmbedding(
            d.vocab + d.more_ids, d.hidden, prefix="model.embed_tokens"
        )
        self.embed_tokens.__dict__["scale"] = d.embedding_scale  # for random weights
        self.embed_norm = None if d.embedding_norm is None else make_norm(d.embedding_norm, d.hidden)
        self.positions = d.positions
        if d.positions is not None:
            rows = d.positions.count + d.positions.offset
            self.embed_positions = VllmVocabParallelEmbedding(rows, d.hidden, prefix="model.embed_positions")
        self.layer_inputs = (
            None if d.layer_input is None
            else LayerInputs(d.layer_input, make_norm, d.hidden, len(d.layers), "model.layer_inputs")
        )  # fmt: skip
        layers: list[Any] = (
            [] if whole is None else [whole(i, f"model.layers.{i}") for i in range(len(d.layers))]
        )
        for i, layer in enumerate(d.layers if whole is None else ()):
            shared = layer.attention.shared if isinstance(layer.attention, Attention) else None
            number = i - 1 if shared is None else shared
            source = layers[number] if i else None
            layers.append(DecoderLayer(layer, d.hidden, f"model.layers.{i}", source, d.layer_input))
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(d.norm, d.hidden)
        self.first_inner = next((i for i, layer in enumerate(d.layers) if layer.inner is not None), None)
        self.learner = (
            None if self.first_inner is None else Learner(d, self.first_inner, layers[self.first_inner :], self.norm)
        )  # fmt: skip
        self.scale = d.embedding_scale
        self.sandwich = sandwich_of(d)
        if parallel.get_tp_size() > 1 and self.sandwich is None and self.learner is None:
            _leave_sums_to_norms(layers, self.norm)

    @property
    def selects_rows(self) -> bool:
        """Whether `rows` of a forward is supported."""
        last: Any = self.layers[-1]
        others = self.taps, self.sandwich, self.learner, self.layer_inputs
        hooked = last._forward_hooks or last._forward_pre_hooks or "forward" in vars(last)
        whole = type(last) in WHOLE and not hooked
        return others == (None,) * 4 and (whole or (type(last) is DecoderLayer and last.selects))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, media: Media | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """rows [R]: of the tokens whose hidden states [R, H] are needed: the last layer computes no others."""
        hidden, residual = self.embed_tokens(input_ids), None
        if media is not None:
            hidden = media.insert(hidden)
        if self.scale != 1.0:
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype)
        if self.embed_norm is not None:
            hidden = self.embed_norm(hidden)
        if self.positions is not None:
            hidden = hidden + self.embed_positions(positions + self.positions.offset)
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, hidden)
        sandwich = self.sandwich if self.taps is None else None
        if sandwich is not None and fuses(sandwich_norm, sandwich.apart, hidden):
            enter = None
            if self.learner is not None:
                enter = partial(self._enter, input_ids, positions)
            return sandwich.run(self.layers, self.norm, positions, hidden, inputs, enter)
        unsummed = False  # whether hidden is this rank's part of a sum
        for i, layer in enumerate(self.layers):
            if self.taps is not None:
                self.taps.keep(i, hidden, residual, unsummed)
            own = () if inputs is None else (inputs[:, i],)
            if i == self.first_inner:
                hidden, residual = add_and_norm(None, hidden, residual)[1], None
                self._enter(input_ids, positions, i, hidden)
            if rows is not None and i + 1 == len(self.layers):
                hidden, residual = run_for_rows(layer, positions, hidden, residual, rows)
            else:
                hidden, residual = layer(positions, hidden, residual, *own)
            unsummed = getattr(layer, "unsummed", False)
            if media is not None and not (unsummed and parallel.get_tp_rank()):
                hidden = media.after(i, hidden)
        if self.taps is not None:
            self.taps.keep(len(self.layers), hidden, residual, unsummed)
        return add_and_norm(self.norm, hidden, residual)[0]

    def _enter(self, input_ids: torch.Tensor, positions: torch.Tensor, i: int, hidden: torch.Tensor) -> None:
        """Keep what enters the first layer with an inner MLP."""
        if i == self.first_inner and self.learner is not None:
            self.learner.keep(input_ids, positions, hidden)


class Decoder(nn.Module):
    """The model that the file of an architecture describes. config: transformers' config of that architecture.

    Every language model has this interface: model(input_ids [T], positions [T]) returns hidden states [T, H], and
    model.compute_logits(hidden [B, H]) returns [B, V]. The attention metadata of a step comes from
    fastkernels.core.forward_context. Sharded over the group of fastkernels.core.parallel.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        d = describe(config)
        self.config = config
        self.model = DecoderModel(d, whole_layers.builder(find(config.architectures[0]).arch, d))
        self.lm_head: Any = VllmParallelLMHead(d.vocab, d.hidden, bias=d.head_bias, prefix="lm_head")
        if d.tied:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = VllmLogitsProcessor(
            d.vocab, scale=d.logits_scale, soft_cap=d.logits_softcap or None
        )

    @property
    def selects_rows(self) -> bool:
        """Whether `rows` of a forward is supported: hidden states of these tokens alone."""
        return self.model.selects_rows

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, media: Media | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.model(input_ids, positions, media, rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = getattr(self.lm_head, "bias", None)
        return self.logits_processor(self.lm_head, hidden, bias)

    @property
    def border(self) -> int:
        """Tokens between the borders at which `at_border` changes a sequence's state; 0: there are none."""
        return 0 if self.model.learner is None else self.model.learner.chunk

    def at_border(self, slot: int, end: int, next_id: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """Change the state in `slot` of a sequence of `end` tokens, a multiple of `border`, of which the next one [1]
        follows. tables: its blocks in each group of layers.
        """
        assert self.model.learner is not None
        self.model.learner.learn(slot, end, next_id, tables, self.compute_logits, self.lm_head.weight)
