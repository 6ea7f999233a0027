"""The op that a module of a transformers model equals, and how certain that is.

A module is matched by class (what its class or its forward is known to compute), by signature (its call, or the tensors
that it holds, are those of the op) and by probe (numbers; see probes.py). Modules of several parts that only connect
them need no op. See docs/coverage.md.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import nn

from fastkernels.core import registry
from fastkernels.core.spec import Target
from fk_integrations.transformers import attention_graph, probes
from fk_integrations.transformers.forward_code import READ, calls
from fk_integrations.transformers.recognition import target_of
from fk_integrations.transformers.recurrence_probes import lstm_probe, recurrence_op

PRIMITIVES = {  # functions of torch that no op of ours computes: what they are
    **dict.fromkeys(("fft", "fftn", "fft2", "ifft", "rfft", "irfft", "rfft2", "irfft2", "stft", "istft"), "FFT"),
    **dict.fromkeys(("selective_scan_fn", "selective_scan_update", "mamba_chunk_scan_combined"), "recurrence"),
    **dict.fromkeys(("pinv", "svd", "eigh", "solve", "inv", "qr", "cholesky"), "linear algebra"),
    **dict.fromkeys(("deform_conv2d", "roi_align", "nms", "batched_nms"), "detection op"),
    "autograd function": "custom function", "loaded kernel": "kernel of a library", "gumbel_softmax": "codebook",
}  # fmt: skip
FUNCTIONS = {  # functions of torch and the ops that compute them; their module may be of any kind
    **{f"conv{n}d": "convolution" for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": "convolution" for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": "pool" for kind in ("avg", "max") for n in (1, 2, 3)},
    "grid_sample": "grid_sample", "interpolate": "interpolate", "upsample": "interpolate", "group_norm": "group_norm",
    "instance_norm": "group_norm", "batch_norm": "batch_norm", "multi_scale_deformable_attention": "grid_sample",
}  # fmt: skip
_RESEMBLE = {  # by class only
    **{f"adaptive_{kind}_pool{n}d": ("pool", "windows of several sizes") for kind in ("avg", "max") for n in (1, 2, 3)},
    "interpolate otherwise": ("interpolate", "resampling of another kind"),
    "grid_sample otherwise": ("grid_sample", "sampling of another kind"),
    "cdist": ("linear", "distances to the rows of a table"),
}  # fmt: skip
MODULES: tuple[tuple[str, tuple[type, ...], Callable[..., bool]], ...] = (
    ("batch_norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), probes.batch_norm_probe),
    ("group_norm", (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm), probes.group_norm_probe),
    ("interpolate", (nn.Upsample,), probes.interpolate_probe),
    (
        "pool",
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        probes.pool_probe,
    ),
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WHOLE_POOLS = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
)
_RECURRENT = re.compile(
    r"Mamba|SSM|Rwkv|DeltaNet|DeltaRule|Lightning|LinearAttn|RgLru|Rglru|RecurrentBlock|xLSTM|mLSTM|sLSTM|Retention"
)
_SOFTMAX_ATTENTION = {"attention_interface", "scaled_dot_product_attention", "multi_head_attention_forward"}
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "product"}
_ACTIVATIONS = {"GELU": "gelu"}
_ATTENTION_ARGUMENTS = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids"}
_STATES = {  # arguments of a cross-attention
    "keys", "values", "key", "value", "k", "v", "encoder_hidden_states", "cross_attention_states", "key_value_states",
    "context",
}  # fmt: skip
_DENSE_ARGUMENTS = {  # a window is in the mask
    "dropout", "scaling", "sliding_window", "is_causal", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "position_bias",
}  # fmt: skip


class Kind(str, Enum):
    """OP: an op computes the module. PARTS: its own code only connects its parts. MISSING: no op is of its family."""

    OP = "op"
    PARTS = "parts"
    MISSING = "missing"


@dataclass(frozen=True)
class Match:
    """The match of one module.

    op         the op's name; '' for parts and for what is missing
    arguments  scalar arguments of the op that the probe found, such as the scoring of a router
    target     the listed class that it equals, if one is listed
    needs      what no op computes: a primitive, or the difference from the op
    """

    kind: Kind
    op: str = ""
    by_class: bool = True
    by_signature: bool = True
    by_probe: bool = True
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    target: Target | None = None
    needs: str = ""

    @property
    def strict(self) -> bool:
        return self.kind is not Kind.MISSING and self.by_class and self.by_signature and self.by_probe

    @property
    def loose(self) -> bool:
        return self.kind is not Kind.MISSING and self.by_class


PARTS = Match(Kind.PARTS)
_known: dict[Any, Match] = {}
_configs: dict[int, Any] = {}  # those in keys of _known: an id is unique while the object lives


def match(module: nn.Module) -> Match:
    """The match of one module, without its children. The module may be on the meta device.

    Results are kept by class and shape of use, so that each distinct class is probed once in a process.
    """
    key = (type(module), _use(module))
    if key not in _known:
        _known[key] = _match(module)
    return _known[key]


def _use(module: nn.Module) -> Any:
    """The own use of a module and its config, which decide what its class computes."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return type(module)
    config = getattr(module, "config", None)
    _configs[id(config)] = config
    return own_use(module), id(config)


