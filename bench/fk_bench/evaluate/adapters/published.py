"""The layout of the published FastKernels benchmark: L<level>/TARGET.py, a module class per file, sources next to it.

`published.tsv` lists all targets of its board, with our op or the reason why there is none. Each function below turns
a class into the function of an op: it builds the module once per set of sizes and gives it the call's weights.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastkernels.overrides.recurrence.packed import begin
from fk_bench.evaluate.adapters.foreign_files import Adapted, Unadapted, parsed
from fk_bench.evaluate.adapters.loading import import_from, shown
from fk_bench.evaluate.adapters.native import cuda_ext

LAYOUT = "published"
PARENTS = ("tasks", "candidate")  # packages around L1, L2, L3, which relative imports count
NATIVE = (".cu", ".cuh", ".cpp", ".h", ".hpp")
_PACKAGE = "fastkernels."
_PROVIDED = ("fastkernels.infra", "fastkernels.infra.cuda_ext")
_LEVEL = re.compile(r"L[1-4]")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """A target of the published board. `op` is ours, or '' with the reason why none corresponds to it."""

    level: int
    name: str
    cls: str
    op: str
    reason: str


@cache
def targets() -> dict[tuple[int, str], Target]:
    """{(level, name): target} of the published board."""
    with open(Path(__file__).with_suffix(".tsv"), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {
        (int(r["level"]), r["target"]): Target(int(r["level"]), r["target"], r["class"], r["op"], r["reason"])
        for r in rows
    }


# -- reading a set


def recognizes(folder: Path) -> bool:
    """Whether the folder has the subfolders L1, L2, ..."""
    return any(_LEVEL.fullmatch(p.name) for p in folder.iterdir() if p.is_dir())


def adapted(folder: Path) -> Iterator[tuple[Path, Adapted | Unadapted]]:
    """Each file of the set, with what stands for it here, or why nothing does."""
    for level in sorted(p for p in folder.iterdir() if p.is_dir() and _LEVEL.fullmatch(p.name)):
        for file in sorted(level.glob("*.py")):
            if not file.name.startswith("_"):
                try:
                    yield file, _adapt(folder, file)
                except Unadapted as reason:
                    yield file, reason


def _adapt(folder: Path, file: Path) -> Adapted:
    level = int(file.parent.name[1:])
    target = targets().get((level, file.stem))
    if target is None:
        raise Unadapted(f"L{level}/{file.stem} is no target of the published board")
    if not target.op:
        raise Unadapted(target.reason)
    if target.cls not in _classes(parsed(file)):
        raise Unadapted(f"defines no class {target.cls}")
    files = _needed(folder, file)
    return Adapted(target.op, files, {"module": f"L{level}.{file.stem}", "cls": target.cls})


def _classes(tree: ast.Module) -> set[str]:
    """Names of classes at the top level, those included that are assigned: `GELU = ModelNew`."""
    found = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def _needed(folder: Path, file: Path) -> dict[str, Path]:
    """The file, the set's other files that it imports, and the native sources that they name."""
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        here = waiting.pop(0)
        if str(here.relative_to(folder)) in found:
            continue
        found[str(here.relative_to(folder))] = here
        if here.suffix != ".py":
            waiting += _included(here)
            continue
        tree = parsed(here)
        waiting += _imported(folder, here, tree)
        waiting += _native(here, tree)
    return found


def _imported(folder: Path, file: Path, tree: ast.Module) -> Iterator[Path]:
    package = f"fastkernels.tasks.candidate.{file.parent.name}".split(".")
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*package[: len(package) - node.level + 1], *([module] if module else [])])
            names = [module]
        for name in names:
            if not name.startswith(_PACKAGE) or name in _PROVIDED:
                continue
            parts = name.removeprefix("fastkernels.tasks.candidate.").split(".")
            own = folder.joinpath(*parts).with_suffix(".py")
            if not name.startswith("fastkernels.tasks.candidate.") or not own.is_file():
                raise Unadapted(f"imports {name}, which is not in the set")
            yield own


