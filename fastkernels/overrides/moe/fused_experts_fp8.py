"""Mixture of experts in float8 e4m3 (arXiv 2209.05433): scales of experts, of channels and tokens, or of blocks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastkernels.core.dispatch import Key, Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Sizes, Tensor, Tolerance, uniform
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.fp8 import FP8, FP8_MAX, GROUP_EPS, MIN_ABSMAX, quantize_rows
from fastkernels.overrides.linear.linear_fp8_scales import BLOCK, ROW, TENSOR, blocks, expanded
from fastkernels.overrides.linear.linear_fp8_triton import unsupported_fp8
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
    SHAPE,
    SIZES,
    check_sizes,
    dims_of_key,
    fits_call,
    key_of,
    local_ids,
)
from fastkernels.overrides.moe.grouped_gemm import Scales, grouped_gemm, sort_pairs, sum_over_experts
from fastkernels.overrides.moe.moe_tiles import chosen, sets, tiles_fp8, wide
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8

T = torch.Tensor
GIVEN, TOKEN, FOUND = 0, 1, 2  # scales of activations; BLOCK: of groups


class Kind(NamedTuple):
    """weights     TENSOR: a scale an expert, ROW: a row, BLOCK: 128 x 128 numbers
    activations GIVEN: one that is given, TOKEN: one a token, FOUND: one for all that is found, BLOCK: 128 columns
    """

    weights: int
    activations: int

    @property
    def group_size(self) -> int:
        """As quantize_fp8 has it."""
        return {TOKEN: -1, BLOCK: BLOCK}.get(self.activations, 0)

    @property
    def min_absmax(self) -> float:
        return GROUP_EPS if self.activations == BLOCK else MIN_ABSMAX


def kind_of(
    w1: torch.Tensor, w1_scale: torch.Tensor, a1_scale: torch.Tensor | None, per_token: bool,
    block_shape: list[int] | None,
) -> Kind:  # fmt: skip
    """Of a call whose arguments were checked."""
    if block_shape is not None:
        return Kind(BLOCK, BLOCK)
    weights = TENSOR if w1_scale.numel() == w1.shape[0] else ROW
    return Kind(weights, TOKEN if per_token else FOUND if a1_scale is None else GIVEN)


def check_scales(
    w1: torch.Tensor, w2: torch.Tensor, w1_scale: torch.Tensor, w2_scale: torch.Tensor, a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None, per_token: bool, block_shape: list[int] | None, ue8m0: bool,
) -> Kind:  # fmt: skip
    """Raises ValueError for scales that do not fit the weights or each other."""
    if block_shape is not None and (list(block_shape) != [BLOCK, BLOCK] or per_token):
        raise ValueError(
            f"fused_experts_fp8: block_shape {list(block_shape)} and per_act_token_quant {per_token}: blocks are"
            f" {BLOCK} x {BLOCK}, and activations then have a scale for each {BLOCK} columns"
        )
    if ue8m0 and block_shape is None:
        raise ValueError("fused_experts_fp8: scale_ue8m0 is for scales of blocks, and block_shape is None")
    found = []
    for name, w, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        e, n, k = w.shape
        if block_shape is not None and k % BLOCK:
            raise ValueError(
                f"fused_experts_fp8: {name} has {k} columns, not a multiple of {BLOCK}: groups of activations"
            )
        shapes: dict[int, list[tuple[int, ...]]] = {BLOCK: [(e, blocks(n), blocks(k))]}
        if block_shape is None:
            shapes = {TENSOR: [(e,), (e, 1), (e, 1, 1)], ROW: [(e, n), (e, n, 1)]}
        kinds = [kind for kind, several in shapes.items() if tuple(scale.shape) in several]
        if not kinds:
            said = " or ".join(str(shape) for several in shapes.values() for shape in several)
            raise ValueError(f"fused_experts_fp8: {name}_scale {tuple(scale.shape)} must be {said}")
        found.append(kinds)
    given = [s for s in (a1_scale, a2_scale) if s is not None]
    if not set(found[0]) & set(found[1]):
        raise ValueError(
            f"fused_experts_fp8: w1_scale {tuple(w1_scale.shape)} and w2_scale {tuple(w2_scale.shape)} must both be of"
            " experts or both of rows"
        )
    if len(given) == 1 or any(s.numel() != 1 for s in given) or (given and (per_token or block_shape)):
        raise ValueError(
            "fused_experts_fp8: a1_scale and a2_scale must both be one value, and without per_act_token_quant and"
            " block_shape, or both None"
        )
    return kind_of(w1, w1_scale, a1_scale, per_token, block_shape)


def scales(kind: Kind, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> Scales:
    """For the grouped product of activations, whose scales are a_scale ([1] or [rows, columns]), and an expert's w."""
    a_row, a_block = (0, 0) if a_scale.dim() == 1 else a_scale.stride()
    if kind.weights == BLOCK:
        return Scales(BLOCK, a_scale, a_row, a_block, w_scale, *w_scale.stride())
    b_row = w_scale.stride(1) if kind.weights == ROW and w.shape[1] > 1 else 0
    return Scales(ROW, a_scale, a_row, 0, w_scale, w_scale.stride(0), b_row, 0)