def own_use(module: nn.Module) -> Any:
    """The class of a module and its attributes that decide what it computes: numbers, strings, flags and parts."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return type(module)
    own = tuple(sorted((k, repr(v)) for k, v in vars(module).items() if _is_plain(v) and k != "layer_idx"))
    return type(module), own, tuple(name for name, _ in module.named_children())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (bool, str, int, float)) for item in value)
    return isinstance(value, (bool, str, int, float, type(None), tuple))


def missing(primitive: str) -> Match:
    return Match(Kind.MISSING, "", False, False, False, needs=primitive)


def _match(module: nn.Module) -> Match:
    cls = type(module)
    for rule in (_listed, _torch_module, _named, _embedding, _rotary, _experts, _router, _norm, _attention):
        found = rule(module)
        if found is not None:
            return found
    return _parts(module) if cls.__module__.startswith(READ) else PARTS


def _parts(module: nn.Module) -> Match:
    """A module whose own code is read: it connects its parts, or it computes something."""
    names = calls(module)
    for name in sorted(names):
        if name in PRIMITIVES:
            return missing(PRIMITIVES[name])
    for name in sorted(names & set(_RESEMBLE)):
        return Match(
            Kind.OP, _RESEMBLE[name][0], by_signature=False, by_probe=False, needs=_RESEMBLE[name][1]
        )
    own = (
        next(module.parameters(recurse=False), None) is not None
    )  # a length regulator or optimal transport has none
    if own and {"cumsum", "exp"} <= names and names & _PRODUCTS and "logsumexp" not in names:
        return _recurrence(module)
    if names & (_PRODUCTS - {"product"}):
        if any(isinstance(child, nn.Softmax) for child in module.children()):
            return _inside(module) or Match(
                Kind.OP, "attention_dense", True, False, False, needs="an attention function of its own"
            )
        return Match(Kind.OP, "batched_matmul")  # matmul, bmm and einsum of two tensors are this product
    for name in sorted(names & set(FUNCTIONS)):
        return Match(Kind.OP, FUNCTIONS[name])
    return PARTS


def _listed(module: nn.Module) -> Match | None:
    """A class that an op replaces, or whose forward computes the same."""
    found = None if isinstance(module, _CONVOLUTIONS) else target_of(module)  # see _convolution
    if found is None:
        return None
    op, target = found
    ours = registry.target_class(target)
    supports = getattr(ours, "supports", None)
    reason = supports(module) if supports is not None else None
    same = _call(type(module)) == _call(ours)
    probe = reason is None and probes.safely(probes.target_probe, module, ours)
    if not probe and op == "layer_norm" and _normalizes_last(module):
        probe = probes.safely(lambda: probes.norm_op(module) == op)
    if not probe and op == "group_norm":
        probe = probes.safely(probes.group_norm_probe, module)
    return Match(Kind.OP, op, True, same, probe, dict(target.computes), target, needs=reason or "")


def _normalizes_last(module: nn.Module) -> bool:
    return len(getattr(module, "normalized_shape", (0,))) == 1


def _call(cls: type) -> tuple[Any, ...]:
    """The order, kinds and defaults of the parameters of a class's call; names differ between equal classes."""
    function: Any = cls.forward  # type: ignore[attr-defined]
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return tuple((p.kind, p.default) for p in parameters)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _torch_module(module: Any) -> Match | None:
    if _is_linear(module):
        return Match(Kind.OP, "linear", by_probe=_once(probes.linear_probe, module))
    if isinstance(module, _CONVOLUTIONS):
        return _convolution(module)
    for op, classes, computes in MODULES:
        if isinstance(module, classes):
            torchs: Any = next(cls for cls in classes if isinstance(module, cls))
            same = getattr(type(module), "forward", None) is torchs.forward and probes.safely(
                computes, module
            )
            return Match(Kind.OP, op, by_probe=same, needs="" if same else f"a subclass of {torchs.__name__}")
    if type(module) is nn.LSTM and probes.safely(lstm_probe, module):
        return Match(Kind.OP, "lstm")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return missing("recurrence")
    if isinstance(module, nn.Bilinear):
        return missing("bilinear")
    if isinstance(module, _WHOLE_POOLS):
        if _sizes(module.output_size) == {1}:
            return PARTS
        return Match(Kind.OP, "pool", by_signature=False, by_probe=False, needs="windows of several sizes")
    if isinstance(module, nn.MultiheadAttention):
        return _inside(module) or Match(
            Kind.OP, "attention", True, False, False, needs="torch's MultiheadAttention"
        )
    if type(module).__module__.startswith("torch.nn") and type(module).__name__ in _ACTIVATIONS:
        op, tanh = (
            _ACTIVATIONS[type(module).__name__],
            {"approximate": getattr(module, "approximate", "none")},
        )
        probe = probes.safely(lambda: probes.activation_probe(module, op, **tanh))
        return Match(Kind.OP, op, by_probe=probe, arguments=tanh)
    return None