def _native(file: Path, tree: ast.Module) -> Iterator[Path]:
    """Sources whose names the file's calls contain: load_op("name", "file.cu")."""
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        for node in ast.walk(call) if name in ("load_op", "lazy_op", "load") else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(NATIVE):
                source = file.parent / node.value
                if not source.is_file():
                    raise Unadapted(f"needs {node.value}, which is not in the set")
                yield source


def _included(source: Path) -> Iterator[Path]:
    text = source.read_text(encoding="utf-8", errors="replace")
    return (p for name in _INCLUDE.findall(text) if (p := source.parent / name).is_file())


# -- in the candidate's process


def bind(folder: Path, op: str, module: str, cls: str) -> Callable[..., Any]:
    """The op's function on a class of the set. The author's code runs."""
    ext, infra = cuda_ext(), ModuleType("fastkernels.infra")
    infra.cuda_ext = ext  # type: ignore[attr-defined]
    provided = {
        "fastkernels__infra": infra, "__infra": infra, "fastkernels__infra__cuda_ext": ext, "__infra__cuda_ext": ext,
    }  # fmt: skip
    found = import_from(folder, module, PARENTS, **provided)
    return FUNCTIONS[op](Modules(getattr(found, cls)))


class Modules:
    """Modules of one class, built once per constructor's arguments and device."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._made: dict[Any, Any] = {}

    def __call__(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        key = (device, args, tuple(kwargs.items()))
        if key not in self._made:
            with torch.device(device):
                self._made[key] = self.cls(*args, **kwargs).eval()
        return self._made[key]

    def fresh(self, device: Any) -> Any:
        """A new module: those of the published benchmark may return buffers that their next call uses."""
        with torch.device(device):
            return self.cls()


def give(module: Any, **tensors: Any) -> Any:
    """Let the module use these as its parameters and buffers, wherever in it they are named so."""
    for part in module.modules():
        for name, tensor in tensors.items():
            if name in part._buffers:
                part._buffers[name] = tensor
            known = part._parameters.get(name)
            if known is not None and not _same(known, tensor):
                # In place, as `.to(dtype)` does it: a class may keep the object under another name.
                known.requires_grad_(False).data = tensor
            elif name in part._parameters and known is None:
                part._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
    return module


def _same(known: Any, tensor: Any) -> bool:
    """Whether both are the same memory, seen in the same way."""
    return (
        known is not None
        and known.data_ptr() == tensor.data_ptr()
        and (known.shape, known.stride(), known.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    )


ABSENT = "the author's kernel has no"  # how the message about an option begins


def refuse(**values: Any) -> None:
    """Raise NotImplementedError for an argument that the author's class or function does not have."""
    for name, value in values.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{ABSENT} {name} (here {shown(value)})")


def need(**values: Any) -> None:
    """Raise NotImplementedError for an argument that this call lacks and the author's kernel needs."""
    if lacking := [name for name, value in values.items() if value is None]:
        raise NotImplementedError(f"{ABSENT} calls without {lacking[0]}")


def _in_place(target: Any, result: Any) -> None:
    """Copy a result to where the op's contract wants it, unless it is there already."""
    result = result.view(target.shape)
    steps = zip(result.stride(), target.stride(), target.shape, strict=True)
    if result.data_ptr() != target.data_ptr() or any(a != b for a, b, size in steps if size > 1):
        target.copy_(result)


def _rms_norm(make: Modules) -> Callable[..., Any]:
    def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
        refuse(var_hidden_size=var_hidden_size)
        module = make(x.device, x.shape[-1], eps, weight is not None)
        if weight is not None:
            give(module, weight=weight)
        if residual is None:
            return module(x)
        out, total = module(x.clone(), residual)  # the published class writes its result into x
        _in_place(residual, total)
        return out

    return rms_norm


def _gemma_rms_norm(make: Modules) -> Callable[..., Any]:
    def gemma_rms_norm(x, weight, eps, residual=None):
        module = give(make(x.device, x.shape[-1], eps), weight=weight)
        if residual is None:
            return module(x)
        out, total = module(x.clone(), residual)
        _in_place(residual, total)
        return out

    return gemma_rms_norm


