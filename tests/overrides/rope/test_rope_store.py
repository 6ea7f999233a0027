"""rope_store_kvcache: equal bits to the ops that it fuses, and the layers that use it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import warm
from support.kernels.op_cases import make_args
from support.modules import CONFIG, bind_cache, fill, metadata, randn

from fastkernels.core import dispatch, registry
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import forward_context
from fastkernels.core.spec import Case
from fastkernels.overrides.block.vllm import VllmLlamaDecoderLayer, VllmQwen3DecoderLayer
from fastkernels.overrides.cache import store_kvcache
from fastkernels.overrides.norm import gemma_rms_norm, rms_norm
from fastkernels.overrides.rope import rope_store_kvcache, rotary_emb
from fastkernels.overrides.rope import vllm as vllm_rope

SPEC = registry.get("rope_store_kvcache")
ODD = [case for case in SPEC.cases if "odd" in case.tags]
SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "rope_store_cases.py"
REQUESTED = "rope_store_kvcache:reference"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("FASTKERNELS_PROVIDER", "FASTKERNELS_DISABLE", "FASTKERNELS_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    yield
    monkeypatch.undo()
    for op in OPS.values():
        op.set_candidate(None)
        op.reset()


@pytest.mark.parametrize("case", ODD, ids=lambda c: c.name)
def test_reference_equals_the_separate_ops(case: Any) -> None:
    args = make_args(SPEC, case)
    _, query, key, value, *caches = (a.clone() for a in args[:6])
    slots, table, neox, q_weight, k_weight, eps, *scales, offset, norm_value = args[6:]
    if q_weight is not None and offset:
        query, key = (gemma_rms_norm._reference(x, w, eps) for x, w in ((query, q_weight), (key, k_weight)))
    elif q_weight is not None:
        query = rms_norm._reference(query, q_weight, eps, None, None, False)
        key = rms_norm._reference(key, k_weight, eps, None, None, False)
    value = rms_norm._reference(value, None, eps) if norm_value else value
    rotary_emb.rotate_in_place(args[0], query, key, query.shape[-1], table, neox)
    store_kvcache.store_in_place(key, value, *caches, slots, *scales)
    rope_store_kvcache._reference(*args)
    for got, want in zip((args[1], *args[4:6]), (query, *caches), strict=True):
        assert torch.equal(got.float(), want.float())


def test_kernel_equals_the_separate_kernels() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env)
    assert done.returncode == 0, done.stderr
    found = {r["case"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}
    assert len(found) == len(ODD) - 1 and {c: p for c, p in found.items() if p} == {}


def test_mismatched_arguments_raise() -> None:
    args = make_args(SPEC, ODD[1])
    for i, wrong, message in (
        (0, args[0][1:], "positions"),
        (3, args[3][1:], "key and value"),
        (6, args[6][1:], "slot_mapping"),
        (9, torch.ones(64), "both or not at all"),
        (7, torch.ones(4096, 128), "rotary_dim 128"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_store_kvcache.rope_store_kvcache(*args[:i], wrong, *args[i + 1 :])


# -- in a layer


def ran(kind: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Run a layer's prefill and decode. Return outputs and cache, and the calls of the ops."""
    layer: Any = {
        "llama": lambda: VllmLlamaDecoderLayer(None, "model.layers.0", config=CONFIG),
        "qwen3": lambda: VllmQwen3DecoderLayer(CONFIG, prefix="model.layers.0"),
    }[kind]()
    fill(layer)
    bind_cache(layer, 8, 4)
    for op in OPS.values():
        op.calls = 0
    outs = []
    with torch.inference_mode():
        for queries, lengths in (([5, 3], [5, 3]), ([1, 1], [6, 4])):
            step = metadata(queries, lengths, 4)
            positions = torch.cat([torch.arange(k - n, k) for n, k in zip(queries, lengths, strict=True)])
            with forward_context(step):
                outs += layer(positions, randn(len(positions), CONFIG.hidden_size, seed=sum(lengths)), None)
    names = ("rope_store_kvcache", "rotary_emb", "store_kvcache")
    return [*outs, *layer.self_attn.attn.kv_cache], {name: OPS[name].calls for name in names}