def _convolution(module: Any) -> Match:
    """A convolution whose windows do not overlap is `linear` on patches; any other, `convolution`."""
    cls: Any = type(module)
    plain = cls.forward in {c.forward for c in _CONVOLUTIONS}
    patches = module.kernel_size == module.stride or set(module.kernel_size) == {1} == set(module.stride)
    whole = set(module.dilation) == {1} and module.groups == 1 and module.padding in (
        "valid", tuple(0 for _ in module.kernel_size)
    )  # fmt: skip
    if patches and whole and not module.transposed and probes.safely(probes.patches_probe, module):
        return Match(Kind.OP, "linear")
    if not plain and (own := calls(module)) & set(PRIMITIVES):
        return missing(PRIMITIVES[min(own & set(PRIMITIVES))])
    sizes = tuple(
        min(d * (k - 1) + 1, 64) + s
        for d, k, s in zip(module.dilation, module.kernel_size, module.stride, strict=True)
    )
    probe = probes.safely(probes.convolution_probe, module, sizes)
    return Match(Kind.OP, "convolution", by_probe=probe, arguments={"transposed": module.transposed})


def _sizes(size: Any) -> set[Any]:
    return set(size) if isinstance(size, tuple) else {size}


@cache
def _once_of_class(probe: Callable[..., bool], cls: type, bias: bool) -> bool:
    made: Any = cls(6, 8) if cls.__name__ == "Conv1D" else nn.Linear(8, 6, bias=bias)
    made.__class__ = cls
    return probes.safely(probe, made)


def _once(probe: Callable[..., bool], module: nn.Module) -> bool:
    return _once_of_class(probe, type(module), getattr(module, "bias", None) is not None)  # type: ignore[arg-type]


def _named(module: nn.Module) -> Match | None:
    name = type(module).__name__
    if name.endswith("Indexer"):
        return Match(Kind.OP, "paged_mqa_logits", True, False, False, needs="index of sparse attention")
    own = name.endswith(("Mixer", "Attention", "Cell", "Lru", "Rglru", "Net", "Rule"))
    own = own and any(True for _ in module.parameters())
    if (own or name.endswith("Backend")) and _RECURRENT.search(name):
        return _recurrence(module)
    return None


def _recurrence(module: nn.Module) -> Match:
    """By class only: the function that the module calls for its recurrence computes what the op does."""
    op = recurrence_op(module)
    if op:
        return Match(Kind.OP, op, True, False, False, needs="a recurrence inside its module")
    return missing("recurrence")


def _embedding(module: nn.Module) -> Match | None:
    if not isinstance(module, nn.Embedding):
        return missing("sum of embeddings") if isinstance(module, nn.EmbeddingBag) else None
    if type(module).forward is nn.Embedding.forward or probes.safely(probes.embedding_probe, module):
        return Match(Kind.OP, "embedding")
    own = calls(module)
    if own & {"super", "embedding"} and not own & (set(PRIMITIVES) | _PRODUCTS):
        return Match(Kind.OP, "embedding")  # the lookup is torch's, its positions are computed here
    return Match(Kind.OP, "embedding", by_signature=False, by_probe=False, needs="a lookup of its own")


