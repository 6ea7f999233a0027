"""Numerical probes: a host's module or function on tiny CPU tensors, compared with the reference of an op.

Every probe returns whether the results agree in float32; False also where the module cannot be called like the op.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.core import registry

TOLERANCE = 2e-5
TOKENS = 5


def agree(theirs: Any, ours: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors have one shape and nearly equal, finite values."""
    if (
        not isinstance(theirs, torch.Tensor)
        or not isinstance(ours, torch.Tensor)
        or theirs.shape != ours.shape
    ):
        return False
    a, b = theirs.detach().double(), ours.detach().double()
    scale = max(1.0, float(b.abs().max()) if b.numel() else 1.0)
    return (
        bool(torch.isfinite(a).all())
        and float((a - b).abs().max() if a.numel() else 0.0) <= tolerance * scale
    )


def safely(probe: Callable[..., bool], *args: Any) -> bool:
    """The result of a probe; False where the host's code raises: it is called with our idea of its arguments."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        with torch.no_grad(), torch.device("cpu"):
            return bool(probe(*args))
    except Exception:  # any error of a host's forward
        return False
    finally:
        torch.random.set_rng_state(state)


def on_cpu(module: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> nn.Module:
    """A copy of a small module on the CPU with random float32 tensors; shapes: those of some of its own parameters."""
    made = copy.deepcopy(module).to("meta").to(torch.float32).eval()
    for part in made.modules():
        given = (shapes or {}) if part is made else {}
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            shape = given.get(name, tuple(tensor.shape))
            floating = tensor.is_floating_point()
            data = torch.randn(shape) * 0.5 if floating else torch.zeros(shape, dtype=tensor.dtype)
            if name in part._parameters:
                part._parameters[name] = nn.Parameter(data, requires_grad=False)
            else:
                part._buffers[name] = data
    return made


def target_probe(module: nn.Module, ours: type) -> bool:
    """Whether the module's forward equals that of our class on the module's own attributes."""
    theirs = on_cpu(module) if not list(module.children()) else _small(module)
    width = next((p.shape[-1] for p in theirs.parameters()), getattr(theirs, "normalized_shape", (16,))[-1])
    inputs = [torch.randn(TOKENS, width) for _ in range(1 + _gated(theirs))]
    ours_forward: Any = ours.forward  # type: ignore[attr-defined]
    return agree(theirs(*inputs), ours_forward(theirs, *inputs))


def _gated(module: nn.Module) -> int:
    return int("gate" in inspect.signature(module.forward).parameters)


def _small(module: nn.Module) -> nn.Module:
    """A copy of an MLP on the CPU, its linear layers with tiny sizes in the original ratios."""
    made = copy.deepcopy(module).to("meta").to(torch.float32).eval()
    linears = [(name, child) for name, child in made.named_children() if type(child) is nn.Linear]
    divisor = math.gcd(*(n for _, child in linears for n in (child.in_features, child.out_features)))
    least = min(n for _, child in linears for n in (child.in_features, child.out_features))
    while least // divisor < 4 and divisor % 2 == 0:
        divisor //= 2
    for name, child in linears:
        sizes = child.in_features // divisor, child.out_features // divisor
        setattr(made, name, nn.Linear(*sizes, bias=child.bias is not None, device="cpu"))
    return made


def linear_probe(module: nn.Module) -> bool:
    """A linear layer: the op `linear`."""
    reference, cls = registry.get("linear").reference, type(module)
    made: Any
    if isinstance(module, nn.Linear):
        made = nn.Linear(8, 6, bias=module.bias is not None)
        x = torch.randn(TOKENS, 8)
        return agree(cls.forward(made, x), reference(x, made.weight, made.bias))
    # transformers' Conv1D: the weight is [in, out]
    made = SimpleNamespace(weight=torch.randn(8, 6), bias=torch.randn(6), nf=6)
    x = torch.randn(1, TOKENS, 8)
    return agree(cls.forward(made, x), reference(x, made.weight.t(), made.bias))


def patches_probe(module: Any) -> bool:
    """A convolution whose windows do not overlap: the op `linear` on rows of patches."""
    kernel = tuple(min(k, 3) for k in module.kernel_size)
    cls: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
    made = cls(2, 4, kernel, stride=kernel, bias=module.bias is not None)
    image = torch.randn(1, 2, *(2 * k for k in kernel))
    patches = image
    for axis, k in enumerate(kernel):
        patches = patches.unfold(2 + axis, k, k)  # [1, C, n..., k...]
    n = len(kernel)
    order = (0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    rows = patches.permute(*order).reshape(1, 2**n, -1)
    ours = registry.get("linear").reference(rows, made.weight.flatten(1), made.bias)
    return agree(type(module).forward(made, image).flatten(2).transpose(1, 2), ours)


def embedding_probe(module: nn.Module) -> bool:
    """A table whose rows are looked up, and possibly multiplied by one number."""
    assert isinstance(module, nn.Embedding)
    made = copy.deepcopy(module).to("meta")
    weight = torch.randn(12, 8)
    made.weight = nn.Parameter(weight, requires_grad=False)
    for name, buffer in list(made.named_buffers(recurse=False)):
        made._buffers[name] = torch.full(tuple(buffer.shape), 2.0)
    made.num_embeddings, made.embedding_dim, made.padding_idx = 12, 8, None
    ids = torch.tensor([[3, 1, 7]])
    rows = registry.get("embedding").reference(ids, weight)
    theirs = made(ids)
    scale = float((theirs * rows).sum() / rows.square().sum())
    return scale != 0 and agree(theirs, rows * scale)


def activation_probe(module: nn.Module, op: str, **arguments: Any) -> bool:
    x = torch.randn(TOKENS, 8)
    return agree(module(x), registry.get(op).reference(x, **arguments))


def norm_op(module: nn.Module) -> str:
    """The op that computes an unlisted norm with a weight, or without any parameter; '' if none does.

    The number of its attributes that is added to the variance is `eps`, by any of its usual names.
    """
    made = on_cpu(module)
    weight, bias = getattr(made, "weight", None), getattr(made, "bias", None)
    width = getattr(made, "normalized_shape", (16,))[-1] if weight is None else weight.shape[-1]
    x = torch.randn(TOKENS, width)
    theirs = made(x)
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2} | {1e-5, 1e-6}
    norms = {name: registry.get(name).reference for name in ("rms_norm", "gemma_rms_norm", "layer_norm")}
    for eps in numbers:
        tries = {
            "rms_norm": lambda e=eps: norms["rms_norm"](x, weight, e),
            "layer_norm": lambda e=eps: norms["layer_norm"](x, weight, bias, e),
            "gemma_rms_norm": lambda e=eps: norms["gemma_rms_norm"](x, weight, e),
        }
        for name, compute in tries.items():
            if (name != "gemma_rms_norm" or weight is not None) and agree(theirs, first(compute())):
                return name
    return ""


def scaled_norm(module: nn.Module) -> str:
    """The op of a norm over the channels of [B, C, ...], or one whose weight is stored less 1; '' if none."""
    made = on_cpu(module)
    weight, bias = getattr(made, "weight", None), getattr(made, "bias", None)
    if weight is None:
        return ""
    layer_norm = registry.get("layer_norm").reference
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2} | {1e-5, 1e-6}
    channels = torch.randn(2, weight.shape[0], 3, 2), torch.randn(2, weight.shape[0], 3)
    for x in (*channels, torch.randn(TOKENS, weight.shape[0])):
        try:
            theirs = made(x)
        except (IndexError, RuntimeError, TypeError, ValueError):
            continue
        rows = x.movedim(1, -1).contiguous() if x.dim() > 2 else x
        for eps, w in itertools.product(numbers, (weight, weight + 1)):
            ours = layer_norm(rows, w, bias, eps)
            if agree(theirs, ours.movedim(-1, 1) if x.dim() > 2 else ours):
                return "layer_norm"
    return ""


def scales_alone(module: nn.Module) -> bool:
    """Whether a class that is called a norm only multiplies by its weight and adds its bias."""
    made: Any = on_cpu(module)
    x = torch.randn(TOKENS, made.weight.shape[-1])
    return agree(made(x), x * made.weight + made.bias)


def convolution_probe(module: Any, sizes: tuple[int, ...]) -> bool:
    """A convolution of torch, plain or transposed, with its settings and fewer channels: the op `convolution`."""
    groups = 1 if module.groups == 1 else 2
    made: Any = _plain_convolution(module)(
        2 * groups, 2 * groups, module.kernel_size, module.stride, module.padding, groups=groups,
        bias=module.bias is not None, dilation=module.dilation,
        **({"output_padding": module.output_padding} if module.transposed else {}),
    )  # fmt: skip
    x = torch.randn(1, 2 * groups, *sizes)
    padding, given = made.padding, x
    if isinstance(padding, str):  # more zeros behind than in front, where their number is odd
        given, padding = nn.functional.pad(x, made._reversed_padding_repeated_twice), (0,)
        padding = padding if made.padding == "same" else (0,)
    more = (made.transposed, made.output_padding)
    ours = registry.get("convolution").reference(
        given, made.weight, made.bias, made.stride, padding, made.dilation, groups, *more
    )
    return agree(made(x), ours)


def _plain_convolution(module: Any) -> Any:
    found = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return next(cls for cls in found if isinstance(module, cls))


def batch_norm_probe(module: Any) -> bool:
    made: Any = on_cpu(module, dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (6,)))
    made.running_var = torch.rand(6) + 0.5
    made.num_features = 6
    dimensions = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[type(module)]
    x = torch.randn(2, 6, *[3] * dimensions)
    statistics = made.running_mean, made.running_var
    return agree(
        made(x), registry.get("batch_norm").reference(x, *statistics, made.weight, made.bias, made.eps)
    )


def group_norm_probe(module: Any) -> bool:
    """GroupNorm, or InstanceNorm, which has a group for each channel."""
    groups = getattr(module, "num_groups", None) or module.num_features
    channels = 2 * groups if hasattr(module, "num_groups") else groups
    made: Any = on_cpu(module, dict.fromkeys(("weight", "bias"), (channels,)))
    if hasattr(made, "num_channels"):
        made.num_channels = channels
    dimensions = (
        3 if type(module).__name__.endswith("3d") else 1 if type(module).__name__.endswith("1d") else 2
    )
    x = torch.randn(2, channels, *[3] * dimensions)
    reference = registry.get("group_norm").reference
    return agree(made(x), reference(x, groups, made.weight, made.bias, made.eps))


def pool_probe(module: Any) -> bool:
    kind, n = type(module).__name__[:3], int(type(module).__name__[-2])
    x = torch.randn(1, 2, *[int(k) + 6 for k in _each(module.kernel_size, n)])
    sizes = [_each(v, n) for v in (module.kernel_size, module.stride, module.padding)]
    more = (module.ceil_mode, getattr(module, "count_include_pad", True))
    return agree(module(x), registry.get("pool").reference(x, *sizes, kind == "Max", *more))


def _each(value: Any, n: int) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * n


def interpolate_probe(module: Any) -> bool:
    """torch's Upsample."""
    modes = {
        "nearest": "nearest",
        "linear": "linear",
        "bilinear": "linear",
        "trilinear": "linear",
        "bicubic": "cubic",
    }
    n = {"linear": 1, "trilinear": 3}.get(module.mode, 2)
    x = torch.randn(1, 2, *(4, 5, 3)[:n])
    theirs = module(x)
    scales = [] if module.scale_factor is None else [float(f) for f in _factors(module.scale_factor, n)]
    reference = registry.get("interpolate").reference
    return agree(
        theirs, reference(x, theirs.shape[2:], modes[module.mode], bool(module.align_corners), scales)
    )


