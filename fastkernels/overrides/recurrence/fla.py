"""flash-linear-attention's functions for recurrent layers, on batches [B, T, ...] or packed sequences [1, T, ...].

All take the states of N sequences and return new ones in float32: [N, H, K, V], with state_v_first [N, H, V, K].
Their gradients are the library's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recurrence.batches import batch_of, silu_or_none, unset
from fastkernels.overrides.recurrence.causal_conv1d import causal_conv1d
from fastkernels.overrides.recurrence.gated_delta_rule import gated_delta_rule
from fastkernels.overrides.recurrence.gated_linear_attention import gated_linear_attention
from fastkernels.overrides.recurrence.kda import kda
from fastkernels.overrides.recurrence.rwkv7 import rwkv7

T = torch.Tensor


def _run(
    op: Any, rows: tuple[T, ...], v: T, keys: int, initial: T | None, final: bool, v_first: bool,
    cu_seqlens: T | None, *scalars: Any, constants: tuple[T, ...] = (),
) -> tuple[T, T | None]:  # fmt: skip
    """op(*rows, *constants, state, cu_seqlens, slots, fresh, *scalars), and its states if `final`."""
    heads, size = v.shape[-2:]
    first = initial if initial is None or not v_first else initial.transpose(2, 3)
    batch = batch_of(v, first, heads, keys, size, cu_seqlens=cu_seqlens)
    out = batch.unpacked(op(*batch.rows(*rows), *constants, *batch.tail, *scalars))
    if not final:
        return out, None
    return out, batch.state.transpose(2, 3).contiguous() if v_first else batch.state


def _scale(scale: float | None, q: T) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _v_first(function: str, v_first: bool, others: dict[str, Any]) -> bool:
    """state_v_first, also under its old name. Raises UnsupportedArgument for other keywords that are set."""
    kept = {
        n: x
        for n, x in others.items()
        if n not in ("transpose_state_layout", "chunk_size", "A_log", "dt_bias")
    }
    unset(function, **kept)
    return bool(v_first or others.get("transpose_state_layout"))


def _linear(
    q: T,
    k: T,
    v: T,
    g: T,
    scale: float | None,
    initial: T | None,
    final: bool,
    v_first: bool,
    cu_seqlens: T | None,
) -> tuple[T, T | None]:
    """Gated linear attention; g [B, T, H, K], [B, T, H] or [H]."""
    by_head = g.dim() == 1
    rows = (q, k, v) if by_head else (q, k, v, g)
    out, last = _run(
        gated_linear_attention, rows, v, q.shape[-1], initial, final, v_first, cu_seqlens, _scale(scale, q),
        constants=(g,) if by_head else (),
    )  # fmt: skip
    return out.to(q.dtype), last


def _decays(q: T) -> T:
    """The logarithms of retention's decays [H]."""
    return (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log()


def fla_chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: int | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_gla: q, k, g [B, T, H, K], g the logarithm of the decay; v [B, T, H, V]; scale: K ** -0.5 by default."""
    return _linear(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fla_fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: int | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_gla: see fla_chunk_gla. Raises UnsupportedArgument for gv and reverse, and without gk."""
    name = "fused_recurrent_gla"
    unset(name, gv=gv, reverse=reverse)
    if gk is None:
        raise UnsupportedArgument(f"{name}: gk=None is not supported; use the host's own function")
    v_first = _v_first(name, state_v_first, kwargs)
    return _linear(q, k, v, gk, scale, initial_state, output_final_state, v_first, cu_seqlens)


def fla_chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_retention: q, k [B, T, H, K]; v [B, T, H, V]; the decay of head h is 1 - 2 ** (-5 - h)."""
    v_first = _v_first("chunk_retention", False, kwargs)
    return _linear(q, k, v, _decays(q), scale, initial_state, output_final_state, v_first, cu_seqlens)


def fla_fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_retention: see fla_chunk_retention. Raises UnsupportedArgument for reverse."""
    unset("fused_recurrent_retention", reverse=reverse)
    v_first = _v_first("fused_recurrent_retention", state_v_first, kwargs)
    return _linear(q, k, v, _decays(q), scale, initial_state, output_final_state, v_first, cu_seqlens)


def _simple(
    name: str, q: T, k: T, v: T, g: T | None, g_gamma: T | None, scale: float | None, initial: T | None, final: bool,
    v_first: bool, cu_seqlens: T | None,
) -> tuple[T, T | None]:  # fmt: skip
    given = [x for x in (g, g_gamma) if x is not None]
    if len(given) != 1:
        raise UnsupportedArgument(f"{name}: needs one of g and g_gamma; use the host's own function")
    return _linear(q, k, v, given[0], scale, initial, final, v_first, cu_seqlens)


def fla_chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_simple_gla: g [B, T, H] or g_gamma [H]; else as fla_chunk_gla."""
    v_first = _v_first("chunk_simple_gla", state_v_first, kwargs)
    given = (q, k, v, g, g_gamma, scale, initial_state, output_final_state, v_first, cu_seqlens)
    return _simple("chunk_simple_gla", *given)


def fla_fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_simple_gla: see fla_chunk_simple_gla. Raises UnsupportedArgument for reverse."""
    unset("fused_recurrent_simple_gla", reverse=reverse)
    v_first = _v_first("fused_recurrent_simple_gla", state_v_first, kwargs)
    given = (q, k, v, g, g_gamma, scale, initial_state, output_final_state, v_first, cu_seqlens)
    return _simple("fused_recurrent_simple_gla", *given)


def _step_sizes(function: str, beta: T | None, sigmoid: bool, negative: bool) -> T:
    """The step sizes, from 0 to 1, or to 2 if `negative` eigenvalues are allowed."""
    if beta is None or (negative and not sigmoid):
        raise UnsupportedArgument(
            f"{function}: beta=None, or allow_neg_eigval without use_beta_sigmoid_in_kernel; use the host's own"
        )
    if not sigmoid:
        return beta
    return beta.float().sigmoid() * (2.0 if negative else 1.0)


def _delta(
    op: Any, q: T, k: T, v: T, g: T, beta: T, scale: float | None, initial: T | None, final: bool, v_first: bool,
    cu_seqlens: T | None, normalize: bool,
) -> tuple[T, T | None]:  # fmt: skip
    scalars = (_scale(scale, q), normalize)
    out, last = _run(op, (q, k, v, g, beta), v, q.shape[-1], initial, final, v_first, cu_seqlens, *scalars)
    return out.to(q.dtype), last


def _gate(g: T, A_log: T | None, dt_bias: T | None, given: bool, low: float | None = None) -> T:
    """The logarithm of the decays, from their inputs [B, T, H] or [B, T, H, K] if the kernel is to compute it.

    low: its bound; see delta_gates
    """
    if not given:
        return g
    if A_log is None:
        raise UnsupportedArgument("use_gate_in_kernel needs A_log; use the host's own function")
    heads = A_log.float().exp().view(-1, *[1] * (g.dim() - 3))
    x = g.float() if dt_bias is None else g.float() + dt_bias.float().view(g.shape[2:])
    return -heads * F.softplus(x) if low is None else low * (heads * x).sigmoid()


def fla_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_gated_delta_rule: q, k [B, T, Hk, K]; v [B, T, H, V]; g, beta [B, T, H].

    Raises UnsupportedArgument for context parallelism.
    """
    name = "chunk_gated_delta_rule"
    unset(name, cp_context=cp_context)
    g = _gate(g, kwargs.get("A_log"), kwargs.get("dt_bias"), kwargs.pop("use_gate_in_kernel", False))
    v_first = _v_first(name, state_v_first, kwargs)
    beta = _step_sizes(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _delta(gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state, v_first, cu_seqlens,
                  use_qk_l2norm_in_kernel)  # fmt: skip


def fla_chunk_gated_delta_rule_0_5(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_gated_delta_rule before 0.6; see fla_chunk_gated_delta_rule."""
    return fla_chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, None, cp_context,
        **kwargs,
    )  # fmt: skip


