"""Every op of the registry against its float64 reference: eager, interpreted Triton, compiled, strided, on the GPU."""

from __future__ import annotations

import inspect
import json
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kernels import warm
from support.kernels.op_cases import call, make_args, mismatch, mutated, odd_cases, oracle, over, poison

from fastkernels.core import registry
from fastkernels.core.dispatch import Op
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.rope.vllm import get_rope

CASES = odd_cases()
IDS = [f"{name}-{case.name}" for name, case in CASES]
FIRST = [next((n, c) for n, c in CASES if n == name) for name in dict.fromkeys(n for n, _ in CASES)]
FIRST_IDS = [name for name, _ in FIRST]
SCRIPT = Path(__file__).parents[1] / "support" / "kernels" / "op_cases.py"
# Interpreted cases that take longest; others of the op run the same kernels.
SLOW = {
    "ada_layer_norm": ("odd_63",), "deformable_attention": ("four_levels",), "frame_attention": ("odd_129",),
    "fused_experts": ("all", "odd_5", "odd_63"),
    "fused_experts_fp8": ("powers_of_two", "cut", "blocks_19", "channels_33", "tensors_63", "tokens_of_tensors"),
    "fused_experts_gelu": ("all", "odd_5", "odd_17", "odd_63"),
    "fused_experts_int4": ("all", "elsewhere", "zeros_33"),
    "fused_experts_nvfp4": ("few", "rows_19", "none", "elsewhere", "odd_63", "all"),
    "fused_experts_swigluoai": ("all", "elsewhere", "floats_63"), "gated_residual": ("odd_63",),
    "gated_delta_rule": ("packed",), "gated_linear_attention": ("packed",), "kda": ("packed", "odd_63"),
    "linear_nvfp4": ("tiles_19",), "rwkv7": ("packed", "odd_63"), "ssd": ("odd_63",),
    "grouped_topk": ("odd_63", "bias"), "lstm": ("wide", "even", "half", "odd_63"), "merge_state": ("odd_63",),
    "moe_align": ("few", "chunks"), "qk_norm_rope": ("odd_63",), "quantize_fp8": ("group_63", "token_1000"),
    "rope_axes": ("four",), "rope_nd": ("odd_63", "pairs_63"),
    "rope_store_kvcache": ("smollm2",), "rotary_emb": ("smollm2",),
    "silu_mul_quant_fp8": ("group_63", "token_63"), "topk_softmax": ("odd_160",), "upsample_conv": ("wide",),
}  # fmt: skip
OF_OP = {name: [c for n, c in CASES if n == name] for name in dict.fromkeys(n for n, _ in CASES)}
INTERPRETED = [
    pytest.param(name, chosen, marks=marks, id=f"{name}{suffix}")
    for name, cases in OF_OP.items()
    for suffix, marks, chosen in (
        ("", [], [c for c in cases if c.name not in SLOW.get(name, ())]),
        ("-slow", [pytest.mark.slow], [c for c in cases if c.name in SLOW.get(name, ())]),
    )
    if chosen
]
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    poison()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[tuple[str, str], str | None]:
    """The difference found in each chosen case's Triton kernel, or None. One process: kernels are built at import."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    chosen = [i.callspec.params for i in items if i.function is test_triton_interpreted]
    names = [f"{params['name']}-{case.name}" for params in chosen for case in params["cases"]]
    done = warm.run([SCRIPT, *names], env, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(r["op"], r["case"]): r["problem"] for r in rows}


def check(spec: OpSpec, case: Case, fn: Any, args: list[Any]) -> None:
    want = oracle(spec, args)
    unchanged = {
        i: a.clone() for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in mutated(spec.op)
    }
    got = call(spec.op, fn, args)
    assert mismatch(spec, case, got, want) is None
    assert all(torch.equal(args[i], before) for i, before in unchanged.items()), "an input was changed"
    memory = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor) and a.numel()}
    fresh = got[: len(got) - len([i for i in mutated(spec.op) if args[i] is not None])]
    assert not memory & {t.untyped_storage().data_ptr() for t in fresh if t.numel()}, (
        "an output shares an input's memory"
    )


@pytest.mark.parametrize("name", OF_OP)
@over(OF_OP)
def test_values(name: str, case: Case) -> None:
    poison()
    spec = registry.get(name)
    before = spec.op.calls
    check(spec, case, spec.op, make_args(spec, case))
    assert spec.op.calls == before + 1


@pytest.mark.cpu(100)  # the first runs all
@pytest.mark.parametrize(("name", "cases"), INTERPRETED)
def test_triton_interpreted(
    name: str, cases: list[Case], interpreted: dict[tuple[str, str], str | None]
) -> None:
    found = {case.name: interpreted[name, case.name] for case in cases}
    assert {case: problem for case, problem in found.items() if problem is not None} == {}


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_providers_take_all_arguments_of_their_op(name: str) -> None:
    """Those for a GPU, too. The op passes its arguments by position, and `out` by name."""
    op = registry.get(name).op
    given = [None] * len(op.overload._schema.arguments)
    for provider in op.providers:
        inspect.signature(provider.fn).bind(*given, **({"out": None} if provider.out else {}))
        if provider.supports is not None:
            inspect.signature(provider.supports).bind(*given)
        if provider.fits is not None:
            inspect.signature(provider.fits).bind({}, *given)


def widen(value: Any) -> Any:
    """The same values as a slice of a wider tensor."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.is_contiguous():
        return value
    wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + 5)
    wide[..., :-5] = value
    return wide[..., :-5]