def _rotary(module: nn.Module) -> Match | None:
    """Cosines and sines of positions, with the function of the same file that rotates queries and keys."""
    name = type(module).__name__
    if ("Rotary" not in name and not name.endswith("RoPE")) or any(True for _ in module.parameters()):
        return None
    if hasattr(module, "mrope_section") or "mrope" in str(getattr(module, "rope_type", "")):
        return _angles(module, "positions in several sections")
    if "position_ids" not in inspect.signature(type(module).forward).parameters:
        return _angles(module, "angles of positions in two dimensions")
    config = getattr(module, "config", None)
    kinds = getattr(module, "layer_types", None) or [None]
    apply = _rotation(type(module))
    if apply is None or config is None:
        return _angles(module, "a rotation of its own")
    with torch.device("cpu"):
        made = _built(type(module), config)

    def call(kind: Any) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda m, x, at: m(x, at) if kind is None else m(x, at, kind)

    probe = made is not None and all(probes.safely(probes.rope_probe, made, apply, call(k)) for k in kinds)
    return Match(Kind.OP, "rotary_emb") if probe else _angles(module, "angles or a rotation of its own")


def _angles(module: nn.Module, needs: str) -> Match:
    """Angles of each token, however positions give them: the op reads them from a table with a row for each token.

    Every function of the file that rotates by such angles must do it as the op.
    """
    space = vars(sys.modules[type(module).__module__])
    vision = "Vision" in type(module).__name__
    found = [f for n, f in space.items() if n.startswith("apply_") and ("rot" in n or "rope" in n)]
    own = [f for f in found if ("vision" in f.__name__) == vision] or found
    elementwise = not calls(module) & (set(PRIMITIVES) | {"softmax", "bmm"})
    same = bool(own) and elementwise and all(probes.safely(probes.rotation_probe, f) for f in own)
    return Match(Kind.OP, "rotary_emb", True, same, same, needs="" if same else needs)


def _built(cls: type, config: Any) -> Any:
    try:
        return cls(config)
    except Exception:  # a constructor of the host that takes other arguments
        return None


def _rotation(cls: type) -> Callable[..., Any] | None:
    """The function of the class's file that applies cosines and sines to queries and keys."""
    space = vars(sys.modules[cls.__module__])
    names = [n for n in space if n.startswith("apply_") and ("rot" in n) and "vision" not in n]
    return space[min(names, key=len)] if names else None


def _experts(module: nn.Module) -> Match | None:
    held = dict(module.named_parameters(recurse=False))
    if not type(module).__name__.endswith("Experts") and "gate_up_proj" not in held:
        return None
    if "top_k_index" not in inspect.signature(inspect.unwrap(type(module).forward)).parameters:
        if not held:
            return None  # a list of MLPs
        return Match(Kind.OP, "fused_experts", True, False, False, needs="experts called in another way")
    probe = probes.safely(probes.experts_probe, module)
    return Match(
        Kind.OP,
        "fused_experts",
        by_probe=probe,
        needs="" if probe else "experts of another activation or form",
    )


def _router(module: nn.Module) -> Match | None:
    name, own = type(module).__name__, calls(module)
    if "topk" not in own or not own & {"softmax", "sigmoid"}:
        return None
    if "Router" not in name and "Gate" not in name and "Gating" not in name:
        return _block(own)
    op = ""
    arguments: dict[str, Any] = {}

    def probe() -> bool:
        nonlocal op, arguments
        op, arguments = probes.router_op(module)
        return bool(op)

    if probes.safely(probe):
        return Match(Kind.OP, op, arguments=arguments)
    return Match(Kind.OP, "topk_softmax", True, True, False, needs="a router that scores in another way")


def _block(own: frozenset[str]) -> Match | None:
    """A block of experts that routes in its own forward."""
    if not own & {"one_hot", "index_add_", "scatter"} or own & _SOFTMAX_ATTENTION:
        return None
    return Match(Kind.OP, "topk_softmax", True, False, False, needs="a router inside its block")


def _norm(module: nn.Module) -> Match | None:
    name = type(module).__name__
    if not (
        name.endswith(("Norm", "Norm1P", "NormGated", "LayerNorm1p")) or isinstance(module, nn.LayerNorm)
    ):
        return None
    if list(module.children()):
        return None
    op = ""

    def probe() -> bool:
        nonlocal op
        op = probes.norm_op(module)
        return bool(op)

    if probes.safely(probe):
        return Match(Kind.OP, op)
    if probes.safely(lambda: bool(probes.scaled_norm(module))):
        return Match(Kind.OP, "layer_norm")
    if name == "_WeightNorm" or probes.safely(probes.scales_alone, module):
        return PARTS  # of weights, once; a product and a sum
    family = "layer_norm" if isinstance(module, nn.LayerNorm) or "Layer" in name else "rms_norm"
    if "Group" in name or "Batch" in name or "Instance" in name:
        op = "batch_norm" if "Batch" in name else "group_norm"
        return Match(Kind.OP, op, True, False, False, needs="a norm of another form")
    return Match(Kind.OP, family, True, False, False, needs="a norm of another form")


