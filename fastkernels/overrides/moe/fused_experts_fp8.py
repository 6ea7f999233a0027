"""Mixture of experts in float8 e4m3 (arXiv 2209.05433), with scales per expert, per channel and token, or per block."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import ForOthers, Key, Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Sizes, Tensor, Tolerance, uniform
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.fp8 import FP8, FP8_MAX, GROUP_EPS, MIN_ABSMAX, quantize_rows
from fastkernels.overrides.kit.hopper import no_hopper
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, ROW, TENSOR, blocks, expanded
from fastkernels.overrides.linear.kernels.linear_fp8_triton import unsupported_fp8
from fastkernels.overrides.moe import expert_libraries as libraries
from fastkernels.overrides.moe.cases import (
    AXES,
    FLOPS,
    MIXTRAL,
    QWEN3_30B,
    ROUTING_BYTES,
    build_fp8,
    extremes,
    per_expert,
    routing,
)
from fastkernels.overrides.moe.fused_experts import (
    POINTS,
    SHAPE,
    SIZES,
    check_sizes,
    dims_of_key,
    fits_call,
    key_of,
    local_ids,
)
from fastkernels.overrides.moe.grouped_gemm import Scales, grouped_gemm, sum_over_experts
from fastkernels.overrides.moe.moe_tiles import LEAST, chosen, sets, tiles_fp8, wide
from fastkernels.overrides.moe.selection import propose_experts_fp8
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8
from fastkernels.overrides.routing.sorted_pairs import gather, sort_pairs

T = torch.Tensor
# Kinds of activation scales, in addition to BLOCK.
GIVEN, TOKEN, FOUND = 0, 1, 2


class Kind(NamedTuple):
    """The granularity of scales.

    weights      one scale per expert (TENSOR), per row (ROW) or per 128 x 128 weights (BLOCK)
    activations  one given scale (GIVEN), one per token (TOKEN), one computed for all tokens (FOUND) or one per 128
                 columns of a token (BLOCK)
    """

    weights: int
    activations: int

    @property
    def group_size(self) -> int:
        """The argument of quantize_fp8."""
        return {TOKEN: -1, BLOCK: BLOCK}.get(self.activations, 0)

    @property
    def min_absmax(self) -> float:
        return GROUP_EPS if self.activations == BLOCK else MIN_ABSMAX


def kind_of(
    w1: torch.Tensor, w1_scale: torch.Tensor, a1_scale: torch.Tensor | None, per_token: bool,
    block_shape: list[int] | None,
) -> Kind:  # fmt: skip
    """Return the granularity of a call that passed check_scales."""
    if block_shape is not None:
        return Kind(BLOCK, BLOCK)
    weights = TENSOR if w1_scale.numel() == w1.shape[0] else ROW
    return Kind(weights, TOKEN if per_token else FOUND if a1_scale is None else GIVEN)


def unsupported_scales(
    w1: torch.Tensor, w2: torch.Tensor, w1_scale: torch.Tensor, w2_scale: torch.Tensor, a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None, per_token: bool, block_shape: list[int] | None, ue8m0: bool,
) -> str | None:  # fmt: skip
    """Return a reason for scales that match neither the weights nor each other."""
    if block_shape is not None and (list(block_shape) != [BLOCK, BLOCK] or per_token):
        return (
            f"fused_experts_fp8: block_shape {list(block_shape)} and per_act_token_quant {per_token}: blocks are"
            f" {BLOCK} x {BLOCK}, and activations have one scale per {BLOCK} columns"
        )
    if ue8m0 and block_shape is None:
        return "fused_experts_fp8: scale_ue8m0 needs scales of blocks, but block_shape is None"
    found = []
    for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        e, n, k = w.shape
        if block_shape is not None and k % BLOCK:
            return (
                f"fused_experts_fp8: {name} has {k} columns, not a multiple of {BLOCK},"
                " the size of activation groups"
            )
        shapes: dict[int, list[tuple[int, ...]]] = {BLOCK: [(e, blocks(n), blocks(k))]}
        if block_shape is None:
            shapes = {TENSOR: [(e,), (e, 1), (e, 1, 1)], ROW: [(e, n), (e, n, 1)]}
        kinds = [kind for kind, several in shapes.items() if tuple(scale.shape) in several]
        if not kinds:
            allowed = " or ".join(str(shape) for several in shapes.values() for shape in several)
            return f"fused_experts_fp8: {name}_scale {tuple(scale.shape)} must be {allowed}"
        found.append(kinds)
    given = [s for s in (a1_scale, a2_scale) if s is not None]
    if not set(found[0]) & set(found[1]):
        return (
            f"fused_experts_fp8: w1_scale {tuple(w1_scale.shape)} and w2_scale {tuple(w2_scale.shape)} must both be"
            " per expert or both per row"
        )
    if len(given) == 1 or any(s.numel() != 1 for s in given) or (given and (per_token or block_shape)):
        return (
            "fused_experts_fp8: a1_scale and a2_scale must both be None, or both be one value without"
            " per_act_token_quant and block_shape"
        )
    return None


def check_scales(
    w1: torch.Tensor, w2: torch.Tensor, w1_scale: torch.Tensor, w2_scale: torch.Tensor, a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None, per_token: bool, block_shape: list[int] | None, ue8m0: bool,
) -> Kind:  # fmt: skip
    """Return the granularity. Raises ValueError for unsupported scales."""
    reason = unsupported_scales(w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, per_token, block_shape, ue8m0)
    if reason is not None:
        raise ValueError(reason)
    return kind_of(w1, w1_scale, a1_scale, per_token, block_shape)


def scales(kind: Kind, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Scales:
    """Return the scales of a grouped product: a_scale ([1] or [rows, columns]) of activations, w_scale of weights w."""
    a_row, a_block = (0, 0) if a_scale.dim() == 1 else a_scale.stride()
    if kind.weights == BLOCK:
        return Scales(BLOCK, a_scale, a_row, a_block, w_scale, *w_scale.stride())
    b_row = w_scale.stride(1) if kind.weights == ROW and w.shape[1] > 1 else 0
    return Scales(ROW, a_scale, a_row, 0, w_scale, w_scale.stride(0), b_row, 0)


def dequantized(w: torch.Tensor, scale: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the values of one expert's w [N, K] in the dtype of its scale."""
    return w.to(scale.dtype) * expanded(scale, w.shape[0], w.shape[1], kind.weights, BLOCK)


