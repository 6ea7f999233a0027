"""Baselines of this family: kernels of FLA, vLLM, SGLang and FlashInfer, called with the ops' arguments.

Functions that take and return the states of a batch get those that are gathered by slot before, and written after, as
a host with a pool of slots does. Lengths, which hosts prepare once a step for all layers, are prepared in the first
call.
"""

from __future__ import annotations

import importlib
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core.baseline import (
    Baseline,
    Function,
    dense,
    filled,
    first,
    half,
    inductor,
    inductor_compiled,
    same,
)
from fastkernels.overrides.kit.libraries import T, empty_as

_VLLM_FLA = "vllm.third_party.flash_linear_attention.ops"
_VLLM_MAMBA = "vllm.model_executor.layers.mamba.ops"
_VLLM_KDA = (
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda.chunk",
    f"{_VLLM_FLA}.kda",
)  # from 0.32 on, and before
_SGLANG_FLA = "sglang.kernels.ops.attention.fla"
_SGLANG_MAMBA = "sglang.kernels.ops.mamba.triton_ops"
_lengths: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_decodes: dict[tuple[Any, ...], T] = {}


def lengths(cu_seqlens: T, tokens: int, chunk: int) -> tuple[T, T, T, T]:
    """cu_seqlens in int64, and for chunks of each sequence their borders, the sequence's last one, and the sequence."""
    key = cu_seqlens.data_ptr(), len(cu_seqlens), tokens, chunk
    if key not in _lengths:
        borders, last, sequence = [0], [], []
        steps = cu_seqlens.tolist()
        for i, (begin, end) in enumerate(pairwise(steps)):
            cuts = [*range(begin + chunk, end, chunk), end]
            borders += cuts
            sequence += [i] * len(cuts)
            last.append(len(borders) - 2)
        made = (
            torch.tensor(x, dtype=torch.int32, device=cu_seqlens.device) for x in (borders, last, sequence)
        )
        _lengths[key] = cu_seqlens, cu_seqlens.long(), *made
    return _lengths[key][1:]


def borders(cu_seqlens: T | None, slots: T) -> T:
    """cu_seqlens, or those of one token of each sequence."""
    if cu_seqlens is not None:
        return cu_seqlens
    key = slots.device, len(slots)
    if key not in _decodes:
        _decodes[key] = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    return _decodes[key]


def _begin(state: T, slots: T, fresh: T | None) -> T:
    found = state.index_select(0, slots)
    return found if fresh is None else found.masked_fill_(fresh.view(-1, *[1] * (state.dim() - 1)), 0.0)


def _is_decode(tokens: T, slots: T) -> bool:
    return tokens.shape[0] == slots.shape[0]


@cache
def _functions(folder: str) -> tuple[Function, Function]:
    """FLA's pair in a folder of its ops: of chunks, and token by token."""
    module = importlib.import_module(f"fla.ops.{folder}")
    return getattr(module, f"chunk_{folder}"), getattr(module, f"fused_recurrent_{folder}")


def _fla(named: Any) -> Baseline:
    """named(*args of the op) -> a folder, the arguments of its functions, the state, and the tail."""

    def make() -> Function:
        importlib.import_module("fla.ops")
        return run

    def run(*args: Any) -> T:
        folder, given, state, (cu_seqlens, slots, fresh) = named(*args)
        chunked, recurrent = _functions(folder)
        tokens = given["v"].shape[0]
        initial = {"initial_state": _begin(state, slots, fresh), "output_final_state": True}
        decode = _is_decode(given["v"], slots)
        for name, x in given.items():
            if isinstance(x, T) and name != "g_gamma":
                given[name] = x[:, None] if decode else x[None]
        if decode:
            out, last = recurrent(**given, **initial)
        else:
            if folder == "gla":
                given["g"] = given.pop("gk")
            out, last = chunked(**given, **initial, cu_seqlens=lengths(cu_seqlens, tokens, 64)[0])
        state.index_copy_(0, slots.long(), last.to(state.dtype))
        return out[:, 0] if decode else out[0]

    def refuses(*args: Any) -> str | None:
        _, given, state, (cu_seqlens, slots, _) = named(*args)
        rows = [x for x in given.values() if isinstance(x, T)]
        if state.dtype != torch.float32:
            return f"FLA's states are float32, got {state.dtype}"
        more = args[11:] if "beta" in given else ()
        return first(_raw(*more), *_batch(given["v"], cu_seqlens, slots), dense(*rows), filled(*rows))

    return Baseline("fla", "library", make, modules=("fla",), refuses=refuses)


