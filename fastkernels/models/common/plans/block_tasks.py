"""Tasks for the judge from the blocks of a model: an OpSpec of each, and how its module is built around tensors.

Arguments of a block are the inputs of `forward`, the KV caches and recurrent states, the integers of a step and the
module's parameters. The reference is the same module with the plain PyTorch provider of every op, in the arguments'
dtype.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble, dispatch, registry
from fastkernels.core.forward_context import AttentionMetadata, CrossMetadata, forward_context
from fastkernels.core.shapes import near, varied
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Target, Tensor, Tolerance, fan_in
from fastkernels.core.spec import full as filled
from fastkernels.models.common.descriptions.registry import find
from fastkernels.models.common.layers.cnn import Folded
from fastkernels.models.common.layers.cross import CrossAttention
from fastkernels.models.common.plans.blocks import INPUTS, Block, caches_of, of, of_tower, states_of, text_of
from fastkernels.models.shaped_blocks import BATCH, Shaped, grouped, outputs, per_sample, shaped
from fastkernels.overrides.attention import cases as attention_cases
from fastkernels.overrides.block import cases as layer_cases

HOST = "fastkernels"
SMALL_DTYPE, MODEL_DTYPE = "float32", "bfloat16"
# A layer rounds many times; sums of thousands of products follow each other.
TOLERANCE = {
    "float32": Tolerance(1e-4, 1e-4), "float16": Tolerance(2e-2, 2e-2), "bfloat16": Tolerance(6e-2, 6e-2),
}  # fmt: skip
# Arguments of a step that only layers with a recurrent state read, after those of attention_cases.STEP
STATE_STEP = (
    Tensor("state_slots", "sequences", "int32", bytes="0"),
    Tensor("fresh", "sequences", "bool", bytes="0"),
)
EXPERTS_SPREAD = 32  # best experts of a token whose scores are made distinct


_known: dict[str, Block] = {}


def block(name: str) -> Block:
    """A registered block. Raises UnknownName."""
    if name not in _known:
        raise registry.UnknownName("block", name, _known)
    return _known[name]


def register(text: str) -> tuple[str, ...]:
    """Make the blocks of `text_of` known to the registry; returns their names. Raises Unsupported."""
    found = of(text).blocks
    if any(_known.get(block.name) is not block for block in found):
        _known.update({block.name: block for block in found})
        registry.add(*map(spec, found))
    return tuple(block.name for block in found)


def register_model(config: Any) -> tuple[str, tuple[str, ...]]:
    """(the model's text, the names of its blocks), which the registry then knows. Raises Unsupported."""
    text = text_of(find(config.architectures[0], config).name, config)
    return text, register(text)


def _size(full: int, small: int) -> str:
    """A size as an expression over the axis `small`."""
    return str(full) if full == small else f"{full}+({small - full})*small"


def _shaped_size(full: int | str, small: int | str) -> str:
    """A size of a shaped block, which may grow with the batch."""
    one, other = per_sample(full), per_sample(small)
    if one is None or other is None:
        return _size(int(full), int(small))
    return BATCH if one == other == 1 else f"({_size(one, other)})*{BATCH}"


def _shape(full: Sequence[int], small: Sequence[int]) -> str:
    return " ".join(map(_size, full, small))


def _hidden(block: Block, small: bool) -> int:
    """Channels of the residual stream."""
    if of_tower(block.paths[0]):
        return int(next(block.module(small).parameters()).shape[-1])
    config = block.structure(small).config
    if not find(config.architectures[0]).arch.media:
        config = getattr(config, "vision_config", config)
    return int(getattr(config, "hidden_size", 0) or config.n_embd)


def _stream(block: Block, name: str, small: bool) -> tuple[int, ...]:
    """Channels of an input of `forward`."""
    if INPUTS[name] == "stream":
        return (_hidden(block, small),)
    if INPUTS[name] == "layer_input":
        described: Any = block.made(small).kwargs.get("layer_input") or block.made(small).args[-1]
        return (described.size,)
    if INPUTS[name] == "table" and of_tower(block.paths[0]):
        sizes: list[Any] = [m.head_size for m in block.module(small).modules() if hasattr(m, "head_size")]
        return (sizes[0],)
    if INPUTS[name] == "table":
        return (_hidden(block, small) // block.structure(small).config.num_attention_heads,)
    return ()


def inputs_of(block: Block) -> list[str]:
    """The parameters of `forward` that are given; of a pair, its two."""
    if (entry := shaped(block.module(False))) is not None:
        return list(entry.inputs(block.module(False), False))
    names = [n for n in inspect.signature(block.cls.forward).parameters if n in INPUTS]  # type: ignore[attr-defined]
    module: Any = block.module(False)
    if "layer_input" in names and getattr(module, "layer_input", None) is None:
        names.remove("layer_input")
    if "residual" in names and getattr(module, "layer_scalar", None) is not None:
        names.remove("residual")  # such a layer returns the sum
    return names


def _weight(
    block: Block, name: str, full: torch.Tensor, small: torch.Tensor, experts: tuple[str, str] | None
) -> Tensor:
    """The argument of a parameter. experts: (number of experts, that of a token) as expressions."""
    shape = _shape(full.shape, small.shape)
    given: dict[str, Any] = {"mean": 1.0, "std": 0.1}
    if name.endswith("bias"):
        given = {"std": 0.1}
    elif "embed" in name:
        given = {}
    elif name.rpartition(".")[2] == "A":  # of a recurrence
        given = {"values": _rates}
    elif full.dtype == torch.uint8:  # MXFP4: two numbers in a byte, and scales that make them small
        given = {"values": _scales if name.endswith("scales") else _bytes}
    elif full.dim() > 1:
        given = {"values": fan_in}
    if experts is not None and full.dim() == 3:  # few tokens do not reach all experts
        rest = "*".join(f"({part})" for part in shape.split()[1:])
        given["bytes"] = f"itemsize(dtype)*min({experts[0]},attended*{experts[1]})*{rest}"
    elif "embed" in name and full.dim() == 2:
        given["bytes"] = f"itemsize(dtype)*attended*({shape.split()[1]})"
    dtype = "" if full.dtype == torch.bfloat16 else str(full.dtype).removeprefix("torch.")
    return Tensor(name, shape, dtype, **given)


def _rates(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Below 0, so that states decay."""
    return -(0.5 + call.rand(*shape)).to(dtype)


def _bytes(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=dtype, generator=call.generator, device=call.device)


def _scales(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Exponents of about the root of a matrix's columns."""
    return torch.randint(119, 123, shape, dtype=dtype, generator=call.generator, device=call.device)


def _experts_of(module: nn.Module) -> tuple[int, int] | None:
    """(experts, those of a token) of the module's mixture, if it has one."""
    stacked = next((p for p in module.parameters() if p.dim() == 3), None)
    holders: list[Any] = [h for m in module.modules() for h in (m, getattr(m, "described", None))]
    each = next((h.top_k for h in holders if isinstance(getattr(h, "top_k", None), int)), None)
    return None if stacked is None or each is None else (len(stacked), each)


def spec(block: Block) -> OpSpec:
    """The description of a block as an op of its level; its class is the one that candidates replace."""
    full, small = block.module(False), block.module(True)
    if (entry := shaped(full)) is not None:
        return _shaped_spec(block, entry)
    caches = {path: (m, dict(small.named_modules())[path]) for path, m in caches_of(full).items()}
    names, own = inputs_of(block), dict(small.named_parameters())
    experts = None
    if (many := _experts_of(full)) is not None and (few := _experts_of(small)) is not None:
        experts = _size(many[0], few[0]), _size(many[1], few[1])
    states = [(m, dict(small.named_modules())[path]) for path, m in states_of(full).items()]
    ragged = bool(caches) or bool(states) or _attends(full)
    arguments: list[Tensor | Scalar] = []
    for name in names:
        channels = [_stream(block, name, s) for s in (False, True)]
        shape = f"tokens {_shape(*channels)}".strip()
        dtype = "int64" if INPUTS[name] in ("positions", "ids") else ""
        arguments.append(Tensor(name, shape, dtype, bytes="0" if dtype else ""))
    for i, (m, other) in enumerate(caches.values()):
        sparse = getattr(m, "topk", None) is not None
        shapes = [x.new_cache(1, 1, torch.bfloat16, "meta") for x in (m, other)]
        for j, (a, b) in enumerate(zip(*shapes, strict=True)):
            rest = _shape(a.shape[2:], b.shape[2:])
            each = "*".join(f"({part})" for part in rest.split()) or "1"
            cost = "0" if sparse else f"itemsize(dtype)*{each}*max(keys_read,attended)"
            arguments.append(Tensor(f"cache_{i}_{j}", f"blocks block_size {rest}", mutated=True, bytes=cost))
    for i, (m, other) in enumerate(states):
        for name, (shape, own_dtype) in m.keeps.tensors.items():
            rest = _shape(shape, other.keeps.tensors[name][0])
            dtype = "" if own_dtype is None else str(own_dtype).removeprefix("torch.")
            each = "*".join(f"({part})" for part in rest.split())
            cost = f"{own_dtype.itemsize if own_dtype else 'itemsize(dtype)'}*{each}*(sequences+continued)"
            values = filled(0) if dtype.startswith("int") else None  # token ids
            arguments.append(
                Tensor(
                    f"state_{i}_{name}", f"state_rows {rest}", dtype, mutated=True, values=values, bytes=cost
                )
            )
    if ragged:
        arguments += attention_cases.STEP
    if states:
        arguments += STATE_STEP
    weights = [_weight(block, n, p, own[n], experts) for n, p in full.named_parameters()]
    unread = _unread(full)
    arguments += [replace(w, bytes="0") if w.name in unread else w for w in weights]
    tied = experts is not None
    out = [
        (block.structure(s).config.vocab_size if block.kind == "model" else _hidden(block, s),)
        for s in (False, True)
    ]
    activations = tuple(n for n in names if INPUTS[n] in ("stream", "layer_input"))
    made = OpSpec(
        name=block.name,
        level=block.level,
        reference=lambda *args: _reference(block, list(args)),
        cases=_cases(block, ragged),
        arguments=tuple(arguments),
        outputs=(Tensor("out", f"tokens {_shape(*out)}"),),
        axes=_axes(block, ragged, [m for m, _ in caches.values()], [m for _, m in caches.values()], bool(states)),
        values=lambda call: _values(block, ragged, call),
        flops=_flops(block, caches, [w for w in weights if w.name not in unread], experts),
        vary=lambda case, rng: _vary(made, ragged, case, rng),
        build=lambda cls, args: _build(block, cls, args),
        targets=(_target(block),),
        tolerance=TOLERANCE,
        activations=activations,
        tie_sensitive=tied,
        calls=_ops(full),
        parts=tuple(other.name for other, _ in _inside(block)),
    )  # fmt: skip
    return made


def _shaped_spec(block: Block, entry: Shaped) -> OpSpec:
    """The description of a block whose inputs have the shapes that its class's entry gives."""
    full, small = block.module(False), block.module(True)
    own = dict(small.named_parameters())

    def tensors(pairs: Iterable[tuple[str, tuple[Any, ...], tuple[Any, ...]]]) -> list[Tensor]:
        made = []
        for name, one, other in pairs:
            sizes = " ".join(_shaped_size(a, b) for a, b in zip(one, other, strict=True))
            if name in (*entry.masks, *entry.ones):
                made.append(Tensor(name, sizes, "bool" if name in entry.masks else "", values=_ones))
            else:
                made.append(Tensor(name, sizes))
        return made

    shapes = [entry.inputs(m, s) for m, s in ((full, False), (small, True))]
    inputs = tensors((name, shapes[0][name], shapes[1][name]) for name in shapes[0])
    found = [outputs(m, s) for m, s in ((full, False), (small, True))]
    made = tensors((f"out_{i}", *pair) for i, pair in enumerate(zip(*found, strict=True)))

    def case(name: str, batch: int, small: int, weight: float = 1.0) -> Case:
        dtype, tag = (SMALL_DTYPE, "odd") if small else (MODEL_DTYPE, "model")
        return Case(name, {"batch": batch, "small": small}, dtype, weight, (tag,))

    def vary(case: Case, rng: random.Random) -> Case:
        return varied(case, lambda: {"batch": near(case.dims["batch"], rng)}, task.bytes_moved, task.flops)

    weights = [
        replace(w, values=_kernel) if len(str(w.axes).split()) > 2 else w
        for w in (_weight(block, n, p, own[n], None) for n, p in full.named_parameters())
    ]
    products = [
        "*".join(f"({part})" for part in str(w.axes).split()) for w in weights if len(str(w.axes).split()) > 1
    ]
    task = OpSpec(
        name=block.name,
        level=block.level,
        reference=lambda *args: _reference(block, list(args)),
        cases=(
            case("single", 1, 0, 8), case("batch_4", 4, 0), case("small_one", 1, 1), case("small_3", 3, 1),
        ),
        arguments=(*inputs, *weights),
        outputs=tuple(made),
        axes={
            "small": Axis(0, stated=True), "batch": Axis.per_call(),
            "attended": Axis(lambda s: s["batch"], varies=True),
        },
        values=lambda call: {},
        flops=" + ".join(["0", *(f"2*batch*{product}" for product in products)]),  # at least: of one row each
        vary=vary,
        build=lambda cls, args: _build(block, cls, args),
        targets=(_target(block),),
        tolerance=TOLERANCE,
        activations=tuple(t.name for t in inputs if not t.dtype and t.name not in entry.ones),
        calls=_ops(full),
        parts=tuple(other.name for other, _ in _inside(block)),
    )  # fmt: skip
    return task


def _kernel(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Weights of a convolution that keep the scale of its inputs."""
    return (call.randn(*shape) * (shape[0] / math.prod(shape)) ** 0.5).to(dtype)


def _ones(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=call.device)


def _target(block: Block) -> Target:
    return Target(
        HOST, f"{block.cls.__module__}:{block.cls.__name__}", block.cls.__name__, "standalone",
        module=block.cls.__module__, note="our engine builds its models with it",
    )  # fmt: skip


def _attends(module: nn.Module) -> bool:
    """Whether the module attends within the sequences of a step."""
    return any(hasattr(m, "qkv_proj") or hasattr(m, "qkv") for m in module.modules())


def _ops(module: nn.Module) -> tuple[str, ...]:
    """The ops of the module's classes, and those that they call."""
    parts: list[Any] = list(module.modules())
    parts += [m.quant_method for m in module.modules() if hasattr(m, "quant_method")]
    bases = dict.fromkeys(base for part in parts for base in type(part).__mro__)
    found = {op for op in map(registry.op_of_class, bases) if op is not None}
    found |= {op for part in parts for op in getattr(part, "ops", ())}
    todo = list(found)
    while todo:
        for op in set(registry.get(todo.pop()).calls) - found:
            found.add(op)
            todo.append(op)
    return tuple(sorted(found))


def _inside(block: Block) -> list[tuple[Block, list[str]]]:
    """The model's blocks of lower levels inside this one, each with its paths there; those of higher levels first."""
    prefix = f"{block.paths[0]}." if block.paths[0] else ""
    model = block.name.rpartition(".")[0]
    found = [
        (other, paths) for name, other in _known.items()
        if name.rpartition(".")[0] == model and other.level < block.level
        and (paths := [p for p in other.paths if p.startswith(prefix)])
    ]  # fmt: skip
    return sorted(found, key=lambda pair: -pair[0].level)


def _axes(
    block: Block, ragged: bool, full: Sequence[Any], small: Sequence[Any], states: bool
) -> dict[str, Axis]:
    axes: dict[str, Axis] = {"small": Axis(0, stated=True)}
    if not ragged:
        return {**axes, "tokens": Axis.per_call(), "attended": Axis(lambda s: s["tokens"], varies=True)}
    names = (
        "seq_lens",
        "block_size",
        "blocks",
        "max_blocks",
        "max_seqlen_k",
        "sequences",
        "keys_read",
        "pairs",
    )
    axes |= {name: attention_cases.AXES[name] for name in names} | attention_cases.RAGGED
    first = inputs_of(block)[0]
    axes["padding"] = Axis.option(0, read=lambda a: len(getattr(a, first)) - int(a.cu_seqlens_q[-1]))
    windows = [[getattr(m, "window_left", -1) for m in ms] for ms in (full, small)]
    one = bool(windows[0]) and all(w >= 0 for w in windows[0])  # bytes and operations are lower bounds
    if one:
        least = min(windows[0]), min(windows[1])
        axes["window_left"] = Axis(lambda s: least[s["small"]])
    if states:
        axes["state_rows"] = Axis(lambda s: len(s["seq_lens"]) + 2, stated=True)  # slot 0 is for padding
        axes["continued"] = Axis(lambda s: sum(k > n for n, k in attention_cases.lengths(s)))
    return axes


def _flops(
    block: Block, caches: Mapping[str, Any], weights: Sequence[Tensor], experts: tuple[str, ...] | None
) -> str:
    terms = ["0"]
    for weight in weights:
        assert isinstance(weight.axes, str)
        sizes = [f"({part})" for part in weight.axes.split()]
        if "embed" in weight.name or len(sizes) < 2 or ".kv_b_proj." in weight.name:
            continue
        if experts is not None and len(sizes) == 3:
            sizes[0] = f"({experts[1]})"
        terms.append(f"2*attended*{'*'.join(sizes)}")
    for m, other in caches.values():
        if type(m).__name__ == "VllmAttention":
            size = _size(m.num_heads * m.head_size, other.num_heads * other.head_size)
            terms.append(f"4*pairs*({size})")
    return " + ".join(terms)


def _cases(block: Block, ragged: bool) -> tuple[Case, ...]:
    longest = getattr(block.full.config, "max_position_embeddings", None) or 1 << 20

    def step(name: str, q: list[int], k: list[int], small: int, weight: float = 1.0) -> Case:
        size, dtype, tag = (16, MODEL_DTYPE, "model") if not small else (4, SMALL_DTYPE, "odd")
        dims = {"q_lens": q, "seq_lens": k, "block_size": size, "small": small}
        return Case(name, dims, dtype, weight, (tag,))

    def tokens(name: str, n: int, small: int, weight: float = 1.0) -> Case:
        dtype, tag = (MODEL_DTYPE, "model") if not small else (SMALL_DTYPE, "odd")
        return Case(name, {"tokens": n, "small": small}, dtype, weight, (tag,))

    if not ragged:
        return (
            tokens("decode_1", 1, 0, 32), tokens("decode_32", 32, 0, 32), tokens("prefill_2k", 2048, 0),
            tokens("small_one", 1, 1), tokens("small_7", 7, 1), tokens("small_63", 63, 1),
        )  # fmt: skip
    if not caches_of(block.module(False)) and not states_of(
        block.module(False)
    ):  # encoders see whole sequences
        long = min(512, longest)
        return (
            step("batch_32", [long] * 32, [long] * 32, 0), step("single", [long], [long], 0, 8),
            step("small_one", [1], [1], 1), step("small_batch", [9, 9], [9, 9], 1),
            step("small_ragged", [13, 1, 6], [13, 1, 6], 1),
        )  # fmt: skip
    k, p = min(1024, longest), min(2048, longest)
    model: tuple[Case, ...] = (
        step("decode_1", [1], [k], 0, 32), step("decode_32", [1] * 32, [k] * 32, 0, 32),
        step("prefill_2k", [p], [p], 0), step("mixed", [1] * 8 + [p // 2], [k] * 8 + [p // 2], 0),
    )  # fmt: skip
    if block.kind == "model":
        model = ()  # its weights are measured in the engine
    return (
        *model,
        step("small_decode", [1] * 3, [21, 3, 9], 1),
        step("small_prefill", [9, 1, 5], [9, 1, 5], 1),
        step("small_chunked", [3, 7], [20, 7], 1),
        step("small_mixed", [1, 1, 11], [18, 2, 11], 1),
    )


def _vary(made: OpSpec, ragged: bool, case: Case, rng: random.Random) -> Case:
    """Other tokens; the sizes are the model's."""

    def draw() -> dict[str, Any]:
        if not ragged:
            return {"tokens": near(case.dims["tokens"], rng)}
        like = replace(case, dims={**case.dims, "heads": 1, "kv_heads": 1, "head_size": 16})
        new = attention_cases.draw_batch(like, rng)
        if list(case.dims["q_lens"]) == list(case.dims["seq_lens"]):
            new["q_lens"] = new["seq_lens"]
        return {name: v for name, v in new.items() if name not in ("heads", "kv_heads", "head_size")}

    return varied(case, draw, made.bytes_moved, made.flops)


def _values(block: Block, ragged: bool, call: Call) -> Mapping[str, torch.Tensor]:
    """The integers of a step, and for a mixture inputs whose choice of experts no rounding decides."""
    found: dict[str, torch.Tensor] = {}
    if ragged:
        found = dict(layer_cases.values(call))
        if "positions" not in call.declaration.tensors:
            del found["positions"]
    if "fresh" in call.declaration.tensors:
        count, rows = call["sequences"], call["state_rows"]
        order = 1 + torch.randperm(rows - 1, generator=call.generator, device=call.device)
        found["state_slots"] = order[:count].to(torch.int32)
        found["fresh"] = found["seq_lens"] == found["cu_seqlens_q"].diff()
    if "input_ids" in call.declaration.tensors:
        rows, count = block.structure(bool(call["small"])).config.vocab_size, call["tokens"]
        ids = torch.randint(0, rows, (count,), generator=call.generator, device=call.device)
        found["input_ids"] = ids
    gate = next((n for n in call.declaration.tensors if n.endswith(("gate.weight", "router.weight"))), "")
    if call.sizes["dtype"] != "float32" and gate and "shared" not in gate and block.kind != "model":
        found |= _clear_choice(block, call, gate)
    return found


def _clear_choice(block: Block, call: Call, gate: str) -> dict[str, torch.Tensor]:
    """Inputs and weights of a mixture with which each token's best experts have scores far apart.

    As many channels as there are experts have values 8 apart, in an order drawn for each token, and the gate reads
    them. All but the best experts have the same value. Attention adds about 1 to each channel.
    """
    found = {gate: call.tensor(gate)}
    weight = found[gate]
    experts, hidden = weight.shape
    stream = [n for n in ("hidden_states", "hidden", "x", "residual") if n in call.declaration.tensors]
    if experts > hidden or not stream:
        return {}
    order = call.rand(call["tokens"], experts).argsort(dim=1)
    rank = (order - max(experts - EXPERTS_SPREAD, 0)).clamp_min(0)
    for name in stream:
        found[name] = call.tensor(name)
        found[name][:, :experts] = 0
    found[stream[0]][:, :experts] = (8.0 * rank - 4.0 * min(experts, EXPERTS_SPREAD)).to(weight.dtype)
    weight *= 0.05
    weight[:, :experts] += 0.15 * torch.eye(experts, device=weight.device, dtype=weight.dtype)
    for name in call.declaration.tensors:
        if name.endswith("norm.weight") and call.declaration.tensors[name].shape(call.sizes) == (hidden,):
            found[name] = call.tensor(name)
            found[name][:experts] = 1
        elif name.endswith(("correction_bias", "gate.bias", "router.bias")):
            found[name] = torch.zeros_like(call.tensor(name))
    return found


# -- building


_placed: dict[str, type] = {}  # candidates' classes of blocks, which are built inside those of higher levels


def place_only(classes: Mapping[str, Mapping[str, type]]) -> None:
    """Build these classes, {block: {class's name: class}}, wherever a block of a higher level has such a block."""
    _placed.clear()
    for name, offered in classes.items():
        if name in _known and (cls := offered.get(_known[name].cls.__name__)) is not None:
            _placed[name] = cls


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the calls of placed classes: {block: calls}."""
    found: dict[str, int] = {}
    classes = {cls: name for name, cls in _placed.items()}

    def note(module: nn.Module, args: Any) -> None:
        if (name := classes.get(type(module))) is not None:
            found[name] = found.get(name, 0) + 1

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def make(block: Block, cls: type, small: bool, like: torch.Tensor) -> nn.Module:
    """A module of the block with like's dtype and device, with what is placed inside it. Its weights have no values."""
    made, structure = block.made(small), block.structure(small)
    module: Any = assemble.make(cls, like, *made.args, **made.kwargs)
    inside = f"{block.paths[0]}." if block.paths[0] else ""
    for other, paths in _inside(block):
        for path in paths if other.name in _placed else ():
            if (own := structure.made.get(path)) is None:
                continue
            new = assemble.make(_placed[other.name], like, *own.args, **own.kwargs)
            owner, _, name = path.removeprefix(inside).rpartition(".")
            try:
                setattr(module.get_submodule(owner), name, new)
            except AttributeError:  # a candidate's layer without such a part
                continue
    return module


def is_small(block: Block, args: Mapping[str, Any]) -> bool:
    """Whether these weights, by name, are of the block's small model."""
    return all(p.shape == args[n].shape for n, p in block.module(True).named_parameters())


def _load(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Let the parameters be these tensors. Raises ValueError for other names or shapes."""
    own = dict(module.named_parameters())
    if set(own) != set(weights):
        wrong = sorted(set(own) ^ set(weights))
        raise ValueError(
            f"{type(module).__name__}: its parameters differ from the block's in {', '.join(wrong)}"
        )
    for name, tensor in weights.items():
        old = own[name]
        if old.shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(old.shape)}, and the block's {tuple(tensor.shape)}")
        if old.dtype == tensor.dtype:
            old.data = tensor  # modules that hold the parameter see it
        else:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(tensor, False))


def _build(block: Block, cls: type, args: Sequence[Any]) -> Callable[[], Any]:
    """OpSpec.build: an instance of cls whose weights are these tensors, and the call of it."""
    given = dict(zip((a.name for a in registry.get(block.name).arguments), args, strict=True))
    names, module_of = inputs_of(block), block.module(False)
    small = is_small(block, given)
    wide = next(given[n] for n, p in module_of.named_parameters() if p.dtype == torch.bfloat16)
    module: Any = make(block, cls, small, wide).eval().requires_grad_(False)
    _load(module, {n: given[n] for n, _ in block.module(small).named_parameters()})
    for part in module.modules():
        if callable(loaded := getattr(part, "loaded", None)):
            loaded(wide.dtype)
        elif isinstance(part, Folded):
            part.merge()
    caches = []
    for i, part in enumerate(caches_of(module).values()):
        mine = [given[n] for n in given if n.startswith(f"cache_{i}_")]
        part.kv_cache = tuple(mine)
        caches += mine
    for i, part in enumerate(states_of(module).values()):
        part.states = {name: given[f"state_{i}_{name}"] for name in part.keeps.tensors}
        caches += part.states.values()
    context = None
    if "slot_mapping" in given:
        step = (given[argument.name] for argument in attention_cases.STEP)
        slots, fresh = given.get("state_slots"), given.get("fresh")
        context = replace(AttentionMetadata(*step), state_slots=slots, fresh=fresh)
        if any(isinstance(part, CrossAttention) for part in module.modules()):
            context = replace(context, cross=_sources(context))
    passed = grouped({name: given[name] for name in names})
    if "residual" in inspect.signature(block.cls.forward).parameters and "residual" not in names:  # type: ignore[attr-defined]
        passed["residual"] = None
    whole = block.kind == "model" and hasattr(module, "compute_logits")

    def run() -> tuple[torch.Tensor, ...]:
        out = module(**passed)
        out = module.compute_logits(out) if whole else out
        return (*(o for o in (out if isinstance(out, tuple) else (out,)) if o is not None), *caches)

    if context is None:
        return run

    def call() -> tuple[torch.Tensor, ...]:
        with forward_context(context):
            return run()

    return call


def _sources(step: AttentionMetadata) -> CrossMetadata:
    """The cached sequences of a step, as the states of an encoder that each of their tokens attends to."""
    lengths = step.cu_seqlens_q.diff()
    tables, lens = (t.repeat_interleave(lengths, 0) for t in (step.block_table, step.seq_lens))
    padding = len(step.slot_mapping) - len(lens)  # tokens without a sequence see no state
    tables, lens = (torch.cat((t, t.new_zeros(padding, *t.shape[1:]))) for t in (tables, lens))
    return CrossMetadata(tables, lens, step.max_seqlen_k)


def _unread(module: nn.Module) -> set[str]:
    """The parameters that no step reads: they make keys and values of an encoder's states, which are in the cache."""
    return {
        f"{path}.{part}.{name}".lstrip(".")
        for path, m in module.named_modules() if isinstance(m, CrossAttention)
        for part in ("k_proj", "v_proj") for name, _ in m.get_submodule(part).named_parameters()
    }  # fmt: skip


def _reference(block: Block, args: list[Any]) -> Any:
    """The block with the plain PyTorch provider of every op, and our own classes."""
    placed = dict(_placed)
    _placed.clear()
    try:
        with torch.no_grad(), dispatch.only("reference"):
            return _build(block, block.cls, args)()
    finally:
        _placed.update(placed)