def rounded(y: torch.Tensor, scale: torch.Tensor | None, kind: Kind, ue8m0: bool) -> torch.Tensor:
    """Round y [rows, N] to scaled float8 and return the rounded values in at least float32."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    if not wide.numel():
        return wide
    q, s = quantize_rows(wide, scale, kind.group_size, None, kind.min_absmax, ue8m0)
    groups = s.shape[-1] if s.dim() == y.dim() else 1
    return (q.to(FP8).to(wide.dtype).unflatten(-1, (groups, -1)) * s.unsqueeze(-1)).flatten(-2)


def reference(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
) -> T:  # fmt: skip
    """hidden_states: [T, H]; w1: [E, 2 I, H], gate rows first, and w2: [E, H, I], both float8 e4m3; topk_weights,
    topk_ids: [T, K]. Returns [T, H] in hidden_states' dtype.

    w1_scale, w2_scale  float32. Per expert: [E] or [E, 1]; per row: [E, 2 I] and [E, H], optionally with a last
                        dimension of 1; with block_shape [128, 128] per block: [E, cdiv(2 I, 128), cdiv(H, 128)] and
                        [E, cdiv(H, 128), cdiv(I, 128)]
    a1_scale, a2_scale  one value each: the inputs of w1 and of w2 are divided by them and rounded to float8. None: a
                        scale maps the largest absolute value to 448, of all tokens, of each token
                        (per_act_token_quant) or of each 128 columns (block_shape)
    scale_ue8m0         with block_shape: activation scales are rounded up to powers of two
    expert_map, apply_router_weight_on_input, topk_ids  as in `fused_experts`

    Activations are rounded to float8; gate, up and their product are rounded to hidden_states' dtype first. Raises
    ValueError for tensors and scales that do not match.
    """
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    kind = check_scales(
        w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, per_act_token_quant, block_shape, scale_ue8m0
    )
    acc = torch.promote_types(hidden_states.dtype, torch.float32)
    ids, weights = local_ids(topk_ids, expert_map), topk_weights.to(acc)[..., None]
    x = rounded(hidden_states, a1_scale, kind, scale_ue8m0)
    gate_up = x.new_zeros((*ids.shape, w1.shape[1]))  # per pair; 0 without a local expert
    for expert in range(w1.shape[0]):
        y = (x @ dequantized(w1[expert], w1_scale[expert].to(acc), kind).t())[:, None]
        gate_up = torch.where((ids == expert)[..., None], y, gate_up)
    if apply_router_weight_on_input:
        gate_up, weights = gate_up * weights, torch.ones_like(weights)
    gate, up = gate_up.to(hidden_states.dtype).chunk(2, dim=-1)
    inner = rounded((F.silu(gate) * up).flatten(0, 1), a2_scale, kind, scale_ue8m0)
    inner = inner.view(*ids.shape, w2.shape[2])
    out = torch.zeros(hidden_states.shape, dtype=acc, device=x.device)
    for expert in range(w1.shape[0]):
        y = inner @ dequantized(w2[expert], w2_scale[expert].to(acc), kind).t()
        out += torch.where((ids == expert)[..., None], y * weights, 0).sum(dim=1)
    return out.to(hidden_states.dtype)


def _supports_triton(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
) -> str | None:  # fmt: skip
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {hidden_states.dtype} is not float32, float16 or bfloat16"
    if hidden_states.dtype == torch.float32 and hidden_states.is_cuda:
        return "tensor cores add products of float8 with 14 bits, too few for a result in float32"
    if (reason := unsupported_fp8(hidden_states.device)) is not None:
        return reason
    for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        if w.dtype != FP8 or scale.dtype != torch.float32:
            return f"{name} is {w.dtype} and its scale {scale.dtype}, not float8_e4m3fn and float32"
        if w.stride(-1) != 1:
            return f"{name} has strides {tuple(w.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
    gate_up: str | None = None, down: str | None = None,
) -> T:  # fmt: skip
    """gate_up, down: tiles of the two products as a tuned table names them; None: the kernel's default."""
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    kind = check_scales(
        w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, per_act_token_quant, block_shape, scale_ue8m0
    )
    x, ids, weights = hidden_states, topk_ids.contiguous(), topk_weights.contiguous()
    if ids.numel() == 0 or w1.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    first, second = chosen(
        tiles_fp8(ids.numel() // experts, block_shape is not None, wide(x.device)), gate_up, down
    )
    # Group scales are stored column-major: a tile reads the scales of its rows for one block of columns.
    how = (kind.group_size, None, kind.min_absmax, kind.activations == BLOCK)
    q, a_scale = quantize_fp8.run(x, a1_scale, *how, False, scale_ue8m0)
    pairs = sort_pairs(ids, experts, expert_map, first.block_m)
    early, late = (weights, None) if apply_router_weight_on_input else (None, weights)
    # Rows without a local expert are not written and must not affect a scale that all rows share.
    make = torch.zeros if kind.activations == FOUND else torch.empty
    both = make((pairs.n_pairs, w1.shape[1]), dtype=x.dtype, device=x.device)
    grouped_gemm(q, w1, pairs, pairs.topk, early, first, scales(kind, a_scale, w1, w1_scale), both)
    if kind.activations == FOUND:
        q, a_scale = quantize_fp8.run(silu_and_mul.run(both), None, *how)
    else:
        q, a_scale = silu_mul_quant_fp8.run(both, a2_scale, *how, scale_ue8m0)
    out = torch.empty((pairs.n_pairs, x.shape[1]), dtype=x.dtype, device=x.device)
    grouped_gemm(q, w2, pairs, 1, late, second, scales(kind, a_scale, w2, w2_scale), out)
    return sum_over_experts(out, ids, experts, expert_map)


ROWS = 128  # of a tile of the products of prompts
TILE = {"rows": ROWS, "columns": 256, "cooperate": True}


def _not_for_tiles(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
) -> str | None:  # fmt: skip
    if (reason := no_hopper(tiled.SOURCE, hidden_states.device)) is not None:
        return reason
    if hidden_states.dtype not in (torch.float16, torch.bfloat16) or block_shape is None:
        return f"needs scales of blocks, and float16 or bfloat16, got {hidden_states.dtype}"
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    if apply_router_weight_on_input or topk_ids.numel() < LEAST * experts:
        return f"the router's weights are applied to the input, or fewer than {LEAST} rows for an expert"
    for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        if w.dtype != FP8 or scale.dtype != torch.float32:
            return f"{name} is {w.dtype} and its scale {scale.dtype}, not float8_e4m3fn and float32"
        if not w.is_contiguous() or not scale.is_contiguous():
            return f"{name} or its scale is not contiguous"
        if w.shape[1] % 32 or w.shape[2] % BLOCK or w.data_ptr() % 16:
            return f"{name} has shape {tuple(w.shape)}: it needs multiples of 32 rows and {BLOCK} columns"
    rows = topk_ids.numel() + ROWS * experts
    if rows * max(w1.shape[1], w2.shape[1]) >= 1 << 32:
        return "2^32 results or more"
    return None


def _supports_tiled(*call: Any) -> str | None:
    """Return why this call is for the other providers, None if it is for tiles."""
    reason = _not_for_tiles(*call)
    return None if reason is None else ForOthers(reason)


def _tiled(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
    **tile: Any,
) -> T:  # fmt: skip
    """Multiply tiles of rows in the order of their experts, for many rows of each. tile: of TILE's parameters."""
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    kind = check_scales(
        w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, per_act_token_quant, block_shape, scale_ue8m0
    )
    x, ids, weights = hidden_states, topk_ids.contiguous(), topk_weights.float().contiguous()
    tile = {**TILE, **tile}
    experts = w1.shape[0] if expert_map is None else expert_map.numel()
    how = (kind.group_size, None, kind.min_absmax, True)
    q, a_scale = quantize_fp8.run(x, None, *how, False, scale_ue8m0)
    pairs = sort_pairs(ids, experts, expert_map, tile["rows"])
    q, a_scale = gather(q, a_scale, pairs)
    q, a_scale = tiled.grouped_swiglu_fp8_tiled(q, w1, a_scale, w1_scale, pairs, x.dtype, scale_ue8m0, **tile)
    out = tiled.grouped_fp8_tiled(q, w2, a_scale, w2_scale, pairs, weights, x.dtype, **tile)
    return sum_over_experts(out, ids, experts, expert_map)


def _fake(hidden_states: T, *args: Any) -> T:
    return torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)