def _batch(tokens: T, cu_seqlens: T | None, slots: T) -> tuple[str | None, ...]:
    """Reasons that concern the batch; synchronizes."""
    packed = tokens.shape[0] if cu_seqlens is None else int(cu_seqlens[-1])
    empty = len(slots) == 0 or (cu_seqlens is not None and bool((cu_seqlens.diff() == 0).any()))
    return (
        "a sequence without tokens" if empty else None,
        "a sequence without a slot" if bool((slots == 0).any()) else None,
        "more tokens than sequences have" if packed != tokens.shape[0] else None,
    )


def _delta(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, *_: Any,
) -> Any:  # fmt: skip
    given = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "use_qk_l2norm_in_kernel": normalize,
    }
    return "kda" if g.dim() == 3 else "gated_delta_rule", given, state, (cu_seqlens, slots, fresh)


def _gla(
    q: T, k: T, v: T, g: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> Any:
    folder, gate = {1: ("simple_gla", "g_gamma"), 2: ("simple_gla", "g"), 3: ("gla", "gk")}[g.dim()]
    return folder, {"q": q, "k": k, "v": v, gate: g, "scale": scale}, state, (cu_seqlens, slots, fresh)


def _rwkv7(
    r: T, w: T, k: T, v: T, a: T, b: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0
) -> Any:  # fmt: skip
    given = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "scale": scale}
    return "rwkv7", given, state, (cu_seqlens, slots, fresh)


def _raw(rate: T | None = None, *_: Any) -> str | None:
    return None if rate is None else "it takes decays and step sizes, not their inputs"


def _vllm_delta(recurrent: str, *chunked: str) -> Any:
    """vLLM's kernels, on its pool of states [V, K] by slot: token by token for decodes, in chunks for prompts."""

    def make() -> Function:
        by_token, in_chunks = _first_of(recurrent), _first_of(*chunked)

        def run(
            q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None,
            scale: float = 1.0, normalize: bool = False, *_: Any,
        ) -> T:  # fmt: skip
            given = _rows(q, k, v, g, beta) | {"scale": scale, "use_qk_l2norm_in_kernel": normalize}
            if _is_decode(v, slots):
                out, _last = by_token(
                    **given, initial_state=state.mT, inplace_final_state=True,
                    cu_seqlens=borders(cu_seqlens, slots), ssm_state_indices=slots,
                )  # fmt: skip
                return out[0]
            out, last = in_chunks(
                **given, initial_state=_begin(state.mT, slots, fresh), output_final_state=True,
                cu_seqlens=lengths(borders(cu_seqlens, slots), len(v), 64)[0],
            )  # fmt: skip
            state.mT.index_copy_(0, slots.long(), last.to(state.dtype))
            return out[0]

        return run

    return make


