"""Every op's SPEC against the op: declarations, dims of real arguments, held-out cases, extremes, built modules."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.kernels.declarations import contradictions
from support.kernels.op_cases import call, make_args, mismatch, mutated, oracle, over

from fastkernels.core import assemble, dispatch, registry
from fastkernels.core.shapes import SMALL, near, near_size
from fastkernels.core.spec import Case, OpSpec, dtype_of

NAMES = registry.op_names()
CASES = {name: [c for c in registry.get(name).cases if "odd" in c.tags] for name in NAMES}
# Classes that cannot express any arguments of the op, and the reason in their error.
NEVER = {
    "VllmParallelLMHead_0_26": "has no lookup",
    "VllmParallelLMHead_0_32": "has no lookup",
    "VllmParallelLMHead": "has no lookup",
    "SGLangParallelLMHead": "has no lookup",
    "VllmMLAAttention": "needs num_heads",
    "VllmMLAAttention_0_26": "needs num_heads",
    "VllmMMEncoderAttention": "needs num_heads",
    "SGLangVisionSdpaAttention": "needs head_dim",
    "VllmWhisperEncoderAttention": "needs num_heads",
    "VllmWhisperEncoderAttention_0_26": "needs num_heads",
    "VllmApplyRotaryEmb": "takes the cosines and sines of tokens",
    "VllmChunkGatedDeltaRule_0_26": "state=a tensor",  # a copy of the rows, with keys behind values
    "VllmChunkGatedDeltaRule": "state=a tensor",
    "VllmTopKTopPSampler": "draws its seeds from torch's generators",
    "DiffusersAttnProcessor2_0": "another module calls it",
    **{
        f"Diffusers{name}AttnProcessor2_0": "another module calls it" for name in ("Joint", "Hunyuan", "Sana")
    },
    "DiffusersFluxAttnProcessor": "another module calls it",
    "DiffusersHunyuanVideo15AttnProcessor2_0": "another module calls it",
    "DiffusersApproximateGELU": "needs dim_in",
    "DiffusersGELU": "needs dim_in",
    "DiffusersGEGLU": "needs dim_in",
    "DiffusersAdaLayerNormZero": "needs embedding_dim",
    "DiffusersAdaLayerNormZeroSingle": "needs embedding_dim",
    "DiffusersAdaLayerNormContinuous": "needs embedding_dim",
    "DiffusersBasicTransformerBlock": "needs dim",
    "DiffusersFluxTransformerBlock": "needs dim",
    "TimmBlock": "needs dim",
    "TimmEvaBlock": "needs dim",
    "DiffusersFluxSingleTransformerBlock": "needs dim",
    "DiffusersResnetBlock2D": "needs in_channels",
    "DiffusersHunyuanVideo15ResnetBlock": "needs in_channels",
    "DiffusersHunyuanVideo15TransformerBlock": "needs num_attention_heads",
    "DiffusersHunyuanVideo15RotaryPosEmbed": "needs patch_size",
    **{
        f"Timm{name}": "is a block, not one convolution"
        for name in (
            "ConvBnAct",
            "DepthwiseSeparableConv",
            "EdgeResidual",
            "InvertedResidual",
            "UniversalInvertedResidual",
            "ConvNeXtBlock",
        )
    },
    "Openfold3TriangleAttention": "needs c_in",
    "Openfold3AttentionPairBias": "needs c_q",
    "Openfold3DiffusionAttentionPairBias": "needs c_q",
    "Openfold3TriangleMultiplicationOutgoing": "needs c_z",
    "Openfold3TriangleMultiplicationIncoming": "needs c_z",
    "Openfold3SwiGLUTransition": "needs c_in",
    "Openfold3OuterProductMean": "needs c_m",
    "Openfold3AdaLN": "needs c_a",
    **{
        f"Torchrec{kind}CrossNet": "needs in_features" for kind in ("", "LowRank", "LowRankMixture", "Vector")
    },
    "TorchrecEmbeddingBagCollection": "needs tables",
    "TimmAttention": "needs dim",
    "TimmAttentionPoolLatent": "needs in_features",
    "TimmAttentionRope": "needs dim",
    "TimmMlp": "needs in_features",
    "TimmEvaAttention": "needs dim",
    "TimmWindowAttention": "needs dim",
    **{f"Timm{name}Attention": "needs dim" for name in ("Beit", "MaskUnit", "MetaFormer")},
    "TransformersSiglipAttention": "needs config",
    "TransformersCLIPAttention": "needs config",
    "TransformersViTAttention": "needs config",
    "TransformersDINOv3ViTAttention": "needs config",
    "TransformersSiglipMultiheadAttentionPoolingHead": "needs config",
    "TransformersSiglip2MultiheadAttentionPoolingHead": "needs config",
    "TransformersSam3Attention": "needs config",
    "TransformersSam3ViTRoPEAttention": "needs config",
    "TransformersYolosSelfAttention": "needs config",
    "TransformersVJEPA2RopeAttention": "needs config",
    "TransformersVJEPA2MLP": "needs config",
    "TransformersSwinv2SelfAttention": "needs config",
    "TransformersRTDetrV2MultiscaleDeformableAttention": "needs config",
    "UltralyticsRepVGGDW": "is a block, not one convolution with a norm",
    "UltralyticsAttention": "needs dim",
    "UltralyticsAAttn": "needs dim",
    **{
        f"Transformers{name}": "is a block, not one convolution with a norm"
        for name in (
            "RTDetrV2ConvNormLayer",
            "RTDetrV2RepVggBlock",
            "RTDetrResNetConvLayer",
            "RTDetrResNetBasicLayer",
            "RTDetrResNetBottleNeckLayer",
        )
    },
    "TransformersDinov2Layer": "needs config",
    "TransformersDinov2Layer_5_17": "needs config",
    "TransformersDINOv3ViTLayer": "needs config",
    "SGLangLlamaDecoderLayer": "carries hidden states and residual as one sum",
    "SGLangMixtralDecoderLayer": "carries hidden states and residual as one sum",
    "SGLangQwen3DecoderLayer": "carries hidden states and residual as one sum",
}


def classes(spec: OpSpec) -> list[type]:
    """The target classes of the op, without functions."""
    found = dict.fromkeys(registry.target_class(target) for target in spec.targets)
    return [cls for cls in found if isinstance(cls, type)]


OF_IMAGES = {"TimmLayerNorm2d"}  # the channels are not the last dimension; tests/export compares it
CLASSES = [
    (name, cls) for name in NAMES for cls in classes(registry.get(name)) if cls.__name__ not in OF_IMAGES
]


def described(spec: OpSpec, args: list[Any]) -> list[Any]:
    """All arguments, with tensors as shape and dtype, and defaults for those that were left out."""
    if spec.op is not None:
        args = [*args, *(a.default_value for a in spec.op.overload._schema.arguments[len(args) :])]
    return [(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]


def listed(out: Any) -> list[torch.Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if t is not None]


def results(spec: OpSpec, args: list[Any]) -> list[torch.Tensor]:
    """The results of the op, or of a module of its first class."""
    if spec.op is not None:
        return call(spec.op, spec.op, args)
    assert spec.build is not None
    return listed(spec.build(classes(spec)[0], args)())


@pytest.mark.parametrize("name", NAMES)
def test_spec_has_what_the_judge_needs(name: str) -> None:
    spec = registry.get(name)
    assert spec.arguments
    assert not classes(spec) or spec.build is not None
    assert spec.op is None or not spec.mutates, "the schema says what a functional op writes to"
    args = make_args(spec, spec.cases[-1])
    for position in (*spec.activations, *spec.mutates):
        assert position >= len(args) or args[position] is None or args[position].is_floating_point()
    # The benchmark judges a case on a CPU if it takes milliseconds.
    small = [c for c in spec.cases if spec.bytes_moved(c) <= SMALL and spec.flops(c) <= 5e7]
    assert len(small) >= 7, f"{len(small)} cases are for a CPU"
    assert len({c.name for c in spec.cases}) == len(spec.cases)


@pytest.mark.parametrize("name", NAMES)
def test_declaration_agrees_with_reference(name: str) -> None:
    assert contradictions(registry.get(name)) == []


def changed(op: str, argument: str, changes: dict[str, Any]) -> OpSpec:
    """The op with another declaration of one argument or output."""
    spec = registry.get(op)

    def edit(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(a, **changes) if a.name == argument else a for a in arguments)

    return dataclasses.replace(spec, arguments=edit(spec.arguments), outputs=edit(spec.outputs))


@pytest.mark.parametrize(
    ("argument", "changes", "says"),
    [
        (
            "residual",
            {"mutated": False},
            "rms_norm: argument residual: mutated=False is declared, the schema has True",
        ),
        ("weight", {"axes": "hidden hidden+1"}, r"rms_norm: case .* rejects .*weight \[1000, 1001\]"),
        ("out", {"axes": "tokens hidden"}, r"rms_norm: case qk_odd: output out is .* declared as .*"),
        (
            "out",
            {"dtype": "float64"},
            "rms_norm: case .*: output out is torch.float32 .* declared as torch.float64",
        ),
        (
            "eps",
            {"name": "epsilon"},
            "rms_norm: argument epsilon is declared at position 2, the reference has eps",
        ),
        ("x", {"when": "there"}, "rms_norm: argument x is declared as optional"),
    ],
)
def test_wrong_declaration_is_named(argument: str, changes: dict[str, Any], says: str) -> None:
    found = contradictions(changed("rms_norm", argument, changes))
    assert any(re.match(says, problem) for problem in found), found


def test_unknown_axis_is_named() -> None:
    with pytest.raises(ValueError, match="rms_norm: weight: 'hiden' names hiden, which is no axis"):
        _ = changed("rms_norm", "weight", {"axes": "hiden"}).declaration


@pytest.mark.parametrize("name", NAMES)
def test_ops_with_integer_results_are_permutable(name: str) -> None:
    """The judge does not scale their inputs: without a Permutable it would repeat the same values."""
    spec = registry.get(name)
    case = next(c for c in spec.cases if "odd" in c.tags)
    args = make_args(spec, case)
    integers = spec.op is not None and not all(t.is_floating_point() for t in results(spec, args))
    assert (spec.permutable is not None) or not integers


@pytest.mark.parametrize("name", NAMES)
@over(CASES)
def test_dims_of_real_arguments(name: str, case: Case) -> None:
    spec = registry.get(name)
    args = make_args(spec, case)
    found = spec.case_of(args, case.name)
    assert found.dtype == case.dtype
    json.dumps(dict(found.dims))
    # The dims make the same call: its shapes, dtypes and scalars.
    assert described(spec, make_args(spec, found, seed=1)) == described(spec, args)
    # Counted values are at most what the case allows; without them, the cost is the case's.
    bare = dataclasses.replace(found, dims={k: v for k, v in found.dims.items() if k not in spec.counted})
    assert (spec.bytes_moved(bare), spec.flops(bare)) == (spec.bytes_moved(case), spec.flops(case))
    assert spec.bytes_moved(found) <= spec.bytes_moved(case) and spec.flops(found) <= spec.flops(case)


def strided(value: Any) -> Any:
    """The same values as every other row of a tensor that is twice as long."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.repeat_interleave(2, dim=0)[::2]