def _key(
    hidden_states: T, w1: T, w2: T, w1_scale: T, w2_scale: T, topk_weights: T, topk_ids: T, a1_scale: T | None = None,
    a2_scale: T | None = None, per_act_token_quant: bool = False, block_shape: list[int] | None = None,
    scale_ue8m0: bool = False, expert_map: T | None = None, apply_router_weight_on_input: bool = False,
) -> tuple[tuple[Any, ...], tuple[int]]:  # fmt: skip
    shape, sizes = key_of(w1, w2, topk_ids, expert_map)
    kind = kind_of(w1, w1_scale, a1_scale, per_act_token_quant, block_shape)
    return (*shape, *kind, hidden_states.dtype), sizes


def _fits(params: dict[str, str], *args: Any) -> bool:
    shape, sizes = _key(*args)
    return fits_call(params, shape, sizes, shape[len(SHAPE)] == BLOCK)


def _dims_of_key(block: int, act: int, dtype: torch.dtype, **sizes: int) -> dict[str, Any]:
    ue8m0 = {"ue8m0": True} if block == BLOCK else {}  # as in vLLM
    return {**dims_of_key(**sizes), "block": block, "act": act, **ue8m0}


fused_experts_fp8 = define(
    "fused_experts_fp8(Tensor hidden_states, Tensor w1, Tensor w2, Tensor w1_scale, Tensor w2_scale,"
    " Tensor topk_weights, Tensor topk_ids, Tensor? a1_scale=None, Tensor? a2_scale=None,"
    " bool per_act_token_quant=False, int[]? block_shape=None, bool scale_ue8m0=False, Tensor? expert_map=None,"
    " bool apply_router_weight_on_input=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider("cuda-tiled-fp8", _tiled, supports=_supports_tiled),  # many rows of each expert, scales of blocks
        Provider(
            "triton", _triton, devices=("cuda",), supports=_supports_triton, params=sets(1),
            fits=_fits,
        ),
        # The hosts' kernels, only where a tuned table names them.
        Provider(
            "vllm", libraries.for_any_ids(libraries.fused_experts_fp8_vllm, 5), module="vllm",
            supports=libraries.supports_vllm_fp8,
        ),
        Provider(
            "cutlass", libraries.for_any_ids(libraries.fused_experts_fp8_cutlass, 5), module="vllm",
            supports=libraries.supports_cutlass,
        ),
        Provider(
            "deepgemm", libraries.for_any_ids(libraries.fused_experts_fp8_deepgemm, 5),
            module="vllm.third_party.deep_gemm", supports=libraries.supports_deepgemm,
        ),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
    # block and act are the fields of Kind.
    key=Key(
        shape=(*SHAPE, "block", "act", "dtype"), sizes=SIZES, of=_key, dims=_dims_of_key, propose=propose_experts_fp8,
        points=POINTS,
    ),
)  # fmt: skip