def _first_of(*places: str) -> Function:
    """The function of the first 'module:name' whose module exists: hosts move their kernels."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if place == places[-1] or not module.startswith(error.name or module):
                raise
    raise AssertionError("no place")


def _rows(q: T, k: T, v: T, g: T, beta: T) -> dict[str, T]:
    """A batch of one row with all tokens."""
    return {n: x[None] for n, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}


def _no_vllm_delta(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, *gates: Any,
) -> str | None:  # fmt: skip
    decode = _is_decode(v, slots)
    batch = _decode(v, cu_seqlens, slots, fresh) if decode else _batch(v, cu_seqlens, slots)
    square = not decode or g.dim() != 3 or q.shape[-1] == v.shape[-1]
    wide = None if square else f"its decode needs keys as wide as values, got {q.shape[-1]} and {v.shape[-1]}"
    tensors = *_delta_tensors(decode, q, k, v, g), dense(q, k, v, g, beta, state.mT), filled(v)
    return first(_raw(*gates), wide, *batch, *tensors)


def _delta_tensors(decode: bool, q: T, k: T, v: T, g: T) -> tuple[str | None, ...]:
    """Reasons that concern the tokens, of kernels of vLLM and SGLang."""
    shared = g.dim() == 3 and q.shape[1] != v.shape[1]
    return (
        f"needs as many heads of keys as of values, got {q.shape[1]} and {v.shape[1]}" if shared else None,
        None if decode else half(q, k, v),
    )


def _sglang_delta() -> Function:
    """SGLang's kernels, which update its pool of states [V, K] by slot."""
    in_chunks = _first_of(f"{_SGLANG_FLA}.chunk:chunk_gated_delta_rule")
    by_token = _first_of(f"{_SGLANG_FLA}.fused_recurrent:fused_recurrent_gated_delta_rule_update")

    def run(
        q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None,
        scale: float = 1.0, normalize: bool = False, *_: Any,
    ) -> T:  # fmt: skip
        given = _rows(q, k, v, g, beta) | {"scale": scale, "use_qk_l2norm_in_kernel": normalize}
        pool, packed = state.mT, borders(cu_seqlens, slots)
        if _is_decode(v, slots):
            more = {"initial_state_source": pool, "initial_state_indices": slots, "cu_seqlens": packed}
            return by_token(**given, **more)[0]
        if fresh is not None:  # SGLang clears a slot when it allocates it
            pool.index_copy_(0, slots.long(), _begin(pool, slots, fresh))
        out, *_states = in_chunks(
            **given, initial_state=pool, initial_state_indices=slots, cu_seqlens=lengths(packed, len(v), 64)[0],
        )  # fmt: skip
        return out[0]

    return run


def _no_sglang_delta(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, *gates: Any,
) -> str | None:  # fmt: skip
    decode = _is_decode(v, slots)
    batch = _decode(v, cu_seqlens, slots, fresh) if decode else _batch(v, cu_seqlens, slots)
    tensors = *_delta_tensors(decode, q, k, v, g), dense(q, k, v, g, beta, state.mT), filled(v)
    return first(_raw(*gates), *batch, *tensors)


def _decode(tokens: T, cu_seqlens: T | None, slots: T, fresh: T | None) -> tuple[str | None, ...]:
    """Reasons that concern a decode; synchronizes."""
    new = "a decode has no sequence that begins" if fresh is not None and bool(fresh.any()) else None
    many = None if _is_decode(tokens, slots) else "a kernel for one token of each sequence"
    return *_batch(tokens, cu_seqlens, slots), many, new


def _flashinfer_delta() -> Function:
    """As vLLM calls it on Hopper, with states [V, K]: exp(g) and normalized queries and keys are made before."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    normalized = importlib.import_module(f"{_VLLM_FLA}.l2norm").l2norm_fwd

    def run(
        q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
        normalize: bool = False, *_: Any,
    ) -> T:  # fmt: skip
        if normalize:
            q, k = normalized(q), normalized(k)
        out, last = chunk_gated_delta_rule(
            q=q, k=k, v=v, g=torch.exp(g), beta=beta.float(), scale=scale, initial_state=_begin(state.mT, slots, fresh),
            output_final_state=True, cu_seqlens=lengths(borders(cu_seqlens, slots), len(v), 64)[0],
        )  # fmt: skip
        state.mT.index_copy_(0, slots.long(), last.to(state.dtype))
        return out

    return run


def _no_flashinfer_delta(
    q: T, k: T, v: T, g: T, beta: T, state: T, cu_seqlens: T | None, slots: T, fresh: T | None, scale: float = 1.0,
    normalize: bool = False, *gates: Any,
) -> str | None:  # fmt: skip
    if _is_decode(v, slots):
        return "a kernel for prompts"
    if q.shape[-1] != 128 or v.shape[-1] != 128:
        return f"needs heads of 128 channels, got {q.shape[-1]} and {v.shape[-1]}"
    return first(_raw(*gates), *_batch(v, cu_seqlens, slots), half(q, k, v), dense(q, k, v, g, beta))


def _update_of(module: str) -> Function:
    """A host's selective_state_update with a new result, which it fills."""
    update = importlib.import_module(module).selective_state_update

    def run(state: T, x: T, *args: Any, **more: Any) -> T:
        out = empty_as(x)
        update(state, x, *args, out=out, **more)
        return out

    return run