def fla_fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_gated_delta_rule: see fla_chunk_gated_delta_rule.

    With use_gate_in_kernel, g has the inputs of the decays, A_log and dt_bias [H] their parameters. Raises
    UnsupportedArgument for gk and gv, without g, and for step sizes of one number for each channel.
    """
    name = "fused_recurrent_gated_delta_rule"
    unset(name, gk=gk, gv=gv)
    v_first = _v_first(name, state_v_first, kwargs)
    beta = _step_sizes(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if g is None or beta.dim() != 3:
        raise UnsupportedArgument(f"{name}: needs g, and beta [B, T, H]; use the host's own function")
    g = _gate(g, A_log, dt_bias, use_gate_in_kernel)
    return _delta(gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state, v_first, cu_seqlens,
                  use_qk_l2norm_in_kernel)  # fmt: skip


def fla_chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_delta_rule: fla_chunk_gated_delta_rule without a decay."""
    v_first = _v_first("chunk_delta_rule", False, kwargs)
    return _delta(gated_delta_rule, q, k, v, _no_decay(v), beta, scale, initial_state, output_final_state, v_first,
                  cu_seqlens, use_qk_l2norm_in_kernel)  # fmt: skip


def fla_fused_recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_delta_rule: see fla_chunk_delta_rule. Raises UnsupportedArgument unless beta is [B, T, H]."""
    if beta is None or beta.dim() != 3:
        raise UnsupportedArgument(
            "fused_recurrent_delta_rule: beta must be [B, T, H]; use the host's own function"
        )
    return _delta(gated_delta_rule, q, k, v, _no_decay(v), beta, scale, initial_state, output_final_state, False,
                  cu_seqlens, use_qk_l2norm_in_kernel)  # fmt: skip


def _no_decay(v: T) -> T:
    return torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)


def _chunk_kda(
    q: T, k: T, v: T, g: T, beta: T, scale: float | None, initial: T | None, final: bool, normalize: bool,
    gate: bool, sigmoid: bool, negative: bool, v_first: bool, cu_seqlens: T | None, others: dict[str, Any],
    low: float | None, **refused: Any,
) -> tuple[T, T | None]:  # fmt: skip
    unset("chunk_kda", **refused)
    v_first = _v_first("chunk_kda", v_first, others)
    g = _gate(g, others.get("A_log"), others.get("dt_bias"), gate, low)
    beta = _step_sizes("chunk_kda", beta, sigmoid, negative)
    return _delta(kda, q, k, v, g, beta, scale, initial, final, v_first, cu_seqlens, normalize)


def fla_chunk_kda_0_5(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_kda before 0.6; see fla_chunk_kda."""
    return _chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, kwargs,
        lower_bound, return_intermediate_states=return_intermediate_states, cp_context=cp_context,
    )  # fmt: skip