def dequantized(w: torch.Tensor, scale: torch.Tensor, kind: Kind) -> torch.Tensor:
    """One expert's w [N, K], in the dtype of its scale."""
    return w.to(scale.dtype) * expanded(scale, w.shape[0], w.shape[1], kind.weights, BLOCK)


def rounded(y: torch.Tensor, scale: torch.Tensor | None, kind: Kind, ue8m0: bool) -> torch.Tensor:
    """y: [rows, N]. What its float8 numbers stand for, in at least float32; in float64 but for that rounding."""
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
    """hidden_states: [T, H]; w1: [E, 2 I, H], the gates' rows first, and w2: [E, H, I] in float8 e4m3; topk_weights,
    topk_ids: [T, K]. Returns [T, H] in hidden_states' dtype.

    w1_scale, w2_scale  float32: one an expert [E] or [E, 1]; one a row [E, 2 I] and [E, H], or with another 1; with
                        block_shape [128, 128] of blocks: [E, 2 I / 128, H / 128] and [E, H / 128, I / 128], rounded up
    a1_scale, a2_scale  one value each, by which hidden_states and what goes into w2 are divided before they are rounded
                        to float8; None: the largest value becomes 448, of all tokens, of each token
                        (per_act_token_quant) or of each 128 columns (block_shape)
    scale_ue8m0         with block_shape: those scales are powers of two, the next above
    expert_map, apply_router_weight_on_input  as of `fused_experts`; so are ids of no expert here, which count nothing
    Activations are rounded to float8 whatever hidden_states' dtype is; gate, up and their product to that dtype, too.
    Raises ValueError for tensors and scales that do not fit each other.
    """
    check_sizes(hidden_states, w1, w2, topk_weights, topk_ids)
    kind = check_scales(
        w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, per_act_token_quant, block_shape, scale_ue8m0
    )
    acc = torch.promote_types(hidden_states.dtype, torch.float32)
    ids, weights = local_ids(topk_ids, expert_map), topk_weights.to(acc)[..., None]
    x = rounded(hidden_states, a1_scale, kind, scale_ue8m0)
    gate_up = x.new_zeros((*ids.shape, w1.shape[1]))  # of each pair; zeros where it has no expert
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
    """gate_up, down: the tiles of the two products, as a tuned table names them; None: the kernel's own choice."""
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
    # Scales of groups side by side by token: a tile reads those of its rows for one block of columns.
    how = (kind.group_size, None, kind.min_absmax, kind.activations == BLOCK)
    q, a_scale = quantize_fp8.run(x, a1_scale, *how, False, scale_ue8m0)
    pairs = sort_pairs(ids, experts, expert_map, first.block_m)
    early, late = (weights, None) if apply_router_weight_on_input else (None, weights)
    # Rows of no expert are not written, and must not count where all rows have one scale.
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
    ue8m0 = {"ue8m0": True} if block == BLOCK else {}  # as vLLM has them
    return {**dims_of_key(**sizes), "block": block, "act": act, **ue8m0}


fused_experts_fp8 = define(
    "fused_experts_fp8(Tensor hidden_states, Tensor w1, Tensor w2, Tensor w1_scale, Tensor w2_scale,"
    " Tensor topk_weights, Tensor topk_ids, Tensor? a1_scale=None, Tensor? a2_scale=None,"
    " bool per_act_token_quant=False, int[]? block_shape=None, bool scale_ue8m0=False, Tensor? expert_map=None,"
    " bool apply_router_weight_on_input=False) -> Tensor",
    fake=_fake,
    providers=(
        Provider(
            "triton", _triton, devices=("cuda",), supports=_supports_triton, params=sets(1),
            fits=_fits,
        ),
        # What production runs, for the sizes where a table names it.
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
    # block: 0 for a scale an expert, 1 for one a channel, 128 for blocks; act: 0 for given scales of activations, 1 for
    # one a token, 2 for one of all that is found, 128 for groups
    key=Key(shape=(*SHAPE, "block", "act", "dtype"), sizes=SIZES, of=_key, dims=_dims_of_key),
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
    scales = f"{n} if block == {ROW} else {rows} * {columns} if block == {BLOCK} else {one}"
    return Tensor(name, shapes, "float32", values=values, bytes=f"4 * experts_hit * ({scales})")


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
    reference=reference,
    op=fused_experts_fp8,
    cases=(
        # As checkpoints of Mixtral have them: a scale an expert, given scales of activations.
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
    # What lies between two numbers of float8 goes to the other one, an eighth away, where it was rounded to 16 bits, or
    # added up, in another order: seen are 0.09 with 128 columns that are added up, and less with more.
    tolerance={name: Tolerance(0.12, 6e-2) for name in ("float32", "float16", "bfloat16")},
    extremes=extremes(5),
    activations=(0,),
    calls=("moe_align", "quantize_fp8", "silu_and_mul", "silu_mul_quant_fp8"),
    by_table=fused_experts_fp8,
    build=build_fp8,
)
