"""OpenFold3, by AlphaFold 3's algorithms (Abramson et al., Nature 2024, supplement): structures from sequences.

Keys are those of the state dict of openfold3's OpenFold3 in safetensors, whose modules have these names. config.json is
ours, with the `architecture` of its model config, of which fields that are left out have the defaults:

    {"architectures": ["OpenFold3"], "model_type": "openfold3", "dtype": "float32",
     "architecture": {"pairformer": {"no_blocks": 48}, "shared": {"num_recycles": 3}, ...}}

The interface of models of the runner Fold is `read` and the methods of OpenFold3 behind it. The pair representation,
and what follows from it for the atoms, depends on neither the noise nor the sample: `condition` computes it, all
biases of attention, and the atoms' scales and shifts once for all steps and samples. See `denoise`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.folding import features
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.point.segment_reduce import segment_reduce
from fastkernels.overrides.structure.atom_attention import atom_attention, window_starts
from fastkernels.overrides.structure.attention_pair_bias import attention_pair_bias
from fastkernels.overrides.structure.conditioned_layer_norm import conditioned_layer_norm
from fastkernels.overrides.structure.outer_product_mean import outer_product_mean
from fastkernels.overrides.structure.swiglu_transition import swiglu_transition
from fastkernels.overrides.structure.triangle_multiplication import triangle_multiplication

T = torch.Tensor
EPS = 1e-5
QUERIES, KEYS = 32, 128  # of the atoms' windows
_PAIR = {
    "c_hidden_mul": 128, "c_hidden_pair_att": 32, "no_heads_pair": 4, "transition_n": 4, "transition_type": "swiglu",
    "fuse_projection_weights": False,
}  # fmt: skip
_PAIRFORMER = {
    "c_s": 384,
    "c_z": 128,
    "c_hidden_pair_bias": 24,
    "no_heads_pair_bias": 16,
    "no_blocks": 48,
    **_PAIR,
}
_ATOMS = {
    "c_atom": 128, "c_atom_pair": 16, "c_hidden": 32, "no_heads": 4, "no_blocks": 3, "n_transition": 2,
    "n_query": QUERIES, "n_key": KEYS,
}  # fmt: skip
_ENCODER = {
    **_ATOMS,
    "c_s": 384,
    "c_z": 128,
    "c_token": 768,
    "c_atom_ref": {"element": 119, "name_chars": 256},
}
DEFAULTS: dict[str, Any] = {  # openfold3 0.5.0
    "shared": {
        "c_s_input": 449, "c_s": 384, "c_z": 128, "num_recycles": 3,
        "diffusion": {"sigma_data": 16, "no_full_rollout_samples": 5, "no_full_rollout_steps": 200},
    },
    "input_embedder": {
        "max_relative_idx": 32, "max_relative_chain": 2, "atom_attn_enc": {**_ENCODER, "c_token": 384},
    },
    "template": {
        "c_t": 64, "c_z": 128, "template_pair_embedder": {"c_dgram": 39, "c_aatype": 32},
        "template_pair_stack": {
            "c_hidden_tri_att": 16, "c_hidden_tri_mul": 64, "no_blocks": 2, "no_heads": 4, "pair_transition_n": 2,
            "transition_type": "swiglu", "tri_mul_first": True, "fuse_projection_weights": False,
        },
    },
    "msa": {
        "msa_module_embedder": {"c_m_feats": 34, "subsample_main_msa": False, "max_subsampled_all_msa": 1024},
        "msa_module": {
            "c_m": 64, "c_z": 128, "c_hidden_msa_att": 8, "no_heads_msa": 8, "c_hidden_opm": 32, "no_blocks": 4,
            "opm_first": True, **_PAIR,
        },
    },
    "pairformer": _PAIRFORMER,
    "diffusion_module": {
        "diffusion_module": {"c_token": 768},
        "diffusion_conditioning": {"c_fourier_emb": 256},
        "atom_attn_enc": _ENCODER,
        "diffusion_transformer": {"c_hidden": 48, "no_heads": 16, "no_blocks": 24, "n_transition": 2},
        "atom_attn_dec": {**_ATOMS, "c_token": 768},
    },
    "noise_schedule": {"s_max": 160.0, "s_min": 4e-4, "p": 7},
    "sample_diffusion": {"gamma_0": 0.8, "gamma_min": 1.0, "noise_scale": 1.003, "step_scale": 1.5},
    "heads": {
        "max_atoms_per_token": 23,
        "pairformer_embedding": {
            "pairformer": {**_PAIRFORMER, "no_blocks": 4}, "min_bin": 3.25, "max_bin": 50.75, "no_bin": 39,
        },
        "pae": {"c_out": 64, "enabled": True}, "pde": {"c_out": 64}, "lddt": {"c_out": 50},
        "distogram": {"c_out": 64, "enabled": True}, "experimentally_resolved": {"c_out": 2},
    },
}  # fmt: skip
ONLY: dict[str, Any] = {
    "transition_type": "swiglu", "fuse_projection_weights": False, "tri_mul_first": True, "opm_first": True,
    "subsample_main_msa": False,
}  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    given = raw.get("architecture", {})
    if not isinstance(given, Mapping):
        raise Unsupported(
            f"config.architecture={given!r:.80} is not an object, as openfold3's model config has it"
        )
    return {**raw, "architecture": _merged(DEFAULTS, given, "config.architecture")}


def _merged(known: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The defaults with the given values; fields that are not known steer training or memory, and are left out."""
    made: dict[str, Any] = {}
    for name, default in known.items():
        value, at = given.get(name, default), f"{where}.{name}"
        if isinstance(default, Mapping):
            if not isinstance(value, Mapping):
                raise Unsupported(f"{at}={value!r:.80} is not an object")
            made[name] = _merged(default, value, at)
            continue
        if name in ONLY and value != ONLY[name]:
            raise Unsupported(f"{at}={value!r} is not supported, only {ONLY[name]!r}")
        least = 0 if name in ("num_recycles", "no_blocks", "gamma_0", "gamma_min", "s_min") else 1e-9
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        whole = isinstance(default, int) and name not in ("sigma_data", "p")
        right = type(value) in ((int,) if whole else (int, float)) and value >= least if number else True
        if not right:
            least = 1 if whole and least else least
            raise Unsupported(
                f"{at}={value!r} must be {'an integer' if whole else 'a number'} of at least {least:g}"
            )
        made[name] = value
    return made


class Linear(nn.Module):
    """parts: the rows of matrices that a checkpoint has apart, in order; their biases may be stacked, too."""

    def __init__(self, inputs: int, *parts: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = self._parameter(sum(parts), inputs)
        self.bias = self._parameter(sum(parts)) if bias else None

    def _parameter(self, *shape: int) -> nn.Parameter:
        made = nn.Parameter(torch.empty(shape))
        if len(self.parts) > 1:
            made.weight_loader = self._load  # type: ignore[attr-defined]
        return made

    def _load(self, parameter: T, loaded: T, shard: int | None = None) -> None:
        first = sum(self.parts[: shard or 0])
        part = parameter.data if shard is None else parameter.data[first : first + self.parts[shard]]
        if part.shape != loaded.shape:
            raise ValueError(f"expected shape {tuple(part.shape)}")
        part.copy_(loaded)

    def forward(self, x: T) -> T:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: T) -> T:
        return layer_norm(x, self.weight, self.bias, EPS)