@pytest.mark.parametrize("name", OF_OP)
@over(OF_OP)
def test_strided_inputs(name: str, case: Case) -> None:
    poison()
    spec = registry.get(name)
    args = [widen(a) for a in make_args(spec, case)]
    check(spec, case, spec.op, args)
    for a in args:
        if isinstance(a, torch.Tensor) and a._base is not None and a._base.shape[-1] == a.shape[-1] + 5:
            assert not a._base[..., -5:].any(), "the op wrote outside the tensor"


@pytest.mark.parametrize(("name", "case"), FIRST, ids=FIRST_IDS)
def test_opcheck(name: str, case: Case) -> None:
    torch.use_deterministic_algorithms(False)
    spec = registry.get(name)
    args = make_args(spec, case)
    # One check multiplies all arguments, which torch cannot for float8; test_values checks the same.
    float8 = any(isinstance(a, torch.Tensor) and a.is_floating_point() and a.itemsize == 1 for a in args)
    wanted = [t for t in OPCHECKS if not (float8 and t == "test_schema")]
    torch.library.opcheck(spec.op.overload, tuple(args), test_utils=wanted)


def compiled(spec: OpSpec, case: Case, backend: str) -> None:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    fn = torch.compile(lambda *args: spec.op(*args), fullgraph=True, backend=backend)
    args = make_args(spec, case)
    want = oracle(spec, args)
    assert mismatch(spec, case, call(spec.op, fn, args), want) is None


@pytest.mark.parametrize(("name", "case"), FIRST, ids=FIRST_IDS)
def test_compiles_whole(name: str, case: Case) -> None:
    compiled(registry.get(name), case, "aot_eager")


@pytest.mark.slow
def test_compiles_with_inductor() -> None:
    spec = registry.get("rotary_emb")
    compiled(spec, next(c for c in spec.cases if c.name == "smollm2"), "inductor")


@pytest.mark.parametrize("name", FIRST_IDS)
def test_cost_is_stated(name: str) -> None:
    spec = registry.get(name)
    models = [c for c in spec.cases if "model" in c.tags]
    assert models, "no model shape for the benchmark"
    assert all(spec.bytes_moved(c) > 0 for c in models)
    assert all(spec.bytes_moved(c) >= 0 and spec.flops(c) >= 0 for c in spec.cases)


@pytest.mark.parametrize("name", registry.op_names())
def test_targets_name_classes_of_the_file(name: str) -> None:
    spec = registry.get(name)
    assert spec.name == name
    for target in spec.targets:
        assert callable(registry.target_class(target)), target.cls


def build(name: str, cls: str, *args: Any, **kwargs: Any) -> torch.nn.Module:
    return registry.op_class(name, cls)(*args, **kwargs)