def _factors(value: Any, n: int) -> list[float]:
    return list(value) if isinstance(value, (tuple, list)) else [value] * n


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def router_op(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """The op and the arguments that choose experts as this router does; ('', {}) if none does."""
    made = on_cpu(module)
    for name, child in made.named_children():
        if type(child) is nn.Linear:
            setattr(
                made, name, nn.Linear(child.in_features, child.out_features, child.bias is not None, "cpu")
            )
    linear: Any = made if isinstance(getattr(made, "weight", None), torch.Tensor) else None
    if linear is None:
        linear = next((c for c in made.children() if type(c) is nn.Linear), None)
    if linear is None:
        return "", {}
    weight = linear.weight
    x = torch.randn(7, weight.shape[1]) * weight.shape[1] ** -0.5  # logits of order 1
    logits = nn.functional.linear(x, weight, getattr(linear, "bias", None))
    held = [*made.named_buffers(), *made.named_parameters()]
    biases = (t.flatten() for n, t in held if n.endswith("correction_bias") and t.numel() == len(weight))
    bias = next(biases, None)
    arguments: tuple[Any, ...] = (x,)
    if "e_score_correction_bias" in inspect.signature(made.forward).parameters:
        bias = torch.randn(len(weight))
        arguments = (x, bias)
    result = made(*arguments)
    tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
    ids = next((t for t in tensors if not t.is_floating_point()), None)
    weights = None  # the last of its shape: logits come first
    for tensor in tensors:
        if ids is not None and tensor.is_floating_point() and tensor.shape == ids.shape:
            weights = tensor
    if ids is None or weights is None:
        return "", {}
    theirs = torch.zeros_like(logits).scatter(1, ids, weights.float())
    k, numbers = ids.shape[1], _numbers(made)
    for renormalize in (False, True):
        got = registry.get("topk_softmax").reference(logits, k, renormalize)
        if _same_choice(theirs, got):
            return "topk_softmax", {"topk": k, "renormalize": renormalize}
    groups = [(numbers["groups"], numbers["topk_group"])] if numbers["groups"] else []
    for scoring in ("sigmoid", "softmax"):
        for renormalize in (False, True):
            for n, top in [*groups, (1, 1)]:
                for factor in {1.0, numbers["factor"]}:
                    given = (logits, k, renormalize, n, top, scoring, bias, factor)
                    if _same_choice(theirs, registry.get("grouped_topk").reference(*given)):
                        named = {
                            "topk": k,
                            "renormalize": renormalize,
                            "num_expert_group": n,
                            "topk_group": top,
                        }
                        return "grouped_topk", {
                            **named,
                            "scoring_func": scoring,
                            "routed_scaling_factor": factor,
                        }
    return "", {}


def _numbers(router: nn.Module) -> dict[str, Any]:
    def attribute(*names: str) -> Any:
        holders = (router, getattr(router, "config", None))
        return next((getattr(h, n) for n in names for h in holders if getattr(h, n, None) is not None), None)

    return {
        "groups": attribute("n_group", "num_group", "num_expert_group"),
        "topk_group": attribute("topk_group"),
        "factor": float(attribute("routed_scaling_factor", "router_scaling_factor", "route_scale") or 1.0),
    }


def _same_choice(theirs: torch.Tensor, result: tuple[torch.Tensor, ...]) -> bool:
    weights, ids = result[0], result[1]
    return agree(torch.zeros_like(theirs).scatter(1, ids.long(), weights.to(theirs.dtype)), theirs)


def experts_probe(module: nn.Module) -> bool:
    """Experts with stacked weights (gate_up_proj, down_proj): the op `fused_experts`."""
    experts, hidden, inner = 3, 8, 6
    up, down = dict(module.named_parameters())["gate_up_proj"], dict(module.named_parameters())["down_proj"]
    last = up.shape[-1] == down.shape[-2]  # [E, 2 I, H] and [E, H, I]
    shapes = {
        "gate_up_proj": (experts, 2 * inner, hidden) if last else (experts, hidden, 2 * inner),
        "down_proj": (experts, hidden, inner) if last else (experts, inner, hidden),
    }
    if set(dict(module.named_parameters())) != set(shapes):
        return False
    made: Any = on_cpu(module, shapes)
    tiny = {up.shape[0]: experts, up.shape[-1 if last else -2]: hidden, down.shape[-1 if last else -2]: inner}
    for name, value in list(vars(made).items()):
        if type(value) is int and value in tiny:
            setattr(made, name, tiny[value])
    x, ids = torch.randn(TOKENS, hidden), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    weights = torch.rand(TOKENS, 2)
    w1, w2 = (made.gate_up_proj, made.down_proj) if last else (made.gate_up_proj.mT, made.down_proj.mT)
    forward = inspect.unwrap(type(made).forward)
    ours = registry.get("fused_experts").reference(x, w1, w2, weights, ids)
    return agree(forward(made, x, ids, weights), ours)


def attention_probe(
    function: Callable[..., Any], softcap: float | None, window: int | None, grouped: bool = True
) -> bool:
    """A file's eager attention function under a causal mask: the op `attention_prefill`."""
    heads, kv_heads, size, block = 4, 2 if grouped else 4, 8, 16
    q, k, v = (torch.randn(1, n, TOKENS, size) for n in (heads, kv_heads, kv_heads))
    at = torch.arange(TOKENS)
    seen = at[None] <= at[:, None]
    if window is not None:
        seen &= at[None] > at[:, None] - 2
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    module = SimpleNamespace(
        num_key_value_groups=heads // kv_heads, training=False, head_dim=size, is_causal=True
    )
    extra = {} if softcap is None else {"softcap": 1.5}
    theirs = function(module, q, k, v, mask, scaling=0.3, dropout=0.0, **extra)[0]
    caches = [torch.zeros(1, block, kv_heads, size) for _ in range(2)]
    for cache, new in zip(caches, (k, v), strict=True):
        cache[0, :TOKENS] = new[0].transpose(0, 1)
    ours = registry.get("attention_prefill").reference(
        q[0].transpose(0, 1).contiguous(), *caches, torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.tensor([TOKENS], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), TOKENS, TOKENS, 0.3,
        -1 if window is None else 1, 0.0 if softcap is None else 1.5,
    )  # fmt: skip
    return agree(theirs[0], ours)


def dense_attention_probe(function: Callable[..., Any], grouped: bool = True, biased: bool = False) -> bool:
    """A file's eager attention function with a mask, with a bias and without both: the op `attention_dense`."""
    heads, kv_heads, size, keys = 4, 2 if grouped else 4, 8, TOKENS + 3
    q = torch.randn(2, heads, TOKENS, size)
    k, v = (torch.randn(2, kv_heads, keys, size) for _ in range(2))
    hidden = torch.rand(2, 1, TOKENS, keys) < 0.3
    hidden[..., 0] = False
    module = SimpleNamespace(
        num_key_value_groups=heads // kv_heads, training=False, head_dim=size, is_causal=False
    )
    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    dense = registry.get("attention_dense").reference
    bias = torch.randn(1, heads, TOKENS, keys) if biased else None
    more = {"position_bias": bias} if biased else {}
    least = torch.finfo(torch.float32).min
    for mask in (None, torch.zeros(hidden.shape).masked_fill(hidden, least), torch.randn(2, 1, TOKENS, keys)):
        theirs = function(module, q, k, v, mask, scaling=0.3, dropout=0.0, **more)[0]
        both = [t for t in (mask, bias) if t is not None]
        if not agree(theirs, dense(*rows, 0.3, sum(both) if both else None)):
            return False
    return True


def rope_probe(
    module: nn.Module, apply: Callable[..., Any], call: Callable[[nn.Module, Any, Any], Any]
) -> bool:
    """A module of cosines and sines with its file's function that rotates: the op `rotary_emb`.

    The module gives cosines and sines of all channels, of one channel of each pair, or complex numbers.
    """
    made: Any = copy.deepcopy(module)
    positions = torch.tensor([[3, 0, 7, 1, 6]])
    turns = call(made, torch.zeros(1, 5, 8), positions)
    table = call(made, torch.zeros(1, 8, 8), torch.arange(8)[None])
    if isinstance(turns, torch.Tensor) and turns.is_complex():
        turns, cos, sin = (turns,), table.real, table.imag
    elif isinstance(turns, tuple) and len(turns) == 2:
        cos, sin = table
    else:
        return False
    n = cos.shape[-1]
    caches = [torch.cat((cos[0], sin[0]), dim=-1)]  # of pairs
    if len(turns) == 2 and n % 2 == 0:
        caches += [
            torch.cat((cos[0][:, p], sin[0][:, p]), dim=-1) for p in (slice(n // 2), slice(None, None, 2))
        ]
    for cache in caches:
        for extra in (0, cache.shape[-1]):  # a head may be wider than its rotated part
            for heads_last in (False, True):
                if _rotates_alike(apply, turns, positions[0], cache, cache.shape[-1] + extra, heads_last):
                    return True
    return False


def _rotates_alike(
    apply: Callable[..., Any],
    turns: Any,
    positions: torch.Tensor,
    cache: torch.Tensor,
    width: int,
    heads_last: bool,
) -> bool:
    """Whether a host's function rotates queries and keys as the op does with a cache. heads_last: [B, T, heads, D]."""
    q, k = torch.randn(1, 5, 2, width), torch.randn(1, 5, 2, width)
    given = (q, k) if heads_last else (q.transpose(1, 2), k.transpose(1, 2))
    try:
        rotated = apply(given[0].clone(), given[1].clone(), *turns)
        theirs = [t if heads_last else t.transpose(1, 2) for t in rotated]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    for neox in (True, False):
        ours = registry.get("rotary_emb").reference(positions, q[0], k[0], width, cache, neox)
        if all(agree(a[0], b) for a, b in zip(theirs, ours, strict=True)):
            return True
    return False


def rotation_probe(apply: Callable[..., Any]) -> bool:
    """A function that rotates queries and keys by angles of each token: `rotary_emb`, whose cache has a row a token."""
    half, width = 4, 16
    angles = torch.rand(TOKENS, half) * 3
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    at = torch.arange(TOKENS)
    for wide in (torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1), angles):
        for turn in (wide[None], wide, wide[None, :, None], wide[:, None]):
            for given in ((turn.cos(), turn.sin()), (torch.polar(torch.ones_like(turn), turn),)):
                for layout, rotated in itertools.product((0, 1, 2), (2 * half, width)):
                    if _rotates_by(apply, given, at, cache, rotated, layout):
                        return True
    return False


def _rotates_by(
    apply: Callable[..., Any], given: tuple[torch.Tensor, ...], at: torch.Tensor, cache: torch.Tensor, width: int,
    layout: int,
) -> bool:  # fmt: skip
    """layout: queries are [1, heads, T, D], [1, T, heads, D] or [T, heads, D]. One tensor or two are rotated."""
    q, k = torch.randn(TOKENS, 2, width), torch.randn(TOKENS, 2, width)
    to = (lambda t: t.transpose(0, 1)[None], lambda t: t[None], lambda t: t)[layout]
    back = (lambda t: t[0].transpose(0, 1), lambda t: t[0], lambda t: t)[layout]
    names = list(inspect.signature(apply).parameters)
    both = len(names) > 1 and names[1] not in ("cos", "freqs", "freqs_cis", "freqs_ci")
    try:
        theirs = apply(*(to(t).clone() for t in ((q, k) if both else (q,))), *given)
        theirs = [back(t) for t in (theirs if both else (theirs,))]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    for neox in (True, False):
        ours = registry.get("rotary_emb").reference(at, q, k, width, cache, neox)
        if all(agree(a, b) for a, b in zip(theirs, ours, strict=False)):
            return True
    return False


@contextmanager
def recorded_attention(module: nn.Module) -> Iterator[list[tuple[Any, ...]]]:
    """Replace the attention function of one module; yields the list of (q, k, v, keyword arguments) of its calls."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: list[tuple[Any, ...]] = []
    name = "fastkernels_recorder"

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
        found.append((query, key, value, kwargs))
        out = torch.empty(*query.shape[:-1], value.shape[-1], device=query.device, dtype=query.dtype)
        return out.transpose(1, 2).contiguous(), None

    config: Any = module.config
    before = config._attn_implementation_internal
    ALL_ATTENTION_FUNCTIONS[name] = record
    config._attn_implementation_internal = name
    try:
        yield found
    finally:
        config._attn_implementation_internal = before
        del ALL_ATTENTION_FUNCTIONS[name]