class SwiGLU(nn.Module):
    """Holds the two matrices, one behind the other if `stacked`."""

    def __init__(self, size: int, hidden: int, stacked: bool = False) -> None:
        super().__init__()
        if stacked:
            self.linear_ab = Linear(size, hidden, hidden)
        else:
            self.linear_a, self.linear_b = Linear(size, hidden), Linear(size, hidden)


class SwiGLUTransition(nn.Module):
    """Algorithm 11: [..., C] to the same."""

    ops = ("swiglu_transition",)

    def __init__(self, size: int, n: int) -> None:
        super().__init__()
        self.layer_norm, self.swiglu = LayerNorm(size), SwiGLU(size, n * size)
        self.linear_out = Linear(n * size, size)

    def forward(self, x: T) -> T:
        norm, mlp = self.layer_norm, self.swiglu
        rows = x.reshape(-1, x.shape[-1])
        found = swiglu_transition(
            rows,
            norm.weight,
            norm.bias,
            mlp.linear_a.weight,
            mlp.linear_b.weight,
            self.linear_out.weight,
            EPS,
        )
        return found.view(x.shape)


class TriangleMultiplication(nn.Module):
    """Algorithms 12 and 13: z [B, N, N, Z], mask [B, N, N] to the update of z."""

    ops = ("triangle_multiplication",)

    def __init__(self, size: int, hidden: int, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g = (
            Linear(size, hidden) for _ in range(4)
        )
        self.linear_g, self.linear_z = Linear(size, size), Linear(hidden, size)
        self.layer_norm_in, self.layer_norm_out = LayerNorm(size), LayerNorm(hidden)

    def forward(self, z: T, mask: T) -> T:
        before, after = self.layer_norm_in, self.layer_norm_out
        return triangle_multiplication(
            z, mask, before.weight, before.bias, self.linear_a_p.weight, self.linear_a_g.weight,
            self.linear_b_p.weight, self.linear_b_g.weight, after.weight, after.bias, self.linear_z.weight,
            self.linear_g.weight, self.outgoing, EPS,
        )  # fmt: skip


class Attention(nn.Module):
    """Projections of attention: queries, gates, keys and values in one matrix, and the output's."""

    def __init__(self, size: int, hidden: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.hidden, self.scale = heads, hidden, hidden**-0.5
        width = heads * hidden
        self.linear_qgkv = Linear(size, width, width, width, width, bias=bias)
        self.linear_o = Linear(width, size)

    def split(self, x: T) -> tuple[T, ...]:
        """x: [..., C]. Returns q, gate, k, v, each [..., H, D]."""
        found = self.linear_qgkv(x)
        return found.view(*x.shape[:-1], 4, self.heads, self.hidden).unbind(-3)

    def split_pair(self, x: T, others: T) -> tuple[T, ...]:
        """The same with queries and gates of x, keys and values of others."""
        weight, bias = self.linear_qgkv.weight, self.linear_qgkv.bias
        half = len(weight) // 2
        made: list[T] = []
        for part, given in ((slice(None, half), x), (slice(half, None), others)):
            found = linear(given, weight[part], None if bias is None else bias[part])
            made += found.view(*x.shape[:-1], 2, self.heads, self.hidden).unbind(-3)
        return tuple(made)


class TriangleAttention(nn.Module):
    """Algorithms 14 and 15: z [B, N, N, Z] and mask [B, 1, N] of the tokens to the update of z."""

    ops = ("layer_norm", "linear", "attention_pair_bias")

    def __init__(self, size: int, hidden: int, heads: int, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm, self.linear_z = LayerNorm(size), Linear(size, heads)
        self.mha = Attention(size, hidden, heads)

    def forward(self, z: T, mask: T) -> T:
        x = self.layer_norm(z)
        bias = self.linear_z(x).permute(0, 3, 1, 2).contiguous()  # [B, H, N, N]
        parts = self.mha.split(x)
        q, gate, k, v = parts if self.starting else (part.transpose(1, 2) for part in parts)
        found = attention_pair_bias(q, k, v, bias, self.mha.scale, mask, gate)
        return self.mha.linear_o((found if self.starting else found.transpose(1, 2)).flatten(-2))


class PairBlock(nn.Module):
    def __init__(self, size: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        multiplied, attended, heads = (
            config[n] for n in ("c_hidden_mul", "c_hidden_pair_att", "no_heads_pair")
        )
        self.tri_mul_out = TriangleMultiplication(size, multiplied, True)
        self.tri_mul_in = TriangleMultiplication(size, multiplied, False)
        self.tri_att_start = TriangleAttention(size, attended, heads, True)
        self.tri_att_end = TriangleAttention(size, attended, heads, False)
        self.pair_transition = SwiGLUTransition(size, config["transition_n"])

    def forward(self, z: T, pairs: T, tokens: T) -> T:
        """z: [B, N, N, Z]; pairs: [B, N, N] of z's dtype; tokens: [B, 1, N] bool."""
        z = z + self.tri_mul_out(z, pairs)
        z = z + self.tri_mul_in(z, pairs)
        z = z + self.tri_att_start(z, tokens)
        z = z + self.tri_att_end(z, tokens)
        return z + self.pair_transition(z)


class AttentionPairBias(nn.Module):
    """Algorithm 24 in the trunk: s [B, N, C], z [B, N, N, Z], tokens [B, 1, N] to the update of s."""

    ops = ("layer_norm", "linear", "attention_pair_bias")

    def __init__(self, size: int, pair: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layer_norm_a, self.layer_norm_z = LayerNorm(size), LayerNorm(pair)
        self.linear_z, self.mha = Linear(pair, heads), Attention(size, hidden, heads, bias=True)

    def forward(self, s: T, z: T, tokens: T) -> T:
        q, gate, k, v = (part[:, None] for part in self.mha.split(self.layer_norm_a(s)))
        bias = self.linear_z(self.layer_norm_z(z)).permute(0, 3, 1, 2).contiguous()
        return self.mha.linear_o(
            attention_pair_bias(q, k, v, bias, self.mha.scale, tokens, gate)[:, 0].flatten(-2)
        )


class PairFormerBlock(nn.Module):
    """Algorithm 17, a block."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        single, pair = config["c_s"], config["c_z"]
        self.pair_stack = PairBlock(pair, config)
        self.attn_pair_bias = AttentionPairBias(
            single, pair, config["c_hidden_pair_bias"], config["no_heads_pair_bias"]
        )
        self.single_transition = SwiGLUTransition(single, config["transition_n"])

    def forward(self, s: T, z: T, pairs: T, tokens: T) -> tuple[T, T]:
        z = self.pair_stack(z, pairs, tokens)
        s = s + self.attn_pair_bias(s, z, tokens)
        return s + self.single_transition(s), z


class PairFormerStack(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairFormerBlock(config) for _ in range(config["no_blocks"]))

    def forward(self, s: T, z: T, pairs: T, tokens: T) -> tuple[T, T]:
        for block in self.blocks:
            s, z = block(s, z, pairs, tokens)
        return s, z


class OuterProductMean(nn.Module):
    """Algorithm 9: m [S, N, M] and mask [S, N] to the update of z, [1, N, N, Z]."""

    ops = ("outer_product_mean",)

    def __init__(self, size: int, pair: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm, self.linear_1, self.linear_2 = (
            LayerNorm(size),
            Linear(size, hidden),
            Linear(size, hidden),
        )
        self.linear_out = Linear(hidden**2, pair, bias=True)

    def forward(self, m: T, mask: T) -> T:
        x = self.layer_norm(m)[None]
        out = self.linear_out
        return outer_product_mean(self.linear_1(x), self.linear_2(x), mask[None], out.weight, out.bias, 1e-3)


class MSAPairWeightedAveraging(nn.Module):
    """Algorithm 10: m [S, N, M], z [1, N, N, Z], tokens [1, 1, N] to the update of m."""

    def __init__(self, size: int, pair: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm_m, self.layer_norm_z, self.linear_z = (
            LayerNorm(size),
            LayerNorm(pair),
            Linear(pair, heads),
        )
        self.linear_v, self.linear_g, self.linear_o = (
            Linear(*shape)
            for shape in ((size, hidden * heads), (size, hidden * heads), (hidden * heads, size))
        )

    def forward(self, m: T, z: T, tokens: T) -> T:
        x = self.layer_norm_m(m)
        depth, n, _ = x.shape
        scores = self.linear_z(self.layer_norm_z(z))[0].permute(2, 0, 1).float()
        weights = scores.masked_fill(~tokens, -1e9).softmax(-1).to(m.dtype)  # [H, N, N]
        values = (
            self.linear_v(x).view(depth, n, self.heads, -1).permute(2, 1, 0, 3).flatten(2)
        )  # [H, N, S * D]
        mean = torch.bmm(weights, values).view(self.heads, n, depth, -1).permute(2, 1, 0, 3).flatten(2)
        return self.linear_o(mean * self.linear_g(x).sigmoid())


class MSAModuleBlock(nn.Module):
    def __init__(self, config: Mapping[str, Any], last: bool) -> None:
        super().__init__()
        size, pair = config["c_m"], config["c_z"]
        self.outer_product_mean = OuterProductMean(size, pair, config["c_hidden_opm"])
        self.msa_att_row: Any = None
        if not last:
            self.msa_att_row = MSAPairWeightedAveraging(
                size, pair, config["c_hidden_msa_att"], config["no_heads_msa"]
            )
            self.msa_transition = SwiGLUTransition(size, config["transition_n"])
        self.pair_stack = PairBlock(pair, config)

    def forward(self, m: T, z: T, mask: T, pairs: T, tokens: T) -> tuple[T, T]:
        z = z + self.outer_product_mean(m, mask)
        if self.msa_att_row is not None:
            m = m + self.msa_att_row(m, z, tokens)
            m = m + self.msa_transition(m)
        return m, self.pair_stack(z, pairs, tokens)


class MSAModuleStack(nn.Module):
    """Algorithm 8, from line 5 on."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        count = config["no_blocks"]
        self.blocks = nn.ModuleList(MSAModuleBlock(config, i + 1 == count) for i in range(count))

    def forward(self, m: T, z: T, mask: T, pairs: T, tokens: T) -> T:
        for block in self.blocks:
            m, z = block(m, z, mask, pairs, tokens)
        return z


class MSAModuleEmbedder(nn.Module):
    def __init__(self, inputs: int, size: int, single: int) -> None:
        super().__init__()
        self.linear_m, self.linear_s_input = Linear(inputs, size), Linear(single, size)

    def forward(self, msa: T, s_input: T) -> T:
        return self.linear_m(msa) + self.linear_s_input(s_input)


class TemplatePairEmbedder(nn.Module):
    """Algorithm 16, lines 1 to 5 and 8: [T, N, N, C] of T templates."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, own = config["c_t"], config["template_pair_embedder"]
        self.dgram_linear = Linear(own["c_dgram"], size)
        self.aatype_linear_1, self.aatype_linear_2 = (Linear(own["c_aatype"], size) for _ in range(2))
        (
            self.pseudo_beta_mask_linear,
            self.x_linear,
            self.y_linear,
            self.z_linear,
            self.backbone_mask_linear,
        ) = (Linear(1, size) for _ in range(5))
        self.layer_norm_z, self.linear_z = LayerNorm(config["c_z"]), Linear(config["c_z"], size)

    def forward(self, inputs: Inputs, z: T) -> T:
        same = (inputs.asym_id[:, None] == inputs.asym_id)[..., None].to(z.dtype)

        def pairs(mask: T) -> T:
            return (mask[:, :, None] * mask[:, None])[..., None] * same

        found = self.dgram_linear(inputs.template_distogram.to(z.dtype))
        found = found + self.pseudo_beta_mask_linear(pairs(inputs.template_pseudo_beta_mask))
        kinds = inputs.template_restype
        found = found + self.aatype_linear_1(kinds)[:, :, None] + self.aatype_linear_2(kinds)[:, None]
        for layer, part in zip(
            (self.x_linear, self.y_linear, self.z_linear),
            inputs.template_unit_vector.split(1, -1),
            strict=True,
        ):
            found = found + layer(part)
        found = found + self.backbone_mask_linear(pairs(inputs.template_backbone_frame_mask))
        return found + self.linear_z(self.layer_norm_z(z))


class TemplatePairStack(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        own, size = config["template_pair_stack"], config["c_t"]
        pair = {
            "c_hidden_mul": own["c_hidden_tri_mul"], "c_hidden_pair_att": own["c_hidden_tri_att"],
            "no_heads_pair": own["no_heads"], "transition_n": own["pair_transition_n"],
        }  # fmt: skip
        self.blocks = nn.ModuleList(PairBlock(size, pair) for _ in range(own["no_blocks"]))
        self.layer_norm = LayerNorm(size)

    def forward(self, t: T, pairs: T, tokens: T) -> T:
        for block in self.blocks:
            t = block(t, pairs, tokens)
        return self.layer_norm(t)


class TemplateEmbedder(nn.Module):
    """Algorithm 16: the update of z, [1, N, N, Z]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.template_pair_embedder, self.template_pair_stack = (
            TemplatePairEmbedder(config),
            TemplatePairStack(config),
        )
        self.linear_t = Linear(config["c_t"], config["c_z"])

    def forward(self, inputs: Inputs, z: T, pairs: T, tokens: T) -> T:
        t = self.template_pair_embedder(inputs, z)
        count = len(t)
        t = self.template_pair_stack(t, pairs.expand(count, -1, -1), tokens.expand(count, -1, -1))
        return self.linear_t(t.mean(0, keepdim=True).relu())


@dataclass(frozen=True)
class Block:
    """Input of a block of a conditioned transformer, apart from the residual stream.

    bias    [1, H, N, N] of tokens, [W, H, Q, K] of atoms
    others  scales and shifts [1, N, C]: of the norm before attention (of atoms: of queries, then of keys), the gate
            of its result, the norm before the transition, and the gate of that
    """

    bias: T
    others: tuple[T, ...]


class AdaLN(nn.Module):
    """Algorithm 26: the scale, before its sigmoid, and shift for s [1, N, S]."""

    def __init__(self, size: int, condition: int) -> None:
        super().__init__()
        self.layer_norm_s = LayerNorm(condition, bias=False)
        self.linear_g, self.linear_s = Linear(condition, size, bias=True), Linear(condition, size)

    def forward(self, s: T) -> tuple[T, T]:
        s = self.layer_norm_s(s)
        return self.linear_g(s), self.linear_s(s)


class ConditionedAttention(nn.Module):
    """Algorithm 24 with a condition; between atoms, queries and keys have norms of their own."""

    def __init__(self, size: int, condition: int, pair: int, hidden: int, heads: int, atoms: bool) -> None:
        super().__init__()
        for name in ("layer_norm_a_q", "layer_norm_a_k") if atoms else ("layer_norm_a",):
            self.add_module(name, AdaLN(size, condition))
        self.linear_ada_out, self.linear_z = Linear(condition, size, bias=True), Linear(pair, heads)
        self.mha = Attention(size, hidden, heads, bias=True)


class ConditionedTransitionBlock(nn.Module):
    """Algorithm 25."""

    def __init__(self, size: int, condition: int, n: int) -> None:
        super().__init__()
        self.layer_norm, self.swiglu = AdaLN(size, condition), SwiGLU(size, n * size, stacked=True)
        self.linear_g, self.linear_out = Linear(condition, size, bias=True), Linear(n * size, size)

    def forward(self, x: T) -> T:
        return self.linear_out(silu_and_mul(self.swiglu.linear_ab(x)))


class DiffusionTransformerBlock(nn.Module):
    """Algorithm 23, a block. Its result is (x, y, gate): the residual x + sigmoid(gate) * y is left to the next."""

    def __init__(
        self, size: int, condition: int, pair: int, hidden: int, heads: int, n: int, atoms: bool
    ) -> None:
        super().__init__()
        self.attention_pair_bias: Any = ConditionedAttention(size, condition, pair, hidden, heads, atoms)
        self.conditioned_transition = ConditionedTransitionBlock(size, condition, n)

    def condition(self, s: T) -> tuple[T, ...]:
        """See Block.others. s: [1, N, S]."""
        attention, transition = self.attention_pair_bias, self.conditioned_transition
        norms = [m for m in attention.children() if isinstance(m, AdaLN)]
        made = [t for norm in norms for t in norm(s)]
        return (*made, attention.linear_ada_out(s), *transition.layer_norm(s), transition.linear_g(s))

    def forward(self, state: tuple[T, T | None, T | None], given: Block, layout: Layout) -> Any:
        x, y, gate = state
        *norms, after, scale, shift, last = given.others
        x, normed = conditioned_layer_norm(x, norms[0], norms[1], y, gate, EPS)
        mha = self.attention_pair_bias.mha
        if len(norms) == 2:  # of tokens: the samples are the rows that share a bias
            q, g, k, v = (part[None] for part in mha.split(normed))
            found = attention_pair_bias(q, k, v, given.bias, mha.scale, layout.tokens, g)[0]
        else:
            _, keys = conditioned_layer_norm(x, norms[2], norms[3], None, None, EPS)
            q, g, k, v = mha.split_pair(normed, keys)
            found = atom_attention(q, k, v, given.bias, layout.starts, layout.mask, mha.scale, g)
        x, normed = conditioned_layer_norm(x, scale, shift, mha.linear_o(found.flatten(-2)), after, EPS)
        return x, self.conditioned_transition(normed), last


class DiffusionTransformer(nn.Module):
    """Algorithm 23, of the tokens or of the atoms."""

    ops = ("conditioned_layer_norm", "attention_pair_bias", "atom_attention", "linear")

    def __init__(self, sizes: tuple[int, int, int], config: Mapping[str, Any], atoms: bool) -> None:
        super().__init__()
        hidden, heads, n = config["c_hidden"], config["no_heads"], config["n_transition"]
        self.layer_norm_z = LayerNorm(sizes[2], bias=False)
        self.blocks: Any = nn.ModuleList(
            DiffusionTransformerBlock(*sizes, hidden, heads, n, atoms) for _ in range(config["no_blocks"])
        )

    def biases(self, z: T) -> list[T]:
        """z: [B, Q, K, Z]. Returns [B, H, Q, K] of each block."""
        z = self.layer_norm_z(z)
        return [b.attention_pair_bias.linear_z(z).permute(0, 3, 1, 2).contiguous() for b in self.blocks]

    def condition(self, s: T) -> list[tuple[T, ...]]:
        """See Block.others, of each block. s: [1, N, S]."""
        return [block.condition(s) for block in self.blocks]

    def forward(self, x: T, biases: Sequence[T], others: Sequence[tuple[T, ...]], layout: Layout) -> T:
        """x: [S, N, C] of the samples."""
        state: Any = (x, None, None)
        for block, bias, own in zip(self.blocks, biases, others, strict=True):
            state = block(state, Block(bias, own), layout)
        x, y, gate = state
        return x if y is None else x + gate.sigmoid() * y


@dataclass(frozen=True)
class Layout:
    """The part of the inputs that the transformers read.

    starts   [W] int32, and mask, [A] bool, of atom_attention
    atoms    [A, 1] of the model's dtype: which are there
    token    [A] int64, of each atom
    tokens   [1, 1, N] bool: which are there
    segments [samples * (N + 1) + 1] int32: of each sample the tokens, and the atoms that pad it, as parts of its atoms
    """

    starts: T
    mask: T
    atoms: T
    token: T
    tokens: T
    segments: T

    @classmethod
    def of(cls, inputs: Inputs, samples: int) -> Layout:
        mask = inputs.atom_mask > 0
        count = len(mask)
        starts = window_starts(mask.sum(), -(-count // QUERIES), QUERIES, KEYS)
        first = torch.arange(samples, device=mask.device, dtype=torch.int32)[:, None] * count
        parts = (first + inputs.segment_starts).flatten()
        segments = torch.cat((parts, parts.new_full((1,), samples * count)))
        return cls(
            starts, mask, inputs.atom_mask[:, None], inputs.atom_to_token_index, inputs.tokens, segments
        )

    def mean(self, x: T) -> T:
        """x: [S, A, C] of atoms. Returns the means of the tokens' atoms, [S, N, C]."""
        found = segment_reduce(x.flatten(0, 1), self.segments, None, "mean")
        return found.view(len(x), self.tokens.shape[-1] + 1, -1)[:, :-1]


@dataclass(frozen=True)
class Windows:
    """The pairs of atoms in the windows of local attention.

    atoms   [W, K]: the key's atom, inside of the atoms
    pairs   [W, Q, K, 1] of the model's dtype: whether both are there
    """

    atoms: T
    pairs: T

    @classmethod
    def of(cls, layout: Layout) -> Windows:
        """The atoms that are there come first."""
        mask, blocks = layout.mask, len(layout.starts)
        count = len(mask)
        places = layout.starts.long()[:, None] + torch.arange(KEYS, device=mask.device)
        safe = places.clamp(0, count - 1)
        keys = (places >= 0) & (places < count) & mask[safe]
        queries = F.pad(mask, (0, blocks * QUERIES - count)).view(blocks, QUERIES)
        return cls(safe, (queries[:, :, None] & keys[:, None])[..., None].to(layout.atoms.dtype))

    def queries(self, x: T) -> T:
        """x: [A, ...] of atoms. Returns [W, Q, ...]; 0 behind the last atom."""
        blocks = len(self.atoms)
        padded = x.new_zeros(blocks * QUERIES, *x.shape[1:])
        padded[: len(x)] = x
        return padded.view(blocks, QUERIES, *x.shape[1:])

    def keys(self, x: T) -> T:
        """[W, K, ...]; anything where no key is."""
        return x[self.atoms]


class RefAtomFeatureEmbedder(nn.Module):
    """Algorithm 5, lines 1 to 6: atoms [A, C] and pairs [W, Q, K, P]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        atom, pair, ref = config["c_atom"], config["c_atom_pair"], config["c_atom_ref"]
        self.linear_ref_pos, self.linear_ref_charge, self.linear_ref_mask = (
            Linear(n, atom) for n in (3, 1, 1)
        )
        self.linear_ref_element, self.linear_ref_atom_chars = (
            Linear(ref[n], atom) for n in ("element", "name_chars")
        )
        self.linear_ref_offset, self.linear_inv_sq_dists, self.linear_valid_mask = (
            Linear(n, pair) for n in (3, 1, 1)
        )

    def forward(self, inputs: Inputs, windows: Windows) -> tuple[T, T]:
        atoms = self.linear_ref_pos(inputs.ref_pos)
        atoms = atoms + self.linear_ref_charge(inputs.ref_charge.arcsinh()[:, None])
        atoms = atoms + self.linear_ref_mask(inputs.ref_mask[:, None])
        atoms = atoms + self.linear_ref_element(inputs.ref_element)
        atoms = atoms + self.linear_ref_atom_chars(inputs.ref_atom_name_chars)
        place, space = inputs.ref_pos, inputs.ref_space_uid
        offsets = (windows.queries(place)[:, :, None] - windows.keys(place)[:, None]) * windows.pairs
        same = (windows.queries(space)[:, :, None] == windows.keys(space)[:, None])[..., None] * windows.pairs
        inverse = 1 / (1 + offsets.square().sum(-1, keepdim=True))
        pairs = (
            self.linear_ref_offset(offsets) + self.linear_inv_sq_dists(inverse) + self.linear_valid_mask(same)
        )
        return atoms, pairs * same


class NoisyPositionEmbedder(nn.Module):
    """Algorithm 5, lines 8 to 12."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        atom, pair, single, token_pair = (config[n] for n in ("c_atom", "c_atom_pair", "c_s", "c_z"))
        self.layer_norm_s, self.linear_s = LayerNorm(single, bias=False), Linear(single, atom)
        self.layer_norm_z, self.linear_z = LayerNorm(token_pair, bias=False), Linear(token_pair, pair)
        self.linear_r = Linear(3, atom)

    def forward(self, inputs: Inputs, windows: Windows, atoms: T, pairs: T, s: T, z: T) -> tuple[T, T]:
        """s: [N, S]; z: [N, N, Z]. Returns atoms and pairs with what their tokens add."""
        token = inputs.atom_to_token_index
        atoms = atoms + self.linear_s(self.layer_norm_s(s))[token] * inputs.atom_mask[:, None]
        found = self.linear_z(self.layer_norm_z(z))
        queries, keys = windows.queries(token), windows.keys(token)
        return atoms, pairs + found[queries[:, :, None], keys[:, None]] * windows.pairs


class AtomAttentionEncoder(nn.Module):
    """Algorithm 5. `embed` computes what depends on neither noise nor sample."""

    def __init__(self, config: Mapping[str, Any], noisy: bool) -> None:
        super().__init__()
        atom, pair = config["c_atom"], config["c_atom_pair"]
        self.ref_atom_feature_embedder = RefAtomFeatureEmbedder(config)
        if noisy:
            self.noisy_position_embedder = NoisyPositionEmbedder(config)
        self.linear_l, self.linear_m = Linear(atom, pair), Linear(atom, pair)
        self.pair_mlp: Any = nn.Sequential(
            nn.ReLU(), Linear(pair, pair), nn.ReLU(), Linear(pair, pair), nn.ReLU(), Linear(pair, pair)
        )
        self.atom_transformer = DiffusionTransformer((atom, atom, pair), config, atoms=True)
        self.linear_q: Any = nn.Sequential(Linear(atom, config["c_token"]), nn.ReLU())

    def embed(self, inputs: Inputs, windows: Windows, s: T | None = None, z: T | None = None) -> tuple[T, T]:
        """Atoms [A, C] and pairs [W, Q, K, P]."""
        atoms, pairs = self.ref_atom_feature_embedder(inputs, windows)
        if s is not None and z is not None:
            atoms, pairs = self.noisy_position_embedder(inputs, windows, atoms, pairs, s, z)
        active = atoms.relu()
        left, right = self.linear_l(windows.queries(active)), self.linear_m(windows.keys(active))
        pairs = pairs + (left[:, :, None] + right[:, None]) * windows.pairs
        return atoms, (pairs + self.pair_mlp(pairs)) * windows.pairs

    def forward(
        self, x: T, layout: Layout, biases: Sequence[T], others: Sequence[tuple[T, ...]]
    ) -> tuple[T, T]:
        """x: [S, A, C]. Returns the tokens [S, N, C'], means of their atoms, and the atoms [S, A, C]."""
        x = self.atom_transformer(x, biases, others, layout) * layout.atoms
        return layout.mean(self.linear_q(x)), x


class AtomAttentionDecoder(nn.Module):
    """Algorithm 6."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        atom = config["c_atom"]
        self.linear_q_in = Linear(config["c_token"], atom)
        self.atom_transformer = DiffusionTransformer((atom, atom, config["c_atom_pair"]), config, atoms=True)
        self.layer_norm, self.linear_q_out = LayerNorm(atom, bias=False), Linear(atom, 3)

    def forward(
        self, tokens: T, x: T, layout: Layout, biases: Sequence[T], others: Sequence[tuple[T, ...]]
    ) -> T:
        x = x + self.linear_q_in(tokens)[:, layout.token] * layout.atoms
        x = self.atom_transformer(x, biases, others, layout)
        return self.linear_q_out(self.layer_norm(x))


class InputEmbedder(nn.Module):
    """Algorithm 1, lines 1 to 5."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        own, shared = config["input_embedder"], config["shared"]
        inputs, single, pair = (shared[n] for n in ("c_s_input", "c_s", "c_z"))
        self.atom_attn_enc = AtomAttentionEncoder(own["atom_attn_enc"], noisy=False)
        self.linear_s, self.linear_z_i, self.linear_z_j = (Linear(inputs, n) for n in (single, pair, pair))
        self.linear_relpos, self.linear_token_bonds = Linear(relative_size(own), pair), Linear(1, pair)

    def forward(self, inputs: Inputs, places: T) -> tuple[T, T, T]:
        """Returns s_input [1, N, I], s [1, N, S] and z [1, N, N, Z]."""
        encoder, layout = self.atom_attn_enc, Layout.of(inputs, 1)
        atoms, pairs = encoder.embed(inputs, Windows.of(layout))
        transformer = encoder.atom_transformer
        others = transformer.condition(atoms[None])
        found, _ = encoder(atoms[None], layout, transformer.biases(pairs), others)
        known = (inputs.restype, inputs.profile, inputs.deletion_mean[:, None])
        s_input = torch.cat((found, *(t[None] for t in known)), dim=-1)
        z = self.linear_z_i(s_input)[:, :, None] + self.linear_z_j(s_input)[:, None]
        z = z + self.linear_relpos(places) + self.linear_token_bonds(inputs.token_bonds[None, :, :, None])
        return s_input, self.linear_s(s_input), z


def relative_size(config: Mapping[str, Any]) -> int:
    """The numbers of a relative position: two of max_relative_idx, one of max_relative_chain, and the entity."""
    return 2 * (2 * config["max_relative_idx"] + 2) + 2 * config["max_relative_chain"] + 3


def relative_positions(inputs: Inputs, config: Mapping[str, Any]) -> T:
    """Algorithm 3: [1, N, N, relative_size] of the model's dtype."""

    def same(t: T) -> T:
        return t[:, None] == t

    def one_hot(places: T, there: T, most: int) -> T:
        offset = (places[:, None] - places + most).clamp(0, 2 * most)
        return F.one_hot(torch.where(there, offset, 2 * most + 1).long(), 2 * most + 2)

    index, chain = config["max_relative_idx"], config["max_relative_chain"]
    chains, entities = same(inputs.asym_id), same(inputs.entity_id)
    residues = chains & same(inputs.residue_index)
    parts = (
        one_hot(inputs.residue_index, chains, index), one_hot(inputs.token_index, residues, index),
        entities[..., None], one_hot(inputs.sym_id, entities, chain),
    )  # fmt: skip
    return torch.cat([part.to(inputs.ref_pos.dtype) for part in parts], dim=-1)[None]


class FourierEmbedding(nn.Module):
    """Algorithm 22. The random numbers stay in float32: the arguments of the cosine are large."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.empty(size, dtype=torch.float32)) for _ in range(2))

    def forward(self, t: T) -> T:
        return torch.cos(2 * torch.pi * (t.float() * self.w.float() + self.b.float()))


class DiffusionConditioning(nn.Module):
    """Algorithm 21, in two parts: of the trunk's results, and of the noise level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        shared, own = config["shared"], config["diffusion_module"]["diffusion_conditioning"]
        single, pair, fourier = shared["c_s"], shared["c_z"], own["c_fourier_emb"]
        self.sigma = shared["diffusion"]["sigma_data"]
        places = relative_size(config["input_embedder"])
        self.layer_norm_z, self.linear_z = LayerNorm(places + pair, bias=False), Linear(places + pair, pair)
        self.transition_z = nn.ModuleList(SwiGLUTransition(pair, 2) for _ in range(2))
        both = single + shared["c_s_input"]
        self.layer_norm_s, self.linear_s = LayerNorm(both, bias=False), Linear(both, single)
        self.fourier_emb = FourierEmbedding(fourier)
        self.layer_norm_n, self.linear_n = LayerNorm(fourier, bias=False), Linear(fourier, single)
        self.transition_s = nn.ModuleList(SwiGLUTransition(single, 2) for _ in range(2))

    def pairs(self, z: T, places: T) -> T:
        z = self.linear_z(self.layer_norm_z(torch.cat((z, places), dim=-1)))
        for layer in self.transition_z:
            z = z + layer(z)
        return z

    def singles(self, s: T, s_input: T) -> T:
        return self.linear_s(self.layer_norm_s(torch.cat((s, s_input), dim=-1)))

    def at(self, s: T, t: T) -> T:
        """s: [1, N, S]; t: the noise level, [1] float32."""
        waves = self.fourier_emb(0.25 * torch.log(t / self.sigma)).to(s.dtype)
        s = s + self.linear_n(self.layer_norm_n(waves[None]))
        for layer in self.transition_s:
            s = s + layer(s)
        return s


@dataclass(frozen=True)
class Conditions:
    """Tensors that all steps of a rollout read. Their sizes follow from those of the inputs, and the samples."""

    layout: Layout
    s: T  # [1, N, S]
    atoms: T  # [1, A, C]
    encoder: list[tuple[T, ...]]
    decoder: list[tuple[T, ...]]
    encoder_bias: list[T]
    decoder_bias: list[T]
    token_bias: list[T]

    def tensors(self) -> list[T]:
        """All of them, in an order; see `like`."""
        lists = (self.encoder_bias, self.decoder_bias, self.token_bias, *self.encoder, *self.decoder)
        return [*vars(self.layout).values(), self.s, self.atoms, *(t for one in lists for t in one)]

    def like(self, tensors: Sequence[T]) -> Conditions:
        """The same with other tensors, in the order of `tensors`."""
        rest = iter(tensors)

        def several(given: Sequence[T]) -> list[T]:
            return [next(rest) for _ in given]

        layout, s, atoms = Layout(*(next(rest) for _ in fields(Layout))), next(rest), next(rest)
        own = self.encoder_bias, self.decoder_bias, self.token_bias
        encoder_bias, decoder_bias, token_bias = (several(given) for given in own)
        encoder, decoder = ([tuple(several(own)) for own in given] for given in (self.encoder, self.decoder))
        return Conditions(layout, s, atoms, encoder, decoder, encoder_bias, decoder_bias, token_bias)


class DiffusionModule(nn.Module):
    """Algorithm 20."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        own, shared = config["diffusion_module"], config["shared"]
        single, pair = shared["c_s"], shared["c_z"]
        token = own["diffusion_module"]["c_token"]
        self.sigma = shared["diffusion"]["sigma_data"]
        self.diffusion_conditioning = DiffusionConditioning(config)
        self.atom_attn_enc = AtomAttentionEncoder(own["atom_attn_enc"], noisy=True)
        self.layer_norm_s, self.linear_s = LayerNorm(single, bias=False), Linear(single, token)
        self.diffusion_transformer = DiffusionTransformer(
            (token, single, pair), own["diffusion_transformer"], atoms=False
        )
        self.layer_norm_a = LayerNorm(token, bias=False)
        self.atom_attn_dec = AtomAttentionDecoder(own["atom_attn_dec"])

    def condition(self, inputs: Inputs, places: T, s_input: T, s: T, z: T, samples: int) -> Conditions:
        pairs, layout = self.diffusion_conditioning.pairs(z, places), Layout.of(inputs, samples)
        atoms, atom_pairs = self.atom_attn_enc.embed(inputs, Windows.of(layout), s[0], pairs[0])
        encoder, decoder = self.atom_attn_enc.atom_transformer, self.atom_attn_dec.atom_transformer
        return Conditions(
            layout, self.diffusion_conditioning.singles(s, s_input), atoms[None], encoder.condition(atoms[None]),
            decoder.condition(atoms[None]), encoder.biases(atom_pairs), decoder.biases(atom_pairs),
            self.diffusion_transformer.biases(pairs),
        )  # fmt: skip

    def forward(self, given: Conditions, x: T, t: T) -> T:
        """x: noisy positions [S, A, 3] float32; t: the noise level, [1] float32. Returns those without noise."""
        variance, layout = t.square() + self.sigma**2, given.layout
        x = x * layout.atoms.float()
        encoder = self.atom_attn_enc
        noisy = encoder.noisy_position_embedder.linear_r((x * variance.rsqrt()).to(given.atoms.dtype))
        tokens, atoms = encoder(given.atoms + noisy, layout, given.encoder_bias, given.encoder)
        s = self.diffusion_conditioning.at(given.s, t)
        tokens = tokens + self.linear_s(self.layer_norm_s(s))
        transformer = self.diffusion_transformer
        tokens = transformer(tokens, given.token_bias, transformer.condition(s), layout)
        update = self.atom_attn_dec(
            self.layer_norm_a(tokens), atoms, layout, given.decoder_bias, given.decoder
        )
        found = self.sigma**2 / variance * x + self.sigma * t * variance.rsqrt() * update.float()
        return found * layout.atoms.float()


class Head(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.layer_norm, self.linear = LayerNorm(size), Linear(size, out)

    def forward(self, x: T) -> T:
        return self.linear(self.layer_norm(x))


class DistogramHead(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.linear = Linear(size, out)

    def forward(self, z: T) -> T:
        found = self.linear(z)
        return found + found.transpose(1, 2)


class PairformerEmbedding(nn.Module):
    """Algorithm 31, lines 1 to 4."""

    def __init__(self, config: Mapping[str, Any], inputs: int) -> None:
        super().__init__()
        self.bins = (config["min_bin"], config["max_bin"], config["no_bin"])
        pair = config["pairformer"]["c_z"]
        self.linear_i, self.linear_j = Linear(inputs, pair), Linear(inputs, pair)
        self.linear_distance = Linear(config["no_bin"], pair)
        self.pairformer_stack = PairFormerStack(config["pairformer"])

    def forward(self, s_input: T, s: T, z: T, x: T, pairs: T, tokens: T) -> tuple[T, T]:
        """x: [N, 3] of the tokens' representative atoms."""
        z = z + self.linear_i(s_input)[:, :, None] + self.linear_j(s_input)[:, None]
        low = torch.linspace(*self.bins, device=x.device, dtype=torch.float32).square()
        high = torch.cat((low[1:], low.new_full((1,), 1e9)))
        distance = (x[:, None] - x).square().sum(-1, keepdim=True)
        z = z + self.linear_distance(((distance > low) & (distance < high)).to(z.dtype))
        return self.pairformer_stack(s, z, pairs, tokens)


class AuxiliaryHeads(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        heads, shared = config["heads"], config["shared"]
        single, pair, self.most = shared["c_s"], shared["c_z"], heads["max_atoms_per_token"]
        self.pairformer_embedding = PairformerEmbedding(heads["pairformer_embedding"], shared["c_s_input"])
        self.pde, self.plddt = (
            Head(pair, heads["pde"]["c_out"]),
            Head(single, self.most * heads["lddt"]["c_out"]),
        )
        self.distogram = DistogramHead(pair, heads["distogram"]["c_out"])
        self.experimentally_resolved = Head(single, self.most * heads["experimentally_resolved"]["c_out"])
        self.pae = Head(pair, heads["pae"]["c_out"]) if heads["pae"]["enabled"] else None

    def forward(self, inputs: Inputs, s_input: T, s: T, z: T, x: T) -> dict[str, T]:
        """Logits of one sample. x: [A, 3]."""
        s, z = self.pairformer_embedding(
            s_input, s, z, x[inputs.representative].float(), inputs.pairs, inputs.tokens
        )
        pde = self.pde(z)
        found = {
            "plddt": self._of_atoms(self.plddt(s), inputs),
            "experimentally_resolved": self._of_atoms(self.experimentally_resolved(s), inputs),
            "pde": (pde + pde.transpose(1, 2))[0],
        }
        return found if self.pae is None else {**found, "pae": self.pae(z)[0]}

    def _of_atoms(self, x: T, inputs: Inputs) -> T:
        """x: [1, N, most * C] of the atoms that a token may have. Returns [A, C]."""
        return x.view(x.shape[1], self.most, -1)[inputs.atom_to_token_index, inputs.atom_of_token]


@dataclass(frozen=True)
class Inputs:
    """The features of a request (features.Features) on the model's device; floats are of the model's dtype.

    representative  [N] int64: the atom that stands for a token; atom_of_token [A] int64: the atom's place in its token
    segment_starts  [N + 1] int32: the first atom of each token, and the atoms that are there
    """

    residue_index: T
    token_index: T
    asym_id: T
    entity_id: T
    sym_id: T
    restype: T
    profile: T
    deletion_mean: T
    token_bonds: T
    token_mask: T
    msa: T
    msa_mask: T
    template_restype: T
    template_pseudo_beta_mask: T
    template_backbone_frame_mask: T
    template_distogram: T
    template_unit_vector: T
    ref_pos: T
    ref_charge: T
    ref_mask: T
    ref_element: T
    ref_atom_name_chars: T
    ref_space_uid: T
    atom_mask: T
    atom_to_token_index: T
    atom_of_token: T
    representative: T
    segment_starts: T

    @classmethod
    def of(cls, given: Mapping[str, T], dtype: torch.dtype) -> Inputs:
        """given: features.Features.arrays as tensors."""
        return cls(
            **{f.name: t.to(dtype) if (t := given[f.name]).is_floating_point() else t for f in fields(cls)}
        )

    def tensors(self) -> list[T]:
        return [getattr(self, f.name) for f in fields(self)]

    @property
    def tokens(self) -> T:
        """[1, 1, N] bool."""
        return self.token_mask[None, None] > 0

    @property
    def pairs(self) -> T:
        """[1, N, N] of the model's dtype."""
        return (self.token_mask[:, None] * self.token_mask)[None]


class OpenFold3(nn.Module):
    """config: the fields of read_config. Methods take and return tensors on the model's device.

    The order: `embed`, `cycle` once and for each recycle, `condition`, `denoise` for each step, `confidence`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        own = config.architecture
        shared, msa = own["shared"], own["msa"]
        single, pair, inputs = (shared[n] for n in ("c_s", "c_z", "c_s_input"))
        self.num_recycles: int = shared["num_recycles"]
        self.num_samples: int = shared["diffusion"]["no_full_rollout_samples"]
        self.num_steps: int = shared["diffusion"]["no_full_rollout_steps"]
        self.sigma: float = shared["diffusion"]["sigma_data"]
        self.most_rows: int = msa["msa_module_embedder"]["max_subsampled_all_msa"]
        self.input_embedder = InputEmbedder(own)
        self.layer_norm_z, self.linear_z = LayerNorm(pair), Linear(pair, pair)
        self.template_embedder = TemplateEmbedder(own["template"])
        self.msa_module_embedder = MSAModuleEmbedder(
            msa["msa_module_embedder"]["c_m_feats"], msa["msa_module"]["c_m"], inputs
        )
        self.msa_module = MSAModuleStack(msa["msa_module"])
        self.layer_norm_s, self.linear_s = LayerNorm(single), Linear(single, single)
        self.pairformer_stack = PairFormerStack(own["pairformer"])
        self.diffusion_module = DiffusionModule(own)
        self.aux_heads = AuxiliaryHeads(own)

    def ready(self, folder: Path, dummy: bool) -> None:
        """Called once the weights are loaded. With random weights, the Fourier embedding is random, too."""
        if dummy:
            own = self.diffusion_module.diffusion_conditioning.fourier_emb
            generator = torch.Generator().manual_seed(42)
            own.w.data.copy_(torch.randn(own.w.shape, generator=generator))
            own.b.data.copy_(torch.rand(own.b.shape, generator=generator))

    def read(self, given: Any, most_tokens: int | None = None) -> features.Features:
        """The checked features of a request. Raises ValueError, whose message begins with "the input"."""
        return features.read(given, self.aux_heads.most, most_tokens)

    def inputs(self, given: Mapping[str, T]) -> Inputs:
        return Inputs.of(given, self.linear_s.weight.dtype)

    def _places(self, inputs: Inputs) -> T:
        return relative_positions(inputs, self.config.architecture["input_embedder"])

    def embed(self, inputs: Inputs) -> tuple[T, T, T]:
        """s_input [1, N, I], s [1, N, S] and z [1, N, N, Z] that every cycle begins with."""
        return self.input_embedder(inputs, self._places(inputs))

    def cycle(self, inputs: Inputs, start: tuple[T, T, T], s: T, z: T, rows: T) -> tuple[T, T]:
        """Algorithm 1, lines 8 to 13. s, z: of the cycle before, or zeros; rows: [S'] int64 of the alignment."""
        s_input, s_first, z_first = start
        z = z_first + self.linear_z(self.layer_norm_z(z))
        z = z + self.template_embedder(inputs, z, inputs.pairs, inputs.tokens)
        m = self.msa_module_embedder(inputs.msa[rows], s_input)
        z = self.msa_module(m, z, inputs.msa_mask[rows], inputs.pairs, inputs.tokens)
        s = s_first + self.linear_s(self.layer_norm_s(s))
        return self.pairformer_stack(s, z, inputs.pairs, inputs.tokens)

    def condition(self, inputs: Inputs, s_input: T, s: T, z: T, samples: int) -> Conditions:
        return self.diffusion_module.condition(inputs, self._places(inputs), s_input, s, z, samples)

    def noise_levels(self, steps: int) -> T:
        """[steps + 1] float32, on the CPU."""
        own = self.config.architecture["noise_schedule"]
        at, power = torch.arange(steps + 1, dtype=torch.float32) / steps, 1 / own["p"]
        low, high = own["s_min"] ** power, own["s_max"] ** power
        return self.sigma * (high + at * (low - high)) ** own["p"]

    def schedule(self, steps: int) -> T:
        """[steps, 3] float32, on the CPU: of each step the noise level, the factor of the noise, and the stride."""
        own, levels = self.config.architecture["sample_diffusion"], self.noise_levels(steps)
        before, after = levels[:-1], levels[1:]
        t = before * (1 + torch.where(after > own["gamma_min"], own["gamma_0"], 0.0))
        noise = own["noise_scale"] * (t.square() - before.square()).sqrt()
        return torch.stack((t, noise, own["step_scale"] * (after - t)), dim=1)

    def denoise(self, given: Conditions, x: T, step: T, turn: T, shift: T, noise: T) -> T:
        """Algorithm 18, a step: x [S, A, 3] float32 to the next x.

        step: [3], a row of `schedule`; turn: [S, 4] and shift: [S, 3], random numbers of the augmentation; noise:
        [S, A, 3]. All are float32.
        """
        t, scale, stride = step[0:1], step[1:2], step[2:3]
        mask = given.layout.atoms.float()
        center = (x * mask).sum(1, keepdim=True) / mask.sum().clamp(min=1)
        x = ((x - center) @ rotations(turn).transpose(1, 2) + shift[:, None]) * mask + scale * noise
        found = self.diffusion_module(given, x, t)
        return x + stride * (x - found) / t

    def confidence(self, inputs: Inputs, s_input: T, s: T, z: T, x: T) -> dict[str, T]:
        """Logits of one sample x [A, 3]: plddt and experimentally_resolved of atoms, pde and pae of pairs of tokens."""
        return self.aux_heads(inputs, s_input, s, z, x)

    def distogram(self, z: T) -> T:
        """Logits [N, N, bins]."""
        return self.aux_heads.distogram(z)[0]


def rotations(quaternions: T) -> T:
    """[S, 4] of any length to [S, 3, 3]."""
    a, b, c, d = F.normalize(quaternions, dim=-1).unbind(-1)
    rows = (
        a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c),
        2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b),
        2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d,
    )  # fmt: skip
    return torch.stack(rows, dim=-1).view(-1, 3, 3)


def without_biases(config: Any) -> Sequence[str]:
    """Only queries have a bias."""
    return [f"*.mha.linear_{name}.bias" for name in "gkv"]


ARCH = Architecture(
    names=("OpenFold3",),
    category="science",
    model="OpenFold3",
    runner="Fold",
    inputs="chains",
    model_type="openfold3",
    packed={
        "linear_qgkv": ("linear_q", "linear_g", "linear_k", "linear_v"),
        "linear_ab": ("linear_a", "linear_b"),
    },
    absent="fastkernels.models.science.openfold3:without_biases",
    prefixes={"module.": "", "model.": ""},
    renamed={"sample_diffusion.diffusion_module.": "diffusion_module."},
    repeated=("diffusion_module.*",),
    unused=("version_tensor",),
    own_config="fastkernels.models.science.openfold3:read_config",
)