def fla_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_kda: q, k [B, T, H, K]; g [B, T, H, K]; v [B, T, H, V]; beta [B, T, H].

    With use_gate_in_kernel, g has the inputs of the decays, A_log [H] and dt_bias [H K] their parameters. Raises
    UnsupportedArgument for states inside of sequences, context parallelism and use_graph.
    """
    return _chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, kwargs,
        lower_bound, return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph,
    )  # fmt: skip


def fla_fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_recurrent_kda: see fla_chunk_kda."""
    name = "fused_recurrent_kda"
    v_first = _v_first(name, state_v_first, kwargs)
    g = _gate(g, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    beta = _step_sizes(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _delta(kda, q, k, v, g, beta, scale, initial_state, output_final_state, v_first, cu_seqlens,
                  use_qk_l2norm_in_kernel)  # fmt: skip


def _rwkv(
    r: T,
    w: T,
    k: T,
    v: T,
    a: T,
    b: T,
    scale: float | None,
    initial: T | None,
    final: bool,
    cu_seqlens: T | None,
) -> tuple[T, T | None]:
    out, last = _run(
        rwkv7, (r, w, k, v, a, b), v, r.shape[-1], initial, final, False, cu_seqlens, _scale(scale, r)
    )
    return out.to(r.dtype), last


def fla_chunk_rwkv7_0_5(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_rwkv7 before 0.6; see fla_chunk_rwkv7."""
    unset("chunk_rwkv7", cp_context=cp_context, **kwargs)
    return _rwkv(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def fla_chunk_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """chunk_rwkv7: r, w, k, a, b [B, T, H, K], w the logarithm of the decay; v [B, T, H, V].

    Sizes of chunks and bounds of w, which a kernel of the library needs, are ignored. Raises UnsupportedArgument for
    context parallelism.
    """
    unset("chunk_rwkv7", cp_context=cp_context)
    return _rwkv(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def fla_fused_mul_recurrent_rwkv7_0_5(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kk: torch.Tensor,
    a: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_mul_recurrent_rwkv7 before 0.6; see fla_fused_mul_recurrent_rwkv7."""
    unset("fused_mul_recurrent_rwkv7", reverse=reverse, **kwargs)
    return _rwkv(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens)


def fla_fused_mul_recurrent_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kk: torch.Tensor,
    a: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fused_mul_recurrent_rwkv7: fla_chunk_rwkv7 with -kk and kk * a in the place of a and b.

    Raises UnsupportedArgument for reverse.
    """
    unset("fused_mul_recurrent_rwkv7", reverse=reverse)
    return _rwkv(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens)


def fla_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    cp_context: Any = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """causal_conv1d: x [B, T, D], weight [D, W]; initial_state [N, D, W], the last W inputs of each sequence.

    Returns the outputs plus residual [B, T, D], and with output_final_state the last W inputs. Raises
    UnsupportedArgument without a weight, for packed sequences whose states are requested and context parallelism.
    """
    name = "causal_conv1d"
    unset(name, cp_context=cp_context, seq_idx=kwargs.get("seq_idx"))
    act = silu_or_none(name, activation)
    if weight is None or (cu_seqlens is not None and output_final_state):
        raise UnsupportedArgument(
            f"{name}: no weight, or states of packed sequences; use the host's own function"
        )
    width = weight.shape[1]
    before = None if initial_state is None else initial_state[..., 1:]
    batch = batch_of(x, before, weight.shape[0], width - 1, dtype=x.dtype, cu_seqlens=cu_seqlens)
    out = batch.unpacked(causal_conv1d(*batch.rows(x), weight, bias, *batch.tail, act))
    out = out if residual is None else out + residual
    if not output_final_state:
        return out, None
    old = x.new_zeros(x.shape[0], weight.shape[0], width) if initial_state is None else initial_state
    return out, torch.cat([old.to(x.dtype), x.transpose(1, 2)], -1)[..., -width:].contiguous()


def fla_causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv1d_update: one token of each sequence, x [N, 1, D], [1, N, D] or [N, D]; overwrites cache [N, D, W].

    Returns the outputs plus residual, and cache. Raises UnsupportedArgument without a weight.
    """
    act = silu_or_none("causal_conv1d_update", activation)
    if weight is None:
        raise UnsupportedArgument("causal_conv1d_update: no weight; use the host's own function")
    rows, width = x.reshape(-1, 1, weight.shape[0]), weight.shape[1]
    batch = batch_of(rows, cache[..., 1:], weight.shape[0], width - 1, dtype=cache.dtype)
    out = causal_conv1d(*batch.rows(rows), weight, bias, *batch.tail, act).view(x.shape)
    cache.copy_(torch.cat([cache, rows.transpose(1, 2).to(cache.dtype)], -1)[..., -width:])
    return out if residual is None else out + residual, cache


_UNMEASURED = "on request: not measured yet against the library's kernels on a GPU"


def _called(path: str, versions: str = "", cls: str = "") -> Target:
    cls = cls or f"fla_{path.partition(':')[2]}"
    return Target("fla", f"fla.{path}", cls, "called_function", versions, default=False, note=_UNMEASURED)


_OLD, _NEW = "<0.6", ">=0.6"
_RECURRENT_RWKV7 = "ops.rwkv7.fused_recurrent:fused_mul_recurrent_rwkv7"
_RECURRENT_SIMPLE = "ops.simple_gla.fused_recurrent:fused_recurrent_simple_gla"

TARGETS = {
    "causal_conv1d": (
        _called("modules.conv.causal_conv1d:causal_conv1d", _OLD),
        _called("modules.conv.triton.ops:causal_conv1d_update", _OLD),
        _called("modules.causal_conv1d.ops:causal_conv1d", _NEW),
        _called("modules.causal_conv1d.ops:causal_conv1d_update", _NEW),
    ),
    "gated_linear_attention": (
        _called("ops.gla.chunk:chunk_gla"),
        _called("ops.gla.fused_recurrent:fused_recurrent_gla"),
        _called("ops.retention.chunk:chunk_retention"),
        _called("ops.retention.fused_recurrent:fused_recurrent_retention"),
        _called("ops.simple_gla.chunk:chunk_simple_gla"),
        _called(_RECURRENT_SIMPLE, cls="fla_fused_recurrent_simple_gla"),
    ),
    "gated_delta_rule": (
        _called("ops.gated_delta_rule.chunk:chunk_gated_delta_rule", _OLD, "fla_chunk_gated_delta_rule_0_5"),
        _called("ops.gated_delta_rule.chunk:chunk_gated_delta_rule", _NEW),
        _called("ops.gated_delta_rule.fused_recurrent:fused_recurrent_gated_delta_rule"),
        _called("ops.delta_rule.chunk:chunk_delta_rule"),
        _called("ops.delta_rule.fused_recurrent:fused_recurrent_delta_rule"),
    ),
    "kda": (
        _called("ops.kda.chunk:chunk_kda", _OLD, "fla_chunk_kda_0_5"),
        _called("ops.kda.chunk:chunk_kda", _NEW),
        _called("ops.kda.fused_recurrent:fused_recurrent_kda"),
    ),
    "rwkv7": (
        _called("ops.rwkv7.chunk:chunk_rwkv7", _OLD, "fla_chunk_rwkv7_0_5"),
        _called("ops.rwkv7.chunk:chunk_rwkv7", _NEW),
        _called(_RECURRENT_RWKV7, _OLD, "fla_fused_mul_recurrent_rwkv7_0_5"),
        _called(_RECURRENT_RWKV7, _NEW),
    ),
}