def _weight(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
    made = torch.empty(shape, dtype=dtype, device=call.device)
    for expert in made:  # one by one: Mixtral has 1.4 G weights
        expert.copy_((100 * call.randn(*shape[1:])).clamp_(-FP8_MAX, FP8_MAX))
    return made


def _weight_scale(name: str, axes: str) -> Tensor:
    """Declare the scales of a weight with `axes` [N, K], which give it a variance of about 1 / K."""
    n, k = axes.split()

    def values(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> T:
        return (call.rand(*shape) + 0.5) * (0.01 / math.sqrt(max(call[k], 1)))

    rows, columns = f"cdiv({n},{BLOCK})", f"cdiv({k},{BLOCK})"
    shapes = {
        **per_expert(n, f"block == {ROW}"), **per_expert(f"{rows} {columns}", f"block == {BLOCK}"), **per_expert(""),
    }  # fmt: skip
    one = int(name == "w1_scale")  # of two single scales per expert, one is counted
    counted = f"{n} if block == {ROW} else {rows} * {columns} if block == {BLOCK} else {one}"
    return Tensor(name, shapes, "float32", values=values, bytes=f"4 * experts_hit * ({counted})")


def _kind(args: SimpleNamespace) -> Kind:
    return kind_of(args.w1, args.w1_scale, args.a1_scale, args.per_act_token_quant, args.block_shape)


def _block_shape(sizes: Sizes) -> list[int] | None:
    return [BLOCK, BLOCK] if sizes["block"] == BLOCK else None


def _models(
    block: int, act: int, name: str, sizes: dict[str, int], tokens: tuple[int, ...] = (1, 32, 256, 4096), **more: bool
) -> tuple[Case, ...]:  # fmt: skip
    return tuple(
        Case(f"{name}_{n}", {"tokens": n, **sizes, "block": block, "act": act, **more}, "bfloat16", tags=("model",))
        for n in tokens
    )  # fmt: skip


def _odd(
    name: str, tokens: int, experts: int, topk: int, hidden: int, intermediate: int, block: int, act: int,
    dtype: str = "bfloat16", **more: bool,
) -> Case:  # fmt: skip
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    return Case(name, {"tokens": tokens, **sizes, "block": block, "act": act, **more}, dtype, tags=("odd",))


SPEC = OpSpec(
    name="fused_experts_fp8",
    level=2,
    by_default=True,
    reference=reference,
    op=fused_experts_fp8,
    cases=(
        # FP8 checkpoints of Mixtral: one scale per expert, given activation scales.
        *_models(TENSOR, GIVEN, "mixtral", MIXTRAL),
        *_models(ROW, TOKEN, "mixtral_channels", MIXTRAL, (32, 4096)),
        *_models(BLOCK, BLOCK, "qwen3", QWEN3_30B, ue8m0=True),
        *_models(BLOCK, BLOCK, "mixtral_blocks", MIXTRAL, (32, 256), ue8m0=True),
        _odd("tensors_63", 63, 5, 2, 72, 130, TENSOR, GIVEN),
        _odd("found_9", 9, 7, 3, 64, 48, TENSOR, FOUND, "float16"),
        _odd("channels_33", 33, 12, 3, 100, 63, ROW, TOKEN),
        _odd("blocks_19", 19, 6, 2, 256, 128, BLOCK, BLOCK),
        _odd("powers_of_two", 5, 40, 2, 128, 384, BLOCK, BLOCK, "float32", ue8m0=True),
        _odd("cut", 40, 2, 2, 384, 128, BLOCK, BLOCK, "float16"),
        _odd("one", 1, 1, 1, 16, 16, TENSOR, GIVEN, "float32"),
        _odd("few", 2, 40, 3, 48, 32, ROW, TOKEN, "float32"),
        _odd("elsewhere", 19, 7, 3, 64, 48, TENSOR, FOUND, "float32", elsewhere=True),
        _odd("elsewhere_blocks", 11, 6, 2, 128, 128, BLOCK, BLOCK, elsewhere=True),
        _odd("on_input", 9, 3, 1, 40, 24, ROW, TOKEN, "float16", on_input=True),
        _odd("tokens_of_tensors", 21, 4, 2, 64, 40, TENSOR, TOKEN, "float32"),
        _odd("none", 0, 4, 2, 64, 48, TENSOR, GIVEN, "float32"),
    ),
    arguments=(
        Tensor("hidden_states", "tokens hidden"),
        Tensor(
            "w1",
            per_expert("2*intermediate hidden"),
            "float8_e4m3fn",
            values=_weight,
            bytes="experts_hit * 2 * intermediate * hidden",
        ),
        Tensor(
            "w2",
            per_expert("hidden intermediate"),
            "float8_e4m3fn",
            values=_weight,
            bytes="experts_hit * hidden * intermediate",
        ),
        _weight_scale("w1_scale", "2*intermediate hidden"),
        _weight_scale("w2_scale", "hidden intermediate"),
        Tensor("topk_weights", "tokens topk", "float32"),
        Tensor("topk_ids", "tokens topk", "ids", bytes=ROUTING_BYTES),
        Tensor("a1_scale", "1", "float32", when=f"act == {GIVEN}", values=uniform(0.01, 0.014), bytes="0"),
        Tensor("a2_scale", "1", "float32", when=f"act == {GIVEN}", values=uniform(0.01, 0.014), bytes="0"),
        Scalar("per_act_token_quant", value=f"act == {TOKEN}"),
        Scalar("block_shape"),
        Scalar("scale_ue8m0", "ue8m0", default=False),
        Tensor("expert_map", "experts", "int32", when="elsewhere", bytes="0"),
        Scalar("apply_router_weight_on_input", "on_input", default=False),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={
        **AXES,
        "block": Axis(read=lambda a: _kind(a).weights),
        "act": Axis(read=lambda a: _kind(a).activations),
        "block_shape": Axis(_block_shape),
    },
    constraints=("topk <= experts", "hidden % max(block, 1) == 0", "intermediate % max(block, 1) == 0"),
    values=routing,
    flops=FLOPS,
    # Another order of summation, or rounding to 16 bits, moves a value between two float8 numbers to the other one, an
    # eighth away: up to 0.09 was observed with sums of 128 products, less with longer sums.
    tolerance={name: Tolerance(0.12, 6e-2) for name in ("float32", "float16", "bfloat16")},
    extremes=extremes(5),
    activations=(0,),
    calls=("moe_align", "quantize_fp8", "silu_and_mul", "silu_mul_quant_fp8"),
    by_table=fused_experts_fp8,
    build=build_fp8,
)
