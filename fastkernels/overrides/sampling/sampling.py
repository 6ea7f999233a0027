"""Next tokens from logits, with temperature, top_k, top_p and min_p per row and counter-based noise.

A token is drawn by an exponential race (argmax of p / e with e ~ Exp(1), in logarithms). Its noise is Philox of (seed,
offset, token id), so the draw of a row is independent of the batch, the step and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.core import assemble
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Permutable, Tensor, Tolerance
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.philox import exponential
from fastkernels.overrides.sampling.sampling_triton import (
    LANES,
    RACE,
    pick_kernel,
    race_kernel,
    threshold_kernel,
)

GREEDY = 1e-5  # below this temperature the most likely token is chosen, as in vLLM
_PROGRAMS = 1024  # of the race: several per multiprocessor of an H200, which has 132
_CPU_LOGITS = 1 << 18  # per chunk: larger temporary tensors cause page faults and cache misses on a CPU
_NARROW = 1024  # most likely tokens that are sorted before a whole row is


def threshold(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the smallest kept logit [B, 1] of x [B, V], which has no NaN; the other arguments are [B].

    Filters apply in vLLM's order. min_p keeps tokens with at least min_p times the largest probability. top_k keeps
    tokens with fewer than k more likely ones. top_p keeps tokens whose more likely ones have less than top_p of the
    remaining mass. Equal logits are kept or dropped together, and the most likely token is always kept.
    """
    vocab = x.shape[-1]
    t, p = temperature[:, None].to(x.dtype), top_p[:, None].double()
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None].long()
    top = x.amax(dim=-1, keepdim=True)
    low = top + t * min_p[:, None].to(x.dtype).log()
    width = vocab
    if x.device.type == "cpu":  # reading values does not stall a device
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
    """Draw the tokens of rows that are not greedy."""
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
    """logits: [B, V]; all other arguments: [B]. Returns token ids [B] int64.

    temperature   float; 0: the most likely token, the lowest id among equals
    top_k         int; <= 0 or >= V: all tokens
    top_p, min_p  float; 1 and 0: all tokens
    seeds, offsets  int64; the offset is the position of the token in its sequence

    NaN counts as -inf and +inf as the largest finite number. -inf never wins; a row of -inf gives token 0.
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
    if logits.shape[-1] > 1 << 22:  # Gemma 3 has 262,208 tokens
        return f"vocabulary {logits.shape[-1]} exceeds the limit of {1 << 22}"
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


_DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


_STATED_ROWS = 32  # rows whose values the dims of a call state


def _read(name: str) -> Callable[[SimpleNamespace], Any]:
    """Axis.read of an argument [B]: the values of the first rows, or the value that all rows share."""

    def read(args: SimpleNamespace) -> Any:
        values = getattr(args, name)
        found = [] if values.is_meta else values[:_STATED_ROWS].tolist()
        if not found:
            return None
        return found[0] if len(set(found)) == 1 else tuple(found)

    return read


def _values(call: Call) -> Mapping[str, torch.Tensor]:
    rows = torch.arange(call["rows"], device=call.device)
    logits = call.normal((call["rows"], call["vocab"]), torch.float32, 0.0, call["scale"])
    if call["banned"]:
        logits[:, ::3] = -torch.inf

    def each(name: str) -> torch.Tensor:
        """One value for all rows, or a tuple whose values the rows take in turn."""
        values = call[name] if isinstance(call[name], (tuple, list)) else (call[name],)
        dtype = torch.int32 if name == "top_k" else torch.float32
        return torch.tensor(values, dtype=dtype, device=call.device)[rows % len(values)]

    # Seeds that follow from the rows would let a kernel keep its noise from call to call.
    seeds = torch.randint(1 << 62, rows.shape, generator=call.generator, device=call.device)
    return {
        "logits": logits.to(getattr(torch, call["dtype"])), **{name: each(name) for name in _DEFAULTS},
        "seeds": seeds, "offsets": rows * 3 + call["offset"],
    }  # fmt: skip


def _first_offset(args: SimpleNamespace) -> int | None:
    return int(args.offsets[0]) if args.offsets.numel() else None


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    logits, temperature, top_k, top_p, min_p, seeds, offsets = args
    if not assemble.takes(cls.forward, "sampling_info"):  # type: ignore[attr-defined]
        raise ValueError(f"{cls.__name__} draws its seeds from torch's generators and takes none")
    info = SimpleNamespace(
        is_all_greedy=False, temperatures=temperature[:, None], top_ks=top_k, top_ps=top_p, min_ps=min_p,
        sampling_seed=seeds, has_custom_logit_processor=False,
    )  # fmt: skip
    output, module = SimpleNamespace(next_token_logits=logits), assemble.make(cls, logits)
    return lambda: module(output, info, False, [], [], offsets).long()


def _equal(args: list[Any]) -> None:
    args[0].fill_(1.0)


def _masked(args: list[Any]) -> None:
    logits = args[0]
    row = torch.arange(len(logits), device=logits.device)
    logits.fill_(-torch.inf)
    logits[row, (7 * row + 3) % logits.shape[1]] = 0.5


def _cold(args: list[Any]) -> None:
    args[1].fill_(0.01)


def _greedy(args: list[Any]) -> None:
    args[1].fill_(1e-6)


# Colder temperatures leave float32 too few bits for the noise, which decides between equal logits.
_EXTREMES = {"equal_logits": _equal, "one_allowed": _masked, "cold": _cold, "nearly_greedy": _greedy}

_LLAMA = 128256
_MIXED = {
    "temperature": (1.0, 0.7, 0.0), "top_k": (40, 0), "top_p": (0.9, 0.5, 1.0), "min_p": (0.0, 0.05),
}  # fmt: skip


SPEC = OpSpec(
    name="sampling",
    level=1,
    by_default=True,
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
    arguments=(
        Tensor("logits", "rows vocab"),
        Tensor("temperature", "rows", "float32"),
        Tensor("top_k", "rows", "int32"),
        Tensor("top_p", "rows", "float32"),
        Tensor("min_p", "rows", "float32"),
        Tensor("seeds", "rows", "int64"),
        Tensor("offsets", "rows", "int64"),
    ),
    outputs=(Tensor("token_ids", "rows", "int64"),),
    axes={
        "rows": Axis.per_call(),
        "vocab": Axis.count(),
        **{name: Axis(default, read=_read(name), stated=True) for name, default in _DEFAULTS.items()},
        "offset": Axis.per_call(0, read=_first_offset, draw=lambda _, rng: rng.randrange(1 << 40)),
        "scale": Axis(4.0),
        "banned": Axis(False),
    },
    values=_values,
    flops="8 * rows * vocab",
    permutable=lambda *args: Permutable(rows=tuple(range(7)), columns=(0,)),
    extremes=_EXTREMES,
    build=_build,
    tolerance={name: Tolerance(0.0, 0.0) for name in ("float32", "float16", "bfloat16")},
)  # fmt: skip