def _ssd(update: Function, scan: Function) -> Function:
    """An update of [S, H, P, N] for decodes, whose decays are views of one for each head, and a scan for prompts."""

    def run(
        x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None, slots: T,
        fresh: T | None, dt_min: float = 0.0, dt_max: float | None = None,
    ) -> T:  # fmt: skip
        _, heads, size = x.shape
        if _is_decode(x, slots):
            rate = a.view(-1, 1, 1).expand(heads, size, state.shape[-1])
            skip, bias = (None if t is None else t.view(-1, 1).expand(heads, size) for t in (d, dt_bias))
            step = dt.unsqueeze(-1).expand(*dt.shape, size)
            more = {"dt_bias": bias, "dt_softplus": True, "state_batch_indices": slots}
            return update(state, x, step, rate, b, c, skip, **more)
        given = {
            "D": d, "dt_bias": dt_bias, "dt_softplus": True,
            "dt_limit": (dt_min, float("inf") if dt_max is None else dt_max),
        }  # fmt: skip
        out, states = scan((x, dt, a, b, c), given, state, borders(cu_seqlens, slots), slots, fresh)
        state.index_copy_(0, slots.long(), states.to(state.dtype))
        return out

    return run


def _vllm_ssd() -> Function:
    chunked = importlib.import_module(f"{_VLLM_MAMBA}.ssd_combined").mamba_chunk_scan_combined_varlen

    def scan(
        args: tuple[T, ...], given: dict[str, Any], state: T, cu_seqlens: T, slots: T, fresh: T | None
    ) -> tuple[T, T]:
        out = empty_as(args[0])
        _, cuts, last, sequence = lengths(cu_seqlens, len(out), 256)
        states = chunked(
            *args, chunk_size=256, z=None, seq_idx=sequence, cu_seqlens=cu_seqlens, cu_chunk_seqlens=cuts,
            last_chunk_indices=last, initial_states=_begin(state, slots, fresh), out=out, state_dtype=state.dtype,
            **given,
        )  # fmt: skip
        return out, states

    return _ssd(_update_of(f"{_VLLM_MAMBA}.mamba_ssm"), scan)


def _sglang_ssd() -> Function:
    chunked = importlib.import_module(f"{_SGLANG_MAMBA}.ssd_combined").mamba_chunk_scan_combined
    metadata = importlib.import_module("sglang.srt.layers.attention.mamba.mamba2_metadata").Mamba2Metadata
    prepared: dict[tuple[Any, ...], Any] = {}

    def of_step(cu_seqlens: T, tokens: int) -> Any:
        """The sequence of each token, and where chunks begin: SGLang prepares them once a step for all layers."""
        key = cu_seqlens.data_ptr(), len(cu_seqlens), tokens
        if key not in prepared:
            count = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
            sequence = torch.repeat_interleave(count, cu_seqlens.diff())[None]
            found = metadata._query_start_loc_to_chunk_indices_offsets(cu_seqlens, 256, tokens)
            prepared[key] = cu_seqlens, sequence, *found
        return prepared[key][1:]

    def scan(
        args: tuple[T, ...], given: dict[str, Any], state: T, cu_seqlens: T, slots: T, fresh: T | None
    ) -> tuple[T, T]:
        x, dt, a, b, c = args
        out = empty_as(x)
        sequence, indices, offsets = of_step(cu_seqlens, len(out))
        states = chunked(
            x[None], dt[None], a, b[None], c[None], chunk_size=256, seq_idx=sequence, chunk_indices=indices,
            chunk_offsets=offsets, cu_seqlens=cu_seqlens, initial_states=_begin(state, slots, fresh), out=out[None],
            return_varlen_states=True, state_dtype=state.dtype, **given,
        )  # fmt: skip
        return out, states

    return _ssd(_update_of(f"{_SGLANG_MAMBA}.mamba_ssm"), scan)