def _layer_norm(make: Modules) -> Callable[..., Any]:
    def layer_norm(x, weight, bias, eps):
        affine = weight is not None or bias is not None
        module = make(x.device, x.shape[-1], eps, affine, weight is not None, bias is not None)
        given = {n: t for n, t in (("weight", weight), ("bias", bias)) if t is not None}
        return give(module, **given)(x)

    return layer_norm


def _t5_layer_norm(make: Modules) -> Callable[..., Any]:
    return lambda x, weight, eps: give(make(x.device, x.shape[-1], eps), weight=weight)(x)


def _rms_norm_gated(make: Modules) -> Callable[..., Any]:
    def rms_norm_gated(
        x, weight, gate, eps, group_size=None, norm_before_gate=True, activation="silu",
        cast_x_before_out_mul=False,
    ):  # fmt: skip
        refuse(group_size=group_size if group_size != x.shape[-1] else None)
        if weight is None or gate is None:
            raise NotImplementedError("the published class needs a weight and a gate")
        return give(make(x.device, x.shape[-1], eps, norm_before_gate, activation), weight=weight)(x, gate)

    return rms_norm_gated


def _silu_and_mul(make: Modules) -> Callable[..., Any]:
    return lambda x: make(x.device)(x)


def _gelu(make: Modules) -> Callable[..., Any]:
    def gelu(x, approximate="none"):
        return make(x.device, approximate)(x)

    return gelu


def _batched_matmul(make: Modules) -> Callable[..., Any]:
    return lambda a, b: make(a.device)(a, b)


def _linear(make: Modules) -> Callable[..., Any]:
    def linear(x, weight, bias=None):
        return make(x.device)(x, weight, bias)

    return linear


def _embedding(make: Modules) -> Callable[..., Any]:
    def embedding(input_ids, weight, org_start=0, org_end=-1, num_org_padding=0, added_start=0, added_end=0):
        refuse(range=org_end >= 0)
        return give(make(weight.device, *weight.shape), weight=weight)(input_ids)

    return embedding


def _numbers(*values: Any) -> list[Any]:
    """Sizes of two dimensions; one number where both are equal, as the published models write them."""
    return [v[0] if len(set(v)) == 1 else tuple(v) for v in values]


def _convolution(make: Modules) -> Callable[..., Any]:
    def convolution(
        x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1, transposed=False,
        output_padding=(0,),
    ):  # fmt: skip
        refuse(transposed=transposed, dimensions=None if x.dim() == 4 else x.dim() - 2)
        size, *numbers = _numbers(weight.shape[2:], stride, padding, dilation)
        module = make(
            x.device, x.shape[1], weight.shape[0], size, stride=numbers[0], padding=numbers[1], groups=groups,
            dilation=numbers[2], bias=bias is not None,
        )  # fmt: skip
        return give(module, weight=weight, **({"bias": bias} if bias is not None else {}))(x)

    return convolution


def _pool(make: Modules) -> Callable[..., Any]:
    def pool(x, window, stride=(), padding=(0,), maximum=False, ceil_mode=False, count_include_pad=True):
        refuse(mean=not maximum, dimensions=None if x.dim() == 4 else x.dim() - 2)
        return make(x.device, *_numbers(window, stride or window, padding), ceil_mode)(x)

    return pool


def _interpolate(make: Modules) -> Callable[..., Any]:
    names = {
        ("linear", 1): "linear",
        ("linear", 2): "bilinear",
        ("linear", 3): "trilinear",
        ("cubic", 2): "bicubic",
    }

    def interpolate(x, size, mode="nearest", align_corners=False, scales=()):
        refuse(scales=tuple(scales) or None)
        corners = None if mode == "nearest" else align_corners
        factors = {new / old for new, old in zip(size, x.shape[2:], strict=True)}
        # The published models give a factor where there is one.
        wanted = {"scale_factor": factors.pop()} if len(factors) == 1 else {"size": tuple(size)}
        return make(x.device)(x, mode=names.get((mode, x.dim() - 2), mode), align_corners=corners, **wanted)

    return interpolate