FUSED = {"rope_store_kvcache": 2, "rotary_emb": 0, "store_kvcache": 0}
APART = {"rope_store_kvcache": 0, "rotary_emb": 2, "store_kvcache": 2}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layer_with_the_fused_op_equals_the_separate_ops(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, calls = ran(kind)
    assert calls == APART  # by default not on a CPU, which gains nothing
    monkeypatch.setenv("FASTKERNELS_PROVIDER", REQUESTED)
    OPS["rope_store_kvcache"].reset()
    got, calls = ran(kind)
    assert calls == FUSED
    # Qwen3's norms of queries and keys are C++ on a CPU, and round otherwise than those inside the fused op.
    limit = 1e-6 if kind == "qwen3" else 0.0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_DISABLE", "rope_store_kvcache")


def _named_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", f"{REQUESTED},store_kvcache:reference")


def _candidate_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary_emb.rotary_emb.set_candidate(rotary_emb.rotate_in_place)


def _candidate_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    rms_norm.rms_norm.set_candidate(rms_norm._reference)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_around", lambda op, provider: provider)


def _other_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's module is a subclass of ours, as with a candidate's class."""
    ours = vllm_rope.VllmRotaryEmbedding
    live = type("VllmRotaryEmbedding", (ours,), {"forward": ours.forward})
    monkeypatch.setattr(vllm_rope, "VllmRotaryEmbedding", live)


@pytest.mark.parametrize(
    "requested", [_off, _named_part, _candidate_of_a_part, _candidate_of_a_norm, _recorded, _other_class]
)
def test_layer_calls_separate_ops_if_one_is_requested(
    requested: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", REQUESTED)
    requested(monkeypatch)
    for op in OPS.values():
        op.forget()
    _, calls = ran("qwen3")
    assert calls == APART


def test_candidate_of_an_unused_norm_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", REQUESTED)
    _candidate_of_a_norm(monkeypatch)
    OPS["rope_store_kvcache"].reset()
    assert ran("llama")[1] == FUSED


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("norms", [False, True])
def test_gpu_kernel_equals_the_separate_kernels(tokens: int, norms: bool) -> None:
    dims = {"tokens": tokens, "heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16, "norms": norms}
    args = make_args(SPEC, Case("gpu", dims), "cuda")
    _, query, key, value, *caches = (a.clone() for a in args[:6])
    if norms:
        query, key = (
            rms_norm._triton(x, w, args[11], None, None, False)
            for x, w in ((query, args[9]), (key, args[10]))
        )
    rotary_emb._triton(args[0], query, key, 128, args[7], True)
    store_kvcache._triton(key, value, *caches, args[6])
    rope_store_kvcache._triton(*args)
    for got, want in zip((args[1], *args[4:6]), (query, *caches), strict=True):
        if norms:
            # A separate norm is rounded before the rotation: half a unit of up to 4, in both of a pair.
            torch.testing.assert_close(got.float(), want.float(), rtol=1.6e-2, atol=1.6e-2)
        else:
            assert torch.equal(got, want)


def test_graph_has_one_size_for_all_tokens() -> None:
    """As of a host's own arithmetic; see rotary_emb's test."""
    torch._dynamo.reset()
    args = make_args(SPEC, next(case for case in ODD if case.dims["tokens"] > 1))
    first = [*(x.contiguous() for x in args[:4]), args[6]]
    sizes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]
        of_tensors = [x.shape[0] for x in values if isinstance(x, torch.Tensor)]
        sizes.extend(str(n) for n in of_tensors if isinstance(n, torch.SymInt))
        return graph.forward

    def stored(*x: torch.Tensor) -> None:
        rope_store_kvcache.rope_store_kvcache(*x[:4], *args[4:6], x[4], *args[7:])

    for x in first:
        torch._dynamo.mark_dynamic(x, 0)
    torch.compile(stored, backend=backend, fullgraph=True)(*first)
    assert len(sizes) == 5 and len({*sizes}) == 1, sizes