def _no_sglang_ssd(x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, *tail: Any) -> str | None:
    if (d is None or dt_bias is None) and _is_decode(x, tail[2]):
        return "its decode needs d and dt_bias"
    return _no_host_ssd(x, dt, a, b, c, d, dt_bias, *tail)


def _no_host_ssd(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None, slots: T,
    fresh: T | None, dt_min: float = 0.0, dt_max: float | None = None,
) -> str | None:  # fmt: skip
    fixed = (
        "its decode does not limit dt" if _is_decode(x, slots) and (dt_min or dt_max is not None) else None
    )
    batch = _decode(x, cu_seqlens, slots, fresh) if _is_decode(x, slots) else _batch(x, cu_seqlens, slots)
    return first(fixed, *batch, same(x, b, c), dense(x, dt, b, c, state))


def _vllm_mamba() -> Function:
    update = _update_of(f"{_VLLM_MAMBA}.mamba_ssm")

    def run(
        x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None,
        slots: T, fresh: T | None,
    ) -> T:  # fmt: skip
        more = {"dt_bias": dt_bias, "z": z, "dt_softplus": True, "state_batch_indices": slots}
        return update(state, x, dt, a, b, c, d, **more)

    return run


def _no_vllm_mamba(
    x: T, dt: T, a: T, b: T, c: T, d: T | None, z: T | None, dt_bias: T | None, state: T, cu_seqlens: T | None,
    slots: T, fresh: T | None,
) -> str | None:  # fmt: skip
    if not _is_decode(x, slots):
        return "its scan of prompts takes [D, T]: another layout"
    return first(*_decode(x, cu_seqlens, slots, fresh), dense(x, dt, a, b, c, z, state))


def _vllm_conv() -> Function:
    module = importlib.import_module(f"{_VLLM_MAMBA}.causal_conv1d")
    metadata = importlib.import_module("vllm.v1.attention.backends.utils").compute_causal_conv1d_metadata
    prepared: dict[tuple[Any, ...], Any] = {}

    def of_step(cu_seqlens: T, tokens: int) -> Any:
        """The lengths that vLLM prepares once a step for all layers."""
        key = cu_seqlens.data_ptr(), len(cu_seqlens), tokens
        if key not in prepared:
            nums, batch, offsets = metadata(cu_seqlens.cpu(), device=cu_seqlens.device)
            found = SimpleNamespace(nums_dict=nums, batch_ptr=batch, token_chunk_offset_ptr=offsets)
            prepared[key] = cu_seqlens, found
        return prepared[key][1]

    def run(
        x: T,
        weight: T,
        bias: T | None,
        state: T,
        cu_seqlens: T | None,
        slots: T,
        fresh: T | None,
        activation: str = "silu",
    ) -> T:
        act = activation if activation == "silu" else None
        if _is_decode(x, slots):  # overwrites x
            return module.causal_conv1d_update(x, state, weight, bias, act, conv_state_indices=slots)
        out = module.causal_conv1d_fn(
            x.t(),
            weight,
            bias,
            state,
            cu_seqlens,
            cache_indices=slots,
            has_initial_state=torch.ones_like(slots, dtype=torch.bool) if fresh is None else ~fresh,
            activation=act,
            metadata=of_step(borders(cu_seqlens, slots), x.shape[0]),
        )
        return out.t()

    return run


def _no_vllm_conv(
    x: T,
    weight: T,
    bias: T | None,
    state: T,
    cu_seqlens: T | None,
    slots: T,
    fresh: T | None,
    activation: str = "silu",
) -> str | None:
    batch = _decode(x, cu_seqlens, slots, fresh) if _is_decode(x, slots) else _batch(x, cu_seqlens, slots)
    return first(*batch, dense(x, weight), same(x, state))