# Others: norm/test_host_norms.py, rope/test_rope_classes.py, integrations/fla
PLAIN = ("layernorm:RMSNorm", "LlamaRMSNorm")
LEAF = [
    ("rms_norm", t) for t in registry.get("rms_norm").targets if t.path.endswith(PLAIN) and t.host != "fla"
]
LEAF += [("silu_and_mul", t) for t in registry.get("silu_and_mul").targets]


@pytest.mark.parametrize(("name", "target"), LEAF, ids=[f"{n}-{t.cls}" for n, t in LEAF])
def test_module_equals_op(name: str, target: Any) -> None:
    x = torch.randn(7, 96).bfloat16()
    if name == "silu_and_mul":
        assert torch.equal(build(name, target.cls)(x), F.silu(x[:, :48]) * x[:, 48:])
    else:
        module = build(name, target.cls, 96, eps=1e-5).bfloat16()
        with torch.no_grad():
            module.weight.copy_(torch.rand(96))
        residual = torch.randn(7, 96).bfloat16()
        eager = target.host == "vllm"  # rounds before the product with the weight, too
        want, total = registry.get(name).reference(x, module.weight, 1e-5, residual, None, eager)
        if target.host == "transformers":
            want, _ = registry.get(name).reference(x, module.weight, 1e-5)
            torch.testing.assert_close(module(x), want, rtol=2**-6, atol=0)
            return
        out, new = module(x, residual)
        torch.testing.assert_close(out, want, rtol=2**-6, atol=0)  # sums of other orders may round otherwise
        assert torch.equal(new, total) and new is residual


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
         "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 8},
    ],
)  # fmt: skip
def test_scaled_rope_is_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 500000.0, **rope}
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=rope)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    ours = get_rope(128, 32, rope_parameters=rope, dtype=torch.float32).cos_sin_cache
    assert len(ours) >= 32
    torch.testing.assert_close(
        ours[31], magnitude * torch.cat([(31 * frequencies).cos(), (31 * frequencies).sin()])
    )