def _rope_nd(make: Modules) -> Callable[..., Any]:
    def rope_nd(x, cos, sin, halves):
        pairs = cos.shape[-1] // 2
        first = slice(None, pairs) if halves else slice(None, None, 2)
        refuse(tokens_without_rotation=x.shape[1] - cos.shape[0] or None)
        return make(x.device, halves)(x, cos[:, first].contiguous(), sin[:, first].contiguous())

    return rope_nd


def _rope_axes(make: Modules) -> Callable[..., Any]:
    def rope_axes(ids, dims, theta):
        cos, sin = make(ids.device, theta, tuple(dims))(ids)
        if cos.shape[-1] * 2 == sum(dims):  # one value per pair of channels; the op has one per channel
            cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
        return cos.float(), sin.float()

    return rope_axes


def _rotary_emb(make: Modules) -> Callable[..., Any]:
    def rotary_emb(
        positions, query, key, head_size, cos_sin_cache, is_neox_style, cast_cache=True, round_products=False
    ):
        need(key=key)
        refuse(partial_rotation=cos_sin_cache.shape[-1] != head_size)
        module = give(
            make(query.device, head_size, 1, 10000.0, is_neox_style=is_neox_style),
            cos_sin_cache=cos_sin_cache,
        )
        new_query, new_key = module(positions, query, key)
        _in_place(query, new_query)
        _in_place(key, new_key)

    return rotary_emb


def _store_kvcache(make: Modules) -> Callable[..., Any]:
    def store_kvcache(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
        refuse(scales=(k_scale, v_scale) if (k_scale, v_scale) != (1.0, 1.0) else None)
        make(key.device)(key, value, key_cache, value_cache, slot_mapping)

    return store_kvcache


def _concat_and_cache_mla(make: Modules) -> Callable[..., Any]:
    def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, scale=1.0):
        kind = "auto" if kv_cache.dtype == kv_c.dtype else "fp8_e4m3"
        module = make(kv_c.device, kind)
        if scale != 1.0:
            give(module, _k_scale=kv_c.new_full((1,), scale, dtype=torch.float32))
        module(kv_c, k_pe, kv_cache, slot_mapping)

    return concat_and_cache_mla


def _merge_state(make: Modules) -> Callable[..., Any]:
    def merge_state(
        prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse=None,
        tokens_with_context=None, output_scale=None,
    ):  # fmt: skip
        refuse(tokens_with_context=tokens_with_context, output_scale=output_scale)
        # The published class has log-sum-exps as [heads, tokens].
        lse = None if output_lse is None else output_lse.t().contiguous()
        make(output.device)(
            output,
            prefix_output,
            prefix_lse.t().contiguous(),
            suffix_output,
            suffix_lse.t().contiguous(),
            lse,
        )
        if output_lse is not None and lse is not None:
            output_lse.copy_(lse.t())

    return merge_state