def _vllm(make: Any, refuses: Any, **more: Any) -> Baseline:
    return Baseline("vllm", "host", make, modules=("vllm",), refuses=refuses, **more)


def _sglang(make: Any, refuses: Any, **more: Any) -> Baseline:
    return Baseline("sglang", "host", make, modules=("sglang",), refuses=refuses, **more)


def _vllm_ttt() -> Function:
    """vLLM's experts, with a slot in an expert's place and one for each token."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def mlp(x: T, gate_up: T, down: T, slots: T, longest: int = 1) -> T:
        weights = torch.ones((len(x), 1), dtype=torch.float32, device=x.device)
        return fused_experts(x, gate_up, down, weights, slots[:, None])

    return mlp


def _no_vllm_ttt(x: T, gate_up: T, down: T, slots: T, *_: Any) -> str | None:
    return first(half(x), dense(x, gate_up, down), filled(x))


def _batched_ttt_grad() -> Function:
    """Batched products of copies of the weights, with the activation's gradient compiled by Inductor."""

    def grad(x: T, dy: T, gate_up: T, down: T, slots: T) -> tuple[T, T, T]:
        first_w, second = gate_up[slots], down[slots]
        gate, up = (x @ first_w.mT).chunk(2, dim=-1)
        inner, s = dy @ second, gate.float().sigmoid()
        dgate = (inner * up * s * (1 + gate * (1 - s))).to(x.dtype)
        dz = torch.cat((dgate, (inner * gate * s).to(x.dtype)), dim=-1)
        return dz @ first_w, dz.mT @ x, dy.mT @ (gate * s * up).to(x.dtype)

    return inductor_compiled(grad)


def _ttt_sgd() -> Function:
    def step(weight: T, rest: T | None, grad: T, rate: T, source: T, target: T) -> None:
        old = weight[source].float() + (0.0 if rest is None else rest[source].float())
        exact = old - rate[:, None, None] * grad.float()
        new = exact.to(weight.dtype)
        weight.index_copy_(0, target, new)
        if rest is not None:
            rest.index_copy_(0, target, (exact - new.float()).to(rest.dtype))

    return inductor_compiled(step)


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "causal_conv1d": (_vllm(_vllm_conv, _no_vllm_conv),),
    "delta_gates": (inductor("delta_gates"),),
    "gated_delta_rule": (
        _fla(_delta),
        _vllm(
            _vllm_delta(
                f"{_VLLM_FLA}.fused_recurrent:fused_recurrent_gated_delta_rule",
                f"{_VLLM_FLA}.chunk:chunk_gated_delta_rule",
            ),
            _no_vllm_delta,
        ),
        _sglang(_sglang_delta, _no_sglang_delta),
        Baseline(
            "flashinfer", "library", _flashinfer_delta, modules=("flashinfer", "vllm"), refuses=_no_flashinfer_delta,
        ),
    ),
    "gated_linear_attention": (_fla(_gla),),
    "kda": (
        _fla(_delta),
        _vllm(
            _vllm_delta(f"{_VLLM_FLA}.kda:fused_recurrent_kda", *(f"{m}:chunk_kda" for m in _VLLM_KDA)),
            _no_vllm_delta,
            overwrites=(2,),
        ),
    ),
    "lstm": (inductor("lstm"),),
    "mamba_scan": (_vllm(_vllm_mamba, _no_vllm_mamba),),
    "rwkv7": (_fla(_rwkv7),),
    "ssd": (
        _vllm(_vllm_ssd, _no_host_ssd),
        _sglang(_sglang_ssd, _no_sglang_ssd),
    ),
    "ttt_mlp": (_vllm(_vllm_ttt, _no_vllm_ttt),),
    "ttt_mlp_grad": (Baseline("inductor", "compiler", _batched_ttt_grad),),
    "ttt_sgd": (Baseline("inductor", "compiler", _ttt_sgd),),
}  # fmt: skip