def _attention(module: nn.Module) -> Match | None:
    """Softmax attention with one head size: causal with at most a window and a soft cap, or of any mask or bias."""
    own = calls(module)
    if list(own & set(PRIMITIVES)):
        return None
    interface = "attention_interface" in own
    if any(isinstance(child, nn.Softmax) for child in module.children()):
        own |= {"softmax"}
    if not interface and not own & _SOFTMAX_ATTENTION and not ("softmax" in own and own & _PRODUCTS):
        name = type(module).__name__
        if name.endswith(("Attention", "SelfAttn", "Attn")) and own & _PRODUCTS:
            return (
                missing("attention without softmax")
                if not list(module.children()) or own & {"einsum"}
                else None
            )
        return None
    causal = getattr(module, "is_causal", None) is True
    for op in ("attention", "attention_dense") if causal else ("attention_dense",):
        why = _difference(module, op) if interface else "an attention function of its own"
        if not why:
            return Match(Kind.OP, op)
    return _inside(module) or Match(Kind.OP, op, True, False, False, needs=why)


def _inside(module: nn.Module) -> Match | None:
    """Attention that the module's code writes out: the op in its place computes the same."""
    found = probes.safely(lambda: attention_graph.computes_attention(module)[0])
    return Match(Kind.OP, "attention_dense") if found else None


def _difference(module: Any, op: str) -> str:
    """How the module's attention differs from the op; '' if it does not."""
    recorded = attention_call(module)
    if recorded is None:
        return "attention that cannot be called alone"
    query, key, value, given = recorded
    if query.shape[-1] != key.shape[-1] or key.shape[-1] != value.shape[-1]:
        return "heads of other sizes for values than for keys"
    if query.shape[1] % key.shape[1]:
        return "heads that do not divide"
    known = _ATTENTION_ARGUMENTS if op == "attention" else _DENSE_ARGUMENTS
    extra = [k for k, v in given.items() if k not in known and v is not None and v is not False]
    if extra:
        return f"attention with {', '.join(sorted(extra))}"
    space = vars(sys.modules[type(module).__module__])
    eager = next((f for name, f in space.items() if name.endswith("eager_attention_forward")), None)
    softcap, window = given.get("softcap"), given.get("sliding_window")
    grouped = query.shape[1] != key.shape[1]
    if op == "attention":
        same = eager is not None and probes.safely(probes.attention_probe, eager, softcap, window, grouped)
    else:
        same = eager is not None and probes.safely(
            probes.dense_attention_probe, eager, grouped, given.get("position_bias") is not None
        )
    if not same:
        return "an attention function of its own"
    return ""


def attention_call(module: Any) -> Any:
    """(query, key, value, keyword arguments) of the module's attention on the meta device; None: it cannot run."""
    arguments = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    linear: Any = next((c for c in module.modules() if _is_linear(c)), None)
    config = getattr(module, "config", None)
    if linear is None or config is None:
        return None
    inner = linear.weight.shape[0 if type(linear).__name__ == "Conv1D" else 1]
    width = getattr(config, "hidden_size", inner)
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None) or 64
    rotated = [size, int(size * (getattr(config, "partial_rotary_factor", None) or 0.5)), size // 2]
    rotated += [v for v in (getattr(config, n, None) for n in ("qk_rope_head_dim", "rotary_dim")) if v]
    for batch, columns, rotation in dict.fromkeys(product(((1,), ()), (width, inner), rotated)):
        hidden = torch.empty(*batch, 4, columns, device="meta", dtype=linear.weight.dtype)
        turn = torch.empty(*batch, 4, rotation, device="meta", dtype=hidden.dtype)
        given: dict[str, Any] = {}
        for name, parameter in list(arguments.items())[1:]:
            if name == "position_embeddings":
                given[name] = (turn, turn)
            elif name in ("position_ids", "cache_position"):
                given[name] = torch.zeros(1, 4, dtype=torch.long, device="meta")
            elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            elif not given:
                given[name] = hidden
            elif parameter.default is parameter.empty:
                given[name] = hidden if name in _STATES else None
        try:
            with torch.no_grad(), probes.recorded_attention(module) as found:
                module.eval()(**given)
        except Exception:  # the host's forward, called with our idea of its arguments
            found = []
        if found:
            return found[0]
    return None