def test_rope_is_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rope = get_rope(64, 64, rope_parameters={"rope_theta": 10000.0}, dtype=torch.float32)
    positions, q, k = torch.randperm(64)[:9], torch.randn(9, 3, 64), torch.randn(9, 1, 64)
    cos, sin = (t.repeat(1, 2)[None] for t in rope.cos_sin_cache[positions].chunk(2, dim=-1))
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    got = rope(positions, q.clone(), k.clone())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "dynamic"},
            "'dynamic' is not supported; known: default, linear, llama3, yarn, longrope, proportional",
        ),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "'yarn' needs original_max_position_embeddings"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0] * 32,
                "original_max_position_embeddings": 64,
            },
            "'longrope' needs 32 numbers in short_factor, half of the 64 rotated channels, got 1",
        ),
    ],
)
def test_rope_errors_name_the_parameter(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        get_rope(64, 64, rope_parameters=parameters)


def test_ropes_that_are_alike_share_their_table() -> None:
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip

    def table(
        size: int = 16, positions: int = 48, dtype: torch.dtype = torch.float32, **more: Any
    ) -> torch.Tensor:
        return get_rope(size, positions, True, {"rope_theta": 1e4, **more}, dtype).cos_sin_cache

    first = table()
    assert table() is first
    others = [
        table(32),
        table(positions=49),
        table(dtype=torch.float16),
        table(rope_theta=2e4),
        table(**llama3),
    ]
    assert len({id(t) for t in (first, *others)}) == 6
    with torch.device("meta"):
        assert table().is_meta
    gone = weakref.ref(first)
    del first, others
    assert gone() is None


def test_rope_truncates_like_the_host_when_asked() -> None:
    """1.75 * (1 + 2^-7) lies three quarters of the way between two bfloat16 values."""
    query = torch.full((1, 32), 1.75, dtype=torch.bfloat16)
    table = torch.tensor([1.0078125] * 16 + [0.0] * 16, dtype=torch.bfloat16)[None]
    reference = registry.get("rotary_emb").reference
    args = (torch.zeros(1, dtype=torch.int64), query, None, 32, table, True, True, False)
    assert (reference(*args)[0] == 1.765625).all()
    assert (reference(*args, truncates=True)[0] == 1.7578125).all()


def test_sglang_rope_offsets_and_fused_store() -> None:
    module = build("rotary_emb", "SGLangRotaryEmbedding", 32, 32, 64, 10000, False, torch.float32)
    q, k = torch.randn(3, 64), torch.randn(3, 32)
    shifted = module(torch.arange(3) + 5, q.clone(), k.clone())
    offset = module(torch.arange(3), q.clone(), k.clone(), torch.full((3,), 5))
    assert all(torch.equal(a, b) for a, b in zip(shifted, offset, strict=True))
    with pytest.raises(ValueError, match="fused_set_kv_buffer_arg"):
        module(torch.arange(3), q, k, None, object())


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("silu_and_mul", (torch.ones(2, 3),), r"2 \* d\], got shape \(2, 3\)"),
        (
            "rotary_emb",
            (torch.arange(2), torch.ones(2, 33), None, 32, torch.ones(4, 32), True),
            "heads of 32",
        ),
        (
            "rotary_emb",
            (torch.arange(2), torch.ones(2, 32), None, 32, torch.ones(4, 64), True),
            "rotary_dim 64",
        ),
        (
            "store_kvcache",
            (
                torch.ones(2, 1, 4),
                torch.ones(2, 1, 4),
                torch.ones(3, 2, 1, 5),
                torch.ones(3, 2, 1, 5),
                torch.arange(2),
            ),
            r"caches \(3, 2, 1, 5\)",
        ),
    ],
)
def test_bad_shapes_are_said(name: str, args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.get(name).op(*args)


@pytest.mark.parametrize("name", ["attention_prefill", "attention_decode"])
def test_attention_reads_nothing_behind_a_sequence(name: str) -> None:
    spec = registry.get(name)
    case = next(c for c in spec.cases if c.name == "smollm2")
    args = make_args(spec, case)
    want = spec.op(*args)
    table = next(a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2)
    lens, block_size = case.dims["seq_lens"], case.dims["block_size"]
    used = torch.zeros(args[1].shape[:2], dtype=torch.bool)
    for row, n in zip(table, lens, strict=True):
        for i in range(n):
            used[row[i // block_size], i % block_size] = True
    args[1][~used] = float("nan")
    args[2][~used] = float("nan")
    assert torch.equal(spec.op(*args), want)


def test_attention_is_sdpa() -> None:
    q, k, v = torch.randn(9, 6, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 9], [40], [[3, 0, 2, 1, 4]])]
    cache = torch.zeros(2, 5, 8, 2, 32)
    cache[:, ints[2][0].long()] = torch.stack((k, v)).view(2, 5, 8, 2, 32)
    heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    mask = torch.ones(9, 40).tril(31).bool()
    want = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    got = registry.get("attention_prefill").op(q, cache[0], cache[1], *ints, 9, 40, 32**-0.5)
    torch.testing.assert_close(got, want)
    last = registry.get("attention_decode").op(q[8:], cache[0], cache[1], ints[1], ints[2], 40, 32**-0.5)
    torch.testing.assert_close(last[0], want[8])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_every_provider_on_the_gpu(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # on by default: convolutions of the references
    spec = registry.get(name)
    op: Op = spec.op
    for provider in op.providers:
        args = make_args(spec, case, "cuda")
        if provider.unavailable("cuda") or (provider.supports and provider.supports(*args)):
            continue
        check(spec, case, provider.fn, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), FIRST, ids=FIRST_IDS)
def test_cuda_graph_replay(name: str, case: Case) -> None:
    torch.use_deterministic_algorithms(False)
    spec = registry.get(name)
    args, fresh = make_args(spec, case, "cuda"), make_args(spec, case, "cuda", seed=1)
    spec.op(*args)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call(spec.op, spec.op, args)
    for a, b in zip(args, fresh, strict=True):
        if isinstance(a, torch.Tensor):
            a.copy_(b)
    want = oracle(spec, fresh)
    graph.replay()
    assert mismatch(spec, case, outs, want) is None