def without_values(value: Any) -> Any:
    """A float tensor without values, as in a capture."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@pytest.mark.parametrize("name", NAMES)
@over(CASES)
def test_dims_of_views_defaults_and_captures(name: str, case: Case) -> None:
    """Strided views, left-out arguments, and tensors without values give the same dims."""
    spec = registry.get(name)
    assert spec.dims_of is not None
    args = make_args(spec, case)
    dims = spec.dims_of(*args)
    views = spec.dims_of(*map(strided, args))
    layout = ("packed", "heads_first")  # read from strides
    assert without(views, *layout) == without(dims, *layout)
    if spec.op is not None:
        arguments = spec.op.overload._schema.arguments
        short = list(args)
        while arguments[len(short) - 1].has_default_value() and _same(
            short[-1], arguments[len(short) - 1].default_value
        ):
            short.pop()
        assert spec.dims_of(*short) == dims
    shapes = spec.dims_of(*map(without_values, args))
    assert shapes == {k: v for k, v in dims.items() if k in shapes}


def without(dims: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in dims.items() if k not in names}


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == default


def test_dims_count_values() -> None:
    ids, weight = torch.tensor([3, 3, 3, 5]), torch.zeros(9, 4)
    assert registry.get("embedding").dims_of(ids, weight)["distinct"] == 2
    sharded = registry.get("embedding").dims_of(ids, weight, 4, 9, 0, 9, 9)
    assert sharded["distinct"] == 1 and sharded["shard"] == (4, 9, 0, 9, 9)
    spec = registry.get("fused_experts")
    args = [
        torch.zeros(2, 8),
        torch.zeros(4, 6, 8),
        torch.zeros(4, 8, 3),
        torch.ones(2, 2),
        torch.tensor([[0, 3], [3, -1]]),
    ]
    dims = spec.dims_of(*args)
    assert (dims["experts_hit"], dims["pairs"]) == (2, 3)
    assert spec.bytes_moved(spec.case_of(args, "")) == 4 * 8 * (2 * 2 + 3 * 2 * 3) + 8 * 4
    assert spec.flops(spec.case_of(args, "")) == 6 * 3 * 8 * 3
    k, cache = torch.zeros(5, 1, 4), torch.zeros(3, 2, 1, 4)
    stored = registry.get("store_kvcache").case_of([k, k, cache, cache, torch.tensor([1, -1, 4, -1, -1])], "")
    assert stored.dims["stored"] == 2
    assert registry.get("store_kvcache").bytes_moved(stored) == 2 * 2 * 4 * (4 + 4) + 8 * 5


def test_attention_cost_of_shared_prefix_and_window() -> None:
    spec = registry.get("attention_decode")
    q, cache = torch.zeros(2, 2, 8), torch.zeros(6, 4, 1, 8)
    lens = torch.tensor([9, 7], dtype=torch.int32)
    table = torch.tensor([[1, 2, 3], [1, 4, 0]], dtype=torch.int32)
    args = [q, cache, cache, lens, table, 9, 8**-0.5]
    dims = spec.case_of(args, "").dims
    assert dims["kv_tokens"] == 4 + 4 + 1 + 3 and dims["seq_lens"] == [9, 7]
    per_key, queries = 2 * 8 * 4, 2 * 8 * 4 * 2 * 2
    assert spec.bytes_moved(spec.case_of(args, "")) == queries + 12 * per_key
    windowed = spec.case_of([*args, 2], "")
    assert spec.bytes_moved(windowed) == queries + 6 * per_key and spec.flops(windowed) == 4 * 6 * 2 * 8
    prefill = registry.get("attention_prefill")
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    chunk = [torch.zeros(5, 2, 8), cache, cache, starts, lens, table, 3, 9, 8**-0.5]
    assert prefill.flops(prefill.case_of(chunk, "")) == 4 * (8 + 9 + 5 + 6 + 7) * 2 * 8
    assert prefill.flops(prefill.case_of([*chunk, 2], "")) == 4 * (3 * 5) * 2 * 8


def test_dtype_of_a_case() -> None:
    x, ids = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    assert dtype_of([ids, None, x, torch.zeros(2)]) == "bfloat16"
    assert dtype_of([ids, 3, None]) == "float32"
    fp8 = x.to(torch.float8_e4m3fn)
    assert dtype_of([x, fp8, fp8], 1) == "float8_e4m3fn"


def test_narrow_outputs_have_the_tolerance_of_their_dtype() -> None:
    spec = registry.get("ssd")
    half, wide = (Case("any", {}, dtype) for dtype in ("float16", "float32"))
    for case in (half, wide):
        assert spec.tolerance_for(case, torch.bfloat16) == spec.tolerance["bfloat16"]
    assert spec.tolerance_for(half, torch.float32) == spec.tolerance["float16"]
    assert spec.tolerance_for(wide, torch.float32) == spec.tolerance["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_varied_cases_differ_at_similar_cost(name: str) -> None:
    spec = registry.get(name)
    assert spec.vary is not None
    numbers = []
    for case in spec.cases:
        for seed in range(8):
            made = spec.vary(case, random.Random(seed))
            assert spec.bytes_moved(made) <= max(2 * spec.bytes_moved(case), SMALL), made
            assert spec.flops(made) <= max(2 * spec.flops(case), 100 * SMALL), made
            assert made.dims != case.dims and made.dtype == case.dtype
            assert made == spec.vary(case, random.Random(seed)), "not deterministic"
            json.dumps(dict(made.dims))
            d = made.dims
            counts = [
                d[n]
                for n in (
                    "gaussians",
                    "rays",
                    "points",
                    "tokens",
                    "rows",
                    "keys",
                    "ids",
                    "nodes",
                    "users",
                    "samples",
                    "queries",
                    "blocks",
                )
                if n in d
            ]
            numbers.append(counts[0] if counts else len(d.get("seq_lens", d.get("q_lens", ()))))
            sizes = [
                v for k, v in d.items() if v != case.dims.get(k) and type(v) is int and k != "max_positions"
            ]
            assert all(str(size) in made.name for size in sizes), (made.name, d)
    odd = [n for n in numbers if (n[0] if isinstance(n, tuple) else n) % 2]
    assert len(odd) > len(numbers) / 4


@pytest.mark.parametrize("name", NAMES)
@over(CASES)
def test_varied_cases_run(name: str, case: Case) -> None:
    spec = registry.get(name)
    assert spec.vary is not None
    for seed in range(2):
        made = spec.vary(case, random.Random(seed))
        args = make_args(spec, made)
        want = oracle(spec, args)
        assert mismatch(spec, made, results(spec, args), want) is None, made.name


def test_near() -> None:
    rng = random.Random(0)
    assert {near(1, rng) for _ in range(300)} == set(range(1, 12))
    assert all(2048 <= near(4096, rng) <= 5121 for _ in range(300))
    assert all(near_size(4096, rng) % 64 == 0 and 2048 <= near_size(4096, rng) <= 5120 for _ in range(300))
    assert {near_size(1, rng) for _ in range(300)} == set(range(1, 8))


EXTREMES = [(name, kind, edit) for name in NAMES for kind, edit in registry.get(name).extremes.items()]


@pytest.mark.parametrize(("name", "kind", "edit"), EXTREMES, ids=[f"{n}-{k}" for n, k, _ in EXTREMES])
def test_extremes_are_legal(name: str, kind: str, edit: Callable[[list[Any]], None]) -> None:
    spec = registry.get(name)
    for case in CASES[name]:
        args = make_args(spec, case)
        if not all(a.numel() for a in args if isinstance(a, torch.Tensor)):
            continue
        places = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
        edit(args)
        assert [a.data_ptr() for a in args if isinstance(a, torch.Tensor)] == places, "an edit is in place"
        want = oracle(spec, args)
        assert not any(t.isnan().any() for t in want if t.is_floating_point())
        got = results(spec, args)
        # The error of a sum is relative to its terms, also where they cancel
        if spec.level > 1 or registry.family(name) == "recurrence":
            size = [max(float(t.pow(2).mean().sqrt()), 1.0) for t in want]
            got, want = ([t.double() / s for t, s in zip(ts, size, strict=True)] for ts in (got, want))
        assert mismatch(spec, case, got, want) is None, case.name


def built(spec: OpSpec, cls: type) -> Iterator[tuple[Case, list[Any], Callable[[], Any]]]:
    """The odd cases that cls can express; for others, build raises a ValueError that names the class."""
    assert spec.build is not None
    for case in (c for c in spec.cases if "odd" in c.tags):
        args = make_args(spec, case)
        given = list(args)
        if stores_one_less(cls) and args[1] is not None:
            given[1] = args[1] - 1
        try:
            yield case, args, spec.build(cls, given)
        except ValueError as error:
            assert cls.__name__ in str(error)
            assert cls.__name__ not in NEVER or NEVER[cls.__name__] in str(error) or "shard" in str(error)


def stores_one_less(cls: type) -> bool:
    """Whether the class stores its weight minus one; then the test gives it another tensor than the reference."""
    return "LayerNorm1P" in cls.__name__


@pytest.mark.parametrize(("name", "cls"), CLASSES, ids=[f"{n}-{c.__name__}" for n, c in CLASSES])
def test_built_modules_equal_the_reference(name: str, cls: type) -> None:
    spec, seen = registry.get(name), 0
    written = mutated(spec.op) if spec.op is not None else spec.mutates
    for case, args, run in built(spec, cls):
        # New values in the same memory: a module with copied weights would miss them.
        for i, t in enumerate(args):
            shared = not (stores_one_less(cls) and i == 1)
            if shared and isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize > 1:
                t.mul_(0.75)
        want = oracle(spec, args)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        calls = {op: dispatch.OPS[op].calls for op in dispatch.OPS}
        result = listed(spec.reference(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args)))
        plain = all(t.is_contiguous() for t in (*args, *result) if isinstance(t, torch.Tensor))
        found = listed(run())
        assert mismatch(spec, case, found, want) is None, case.name
        assert not plain or all(t.is_contiguous() for t in found if isinstance(t, torch.Tensor)), case.name
        ran = {op for op, n in calls.items() if dispatch.OPS[op].calls > n}
        assert ran <= {name, *registry.reached(name, parts=True)}, "the op that ran is not reached by this op"
        changed = [
            i for i, (a, b) in enumerate(zip(args, before, strict=True))
            if isinstance(a, torch.Tensor) and not torch.equal(a, b)
        ]  # fmt: skip
        assert set(changed) <= set(written), f"arguments {changed} were changed"
        seen += 1
    assert (seen == 0) == (cls.__name__ in NEVER), f"{seen} cases"


def test_load_names_what_does_not_fit() -> None:
    linear = torch.nn.Linear(3, 2)
    weight, bias = torch.zeros(2, 3), torch.zeros(2)
    for tensors, says in (
        ({"weight": weight}, "Linear has a parameter bias, which the op's arguments do not give"),
        ({"weight": weight.t(), "bias": bias}, r"Linear has weight \(2, 3\), the argument is \(3, 2\)"),
        ({"weight": weight, "bias": None}, "bias: Linear has one, the arguments have none"),
        ({"weight": weight, "bias": bias, "scale": bias}, "Linear has no scale"),
    ):
        with pytest.raises(ValueError, match=says):
            assemble.load(linear, tensors)  # type: ignore[arg-type]