def _moe_align(make: Modules) -> Callable[..., Any]:
    def moe_align(
        topk_ids, block_size, num_experts, max_num_tokens_padded, expert_map=None, invalid_first=False
    ):
        refuse(expert_map=expert_map, invalid_first=invalid_first)
        ids, experts, count = make.fresh(topk_ids.device)(topk_ids, block_size, num_experts)
        blocks = -(-max_num_tokens_padded // block_size)
        if ids.shape[0] < max_num_tokens_padded or experts.shape[0] < blocks:
            raise NotImplementedError(
                f"the published class returns {ids.shape[0]} of {max_num_tokens_padded} entries"
            )
        return ids[:max_num_tokens_padded], experts[:blocks], count

    return moe_align


def _moe_sum(make: Modules) -> Callable[..., Any]:
    def moe_sum(input, output, topk_weights=None, topk_ids=None, expert_map=None, routed_scaling_factor=1.0):
        refuse(topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map)
        refuse(routed_scaling_factor=None if routed_scaling_factor == 1.0 else routed_scaling_factor)
        rows = input.reshape(-1, input.shape[-1])
        _in_place(output, make.fresh(input.device)(rows, input.shape[1]))

    return moe_sum


def _topk_softmax(make: Modules) -> Callable[..., Any]:
    def topk_softmax(gating_output, topk, renormalize=False, scales=None):
        refuse(scales=scales)
        weights, ids = make.fresh(gating_output.device)(gating_output, topk, renormalize)
        rows = gating_output.shape[0]
        # vLLM's index of a (token, choice) pair, which the published class does not return
        pairs = torch.arange(rows * topk, device=ids.device, dtype=torch.int32).view(topk, rows).t()
        return weights.contiguous(), ids.contiguous(), pairs.contiguous()

    return topk_softmax


def _attention_dense(make: Modules) -> Callable[..., Any]:
    def attention_dense(
        q, k, v, scale, attn_mask=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0
    ):
        refuse(cu_seqlens=cu_seqlens_q is not None)
        return make(q.device)(q, k, v, softmax_scale=scale, attn_mask=attn_mask)

    return attention_dense


def _fused_experts(make: Modules) -> Callable[..., Any]:
    def fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, expert_map=None, apply_router_weight_on_input=False
    ):
        refuse(expert_map=expert_map, apply_router_weight_on_input=apply_router_weight_on_input)
        return make.fresh(hidden_states.device)(hidden_states, w1, w2, topk_weights, topk_ids, w1.shape[0])

    return fused_experts


def _timestep_embedding(make: Modules) -> Callable[..., Any]:
    def timestep_embedding(
        timesteps, embedding_dim, flip_sin_to_cos=False, downscale_freq_shift=1.0, scale=1.0, max_period=10000
    ):
        refuse(max_period=None if max_period == 10000 else max_period)
        module = make(timesteps.device, embedding_dim, flip_sin_to_cos, downscale_freq_shift, scale)
        return module(timesteps)

    return timestep_embedding


def _gated_linear_attention(make: Modules) -> Callable[..., Any]:
    def gated_linear_attention(q, k, v, g, state, cu_seqlens, slots, fresh, scale=1.0):
        # The published class has a gate for each channel, a batch of one packed row, and returns the states.
        gate = g if g.dim() == 3 else (g.expand(len(v), -1) if g.dim() == 1 else g)[..., None].expand_as(k)
        packed = (t.contiguous()[None] for t in (q, k, v, gate))
        first = begin(state, slots, fresh, state.dtype)
        if cu_seqlens is None:
            cu_seqlens = torch.arange(len(slots) + 1, device=q.device)
        out, last = make(q.device)(
            *packed, scale=scale, initial_state=first, output_final_state=True, cu_seqlens=cu_seqlens.long()
        )
        # Slot 0 is for padding, and keeps its value.
        kept = (slots > 0).view(-1, *[1] * (state.dim() - 1))
        state.index_copy_(0, slots.long(), torch.where(kept, last.to(state.dtype), state[:1]))
        return out[0].to(v.dtype)

    return gated_linear_attention


FUNCTIONS: Mapping[str, Callable[[Modules], Callable[..., Any]]] = {
    "attention_dense": _attention_dense, "batched_matmul": _batched_matmul,
    "concat_and_cache_mla": _concat_and_cache_mla, "convolution": _convolution, "embedding": _embedding,
    "fused_experts": _fused_experts, "gated_linear_attention": _gated_linear_attention, "gelu": _gelu,
    "gemma_rms_norm": _gemma_rms_norm,
    "interpolate": _interpolate, "layer_norm": _layer_norm, "linear": _linear, "merge_state": _merge_state,
    "moe_align": _moe_align, "moe_sum": _moe_sum, "pool": _pool, "quick_gelu": _silu_and_mul,
    "rms_norm": _rms_norm, "rms_norm_gated": _rms_norm_gated, "rope_axes": _rope_axes, "rope_nd": _rope_nd,
    "rotary_emb": _rotary_emb, "silu_and_mul": _silu_and_mul, "store_kvcache": _store_kvcache,
    "t5_layer_norm": _t5_layer_norm, "timestep_embedding": _timestep_embedding, "topk_softmax": _topk_softmax,
}  # fmt: skip
