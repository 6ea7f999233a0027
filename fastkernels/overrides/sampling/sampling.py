"""Next tokens from logits, each row by its own temperature, top_k, top_p and min_p, with counter-based noise.

A token is drawn by an exponential race (argmax of p / e with e ~ Exp(1), in logarithms), whose noise is Philox of
(seed, offset, token id): the draw of a row depends on nothing else, not on the batch, the step or the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Permutable, Target, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.philox import exponential
from fastkernels.overrides.sampling import sampling_calls as _sampling_calls
from fastkernels.overrides.sampling.sampling_triton import (
    LANES,
    RACE,
    pick_kernel,
    race_kernel,
    threshold_kernel,
)

GREEDY = 1e-5  # below this temperature the most likely token is taken, as in vLLM
_PROGRAMS = 1024  # of the race: several on each of an H200's 132 multiprocessors
_CPU_LOGITS = 1 << 18  # at a time: larger temporary tensors cost a CPU page faults and cache misses
_NARROW = 1024  # most likely tokens that are looked at before a whole row is sorted


def threshold(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The smallest logit that stays, [B, 1], of x [B, V] without NaN; the others are [B]. Equal logits stay together.

    In vLLM's order: min_p keeps tokens with at least min_p times the largest probability; top_k those of which fewer
    than k are more likely; top_p those of which the more likely ones have less than top_p of the mass that is left.
    So a tie at a boundary stays whole, and the most likely token always stays.
    """
    vocab = x.shape[-1]
    t, p = temperature[:, None].to(x.dtype), top_p[:, None].double()
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None].long()
    top = x.amax(dim=-1, keepdim=True)
    low = top + t * min_p[:, None].to(x.dtype).log()
    width = vocab
    if x.device.type == "cpu":  # where looking at the values stalls nothing
        if not bool(((k < vocab) | (p < 1.0)).any()):
            return low
        width = min(vocab, max(_NARROW, int(torch.where(k < vocab, k, 0).max())))
    while True:
        ordered = x.topk(width, dim=-1).values
        kept = torch.where(k < vocab, ordered.gather(1, (k - 1).clamp_max(width - 1)), -torch.inf)
        kept = torch.maximum(kept, low)
        total = (x >= kept).mul(((x - top) / t).exp()).sum(dim=-1, keepdim=True, dtype=torch.float64)
        mass = torch.where(ordered >= kept, ((ordered - top) / t).exp(), 0.0).double()
        before = mass.cumsum(dim=-1) - mass
        if width == vocab or not bool(
            ((p < 1.0) & (before[:, -1:] + mass[:, -1:] < p * total) & (ordered[:, -1:] > kept)).any()
        ):
            break
        width = vocab
    count = (before < p * total).sum(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(p < 1.0, torch.maximum(kept, ordered.gather(1, count - 1)), kept)


def _race(
    x: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The tokens of rows that are not greedy."""
    noise = exponential(seeds, offsets, x.shape[-1]).to(x.dtype)
    score = (x / temperature[:, None].to(x.dtype)).sub_(noise.log_())
    filters = (temperature, top_k, top_p, min_p)
    filtered = ((top_k > 0) & (top_k < x.shape[-1])) | (top_p < 1.0) | (min_p > 0.0)
    if x.device.type != "cpu":
        score.masked_fill_(filtered[:, None] & (x < threshold(x, *filters)), -torch.inf)
    elif bool(filtered.any()):
        rows = filtered.nonzero()[:, 0]
        low = threshold(x[rows], *(t[rows] for t in filters))
        score[rows] = score[rows].masked_fill_(x[rows] < low, -torch.inf)
    return score.argmax(dim=-1)


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """logits: [B, V]; all else [B]. Returns token ids [B] int64.

    temperature   float; 0: the most likely token, of equals the lowest id
    top_k         int; V, more, or <= 0: all tokens
    top_p, min_p  float; 1 and 0: all tokens
    seeds, offsets  int64; the offset is the number of the token in its sequence

    NaN counts as -inf, which never wins, +inf as the largest number. A row without any number gives token 0.
    """
    args = (logits, temperature, top_k, top_p, min_p, seeds, offsets)
    step = max(_CPU_LOGITS // logits.shape[1], 1)
    if logits.device.type != "cpu" or len(logits) <= step:
        return _rows(*args)
    return torch.cat([_rows(*part) for part in zip(*(t.split(step) for t in args), strict=True)])


def _rows(logits: torch.Tensor, temperature: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.nan_to_num(nan=-torch.inf, posinf=torch.finfo(x.dtype).max, neginf=-torch.inf)
    drawn = temperature >= GREEDY
    if x.device.type != "cpu":
        return torch.where(drawn, _race(x, temperature.clamp_min(GREEDY), *rest), x.argmax(dim=-1))
    rows = drawn.nonzero()[:, 0]
    if len(rows) == len(x):
        return _race(x, temperature, *rest)
    ids = x.argmax(dim=-1)
    if len(rows):
        ids[rows] = _race(x[rows], temperature[rows], *(t[rows] for t in rest))
    return ids


def _check(logits: torch.Tensor, rest: tuple[torch.Tensor, ...]) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"sampling: logits must be [B, V] with V > 0, got shape {tuple(logits.shape)}")
    for name, t in zip(_NAMES, rest, strict=True):
        if t.shape != logits.shape[:1]:
            raise ValueError(f"sampling: {name} must be [{len(logits)}], got shape {tuple(t.shape)}")


_NAMES = ("temperature", "top_k", "top_p", "min_p", "seeds", "offsets")


def _supports_triton(logits: torch.Tensor, *rest: torch.Tensor) -> str | None:
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {logits.dtype} is not float16, bfloat16 or float32"
    if logits.stride(-1) != 1:
        return f"logits has strides {tuple(logits.stride())}: the last dimension must be contiguous"
    if logits.shape[-1] > 1 << 18:
        return f"vocabulary {logits.shape[-1]} is over 262144"
    for name, t in zip(_NAMES, rest, strict=True):
        if not t.is_contiguous():
            return f"{name} has strides {tuple(t.stride())}, not contiguous"
    return None


def _triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    _check(logits, (temperature, top_k, top_p, min_p, seeds, offsets))
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    low = torch.empty(rows, dtype=torch.float32, device=logits.device)
    spill = torch.empty(rows, LANES, dtype=torch.float32, device=logits.device)
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    threshold_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, spill, counts, low, logits.stride(0), vocab,
        LANES=LANES, num_warps=16,
    )  # fmt: skip
    span = cdiv(vocab, max(_PROGRAMS // rows, 1) * RACE) * RACE
    parts = cdiv(vocab, span)
    score = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = out if parts == 1 else torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    race_kernel[(rows, parts)](
        logits, temperature, seeds, offsets, low, score, ids, logits.stride(0), vocab, span,
        RACE=RACE, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        pick_kernel[(rows,)](score, ids, out, parts, PARTS=next_power_of_2(parts), num_warps=1)
    return out


def _reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    _check(logits, (temperature, top_k, top_p, min_p, seeds, offsets))
    return reference(logits, temperature, top_k, top_p, min_p, seeds, offsets)


sampling = define(
    "sampling(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
    " Tensor offsets) -> Tensor",
    fake=lambda logits, *rest: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


class VllmTopKTopPSampler(nn.Module):
    """vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler: tokens of logits [B, V] that are already divided by the
    temperature. k [B] int, p [B] float, or None for all tokens.

    Returns (token ids [B] int64, None, or what logprobs_mode 'processed_logits' or 'processed_logprobs' asks for).
    A row's seed comes from its generator, of the others from torch's. The noise is float32 with steps of 2^-32 near 0,
    with use_fp64_gumbel too.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = len(logits)
        seeds = torch.randint(1 << 62, (rows,), device=logits.device)
        for row, generator in generators.items():
            seeds[row] = torch.randint(1 << 62, (), generator=generator, device=generator.device)
        ones = torch.ones(rows, device=logits.device)
        top_k = torch.zeros_like(seeds) if k is None else k
        args = (ones, top_k.int(), ones if p is None else p.float(), torch.zeros_like(ones))
        ids = sampling(logits, *args, seeds, torch.zeros_like(seeds))
        if self.logprobs_mode not in ("processed_logits", "processed_logprobs"):
            return ids, None
        if k is not None or p is not None:
            logits = logits.masked_fill(logits.float() < threshold(logits.float(), *args), -torch.inf)
        if self.logprobs_mode == "processed_logits":
            return ids, logits
        return ids, logits.log_softmax(dim=-1, dtype=torch.float32)


class SGLangSampler_0_5_16(nn.Module):
    """sglang.srt.layers.sampler.Sampler before 0.5.23: token ids [B] of logits_output.next_token_logits [B, V].

    Of sampling_info it reads is_all_greedy, temperatures [B, 1], top_ks, top_ps, min_ps [B] and sampling_seed ([B] or
    None: torch's generator chooses). Log-probabilities and custom logit processors raise ValueError.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return self._sample(logits_output.next_token_logits, sampling_info, return_logprob, positions)

    def _sample(
        self, logits: torch.Tensor, info: Any, return_logprob: bool, positions: torch.Tensor
    ) -> torch.Tensor:
        if return_logprob or getattr(info, "has_custom_logit_processor", False):
            raise ValueError("log-probabilities and custom logit processors need SGLang's own Sampler")
        seeds = info.sampling_seed
        if seeds is None:
            seeds = torch.randint(1 << 62, (len(logits),), device=logits.device)
        temperature = torch.zeros_like(info.top_ps) if info.is_all_greedy else info.temperatures.view(-1)
        ids = sampling(
            logits,
            temperature.float(),
            info.top_ks.int(),
            info.top_ps,
            info.min_ps,
            seeds.long(),
            positions.long(),
        )
        return ids if info.is_all_greedy else ids.int()


class SGLangSampler(SGLangSampler_0_5_16):
    """sglang.srt.layers.sampler.Sampler from 0.5.23 on; see SGLangSampler_0_5_16.

    logprob_logits is for log-probabilities only.
    """

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._sample(logits_output.next_token_logits, sampling_info, return_logprob, positions)


_LLAMA = 128256
_MIXED = {
    "temperature": (1.0, 0.7, 0.0), "top_k": (40, 0), "top_p": (0.9, 0.5, 1.0), "min_p": (0.0, 0.05),
}  # fmt: skip

_VLLM = "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler"
_VLLM_NOTE = (
    "live, the host's own stays: it belongs to the model runner, not to the model, its forward is bound on the"
    " instance, and a seeded request would draw other tokens from its generator than before"
)
_SGLANG = "sglang.srt.layers.sampler:Sampler"
_SGLANG_NOTE = (
    "live, the host's own stays: it belongs to the model runner, not to the model, and also computes log-probabilities;"
    " ours applies min_p first and top_p to what top_k leaves, the host top_p to all and min_p last"
)

SPEC = OpSpec(
    name="sampling",
    level=1,
    reference=reference,
    op=sampling,
    cases=(
        Case("greedy_32", {"rows": 32, "vocab": _LLAMA, "temperature": 0.0}, weight=1, tags=("model",)),
        Case("decode_1", {"rows": 1, "vocab": _LLAMA}, weight=1, tags=("model",)),
        Case("decode_256", {"rows": 256, "vocab": _LLAMA}, weight=1, tags=("model",)),
        Case("top_32", {"rows": 32, "vocab": _LLAMA, "top_k": 50, "top_p": 0.95}, weight=1, tags=("model",)),
        Case("top_p_32", {"rows": 32, "vocab": _LLAMA, "top_p": 0.9}, weight=1, tags=("model",)),
        Case("one", {"rows": 1, "vocab": 1}, dtype="float32", tags=("odd",)),
        Case("greedy_63", {"rows": 9, "vocab": 1000, "temperature": 0.0}, tags=("odd",)),
        Case("drawn_1128", {"rows": 4, "vocab": 1128, "offset": 1 << 33}, dtype="float16", tags=("odd",)),
        Case("mixed", {"rows": 4, "vocab": 5003, **_MIXED}, dtype="float32", tags=("odd",)),
        Case("mixed_ties", {"rows": 3, "vocab": 9001, **_MIXED}, tags=("odd",)),
        Case("flat_top_p", {"rows": 1, "vocab": 5000, "top_p": 0.97, "scale": 0.1}, dtype="float32", tags=("odd",)),
        Case("banned", {"rows": 2, "vocab": 4097, "banned": True, **_MIXED}, tags=("odd",)),
    ),
    inputs=_sampling_calls.inputs,
    bytes_moved=_sampling_calls.bytes_moved,
    dims_of=_sampling_calls.dims_of,
    vary=_sampling_calls.vary,
    permutable=lambda *args: Permutable(rows=tuple(range(7)), columns=(0,)),
    extremes=_sampling_calls.EXTREMES,
    build=_sampling_calls.build,
    flops=_sampling_calls.flops,
    tolerance={name: Tolerance(0.0, 0.0) for name in ("float32", "float16", "bfloat16")},
    targets=(
        Target("vllm", _VLLM, "VllmTopKTopPSampler", "standalone", note=_VLLM_NOTE),
        Target("sglang", _SGLANG, "SGLangSampler_0_5_16", "standalone", "<0.5.23", note=_SGLANG_NOTE),
        Target("sglang", _SGLANG, "SGLangSampler", "standalone", ">=0.5.23", note=_SGLANG_NOTE),
    ),
)  # fmt: skip
