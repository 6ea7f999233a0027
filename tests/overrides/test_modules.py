"""Tests of modules against plain float32 PyTorch: values at odd sizes, state-dict names, loaders, errors."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.modules import CONFIG, bind_cache, close, fill, metadata, randn
from torch import nn

from fastkernels.core import registry
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import forward_context
from fastkernels.overrides.attention.sglang import SGLangRadixAttention
from fastkernels.overrides.attention.vllm import VllmAttention
from fastkernels.overrides.block import gated_mlp
from fastkernels.overrides.block.transformers import (
    TransformersGemmaMLP,
    TransformersGraniteMoeSharedMLP,
    TransformersIdefics2MLP,
    TransformersLlamaMLP,
    TransformersPhi3MLP,
)
from fastkernels.overrides.block.vllm import VllmLlamaMLP
from fastkernels.overrides.embedding import sglang, vllm
from fastkernels.overrides.linear import sglang as sglang_linear
from fastkernels.overrides.linear import vllm as vllm_linear

pytestmark = pytest.mark.timeout(120)
OWN = (
    "linear",
    "embedding",
    "logits_processor",
    "parallel_linear",
    "attention",
    "gated_mlp",
    "llama_decoder_layer",
    "qwen3_decoder_layer",
)
CONSTRUCTOR: dict[str, tuple[Any, ...]] = {
    "ReplicatedLinear": (5, 7), "ColumnParallelLinear": (5, 7), "MergedColumnParallelLinear": (5, [7, 3]),
    "QKVParallelLinear": (12, 4, 6, 2), "RowParallelLinear": (5, 7), "VocabParallelEmbedding": (130, 9),
    "ParallelLMHead": (130, 9), "Attention": (6, 12, 0.3), "RadixAttention": (6, 12, 0.3, 2, 0),
    "LlamaMLP": (9, 5, "silu"),
    "LlamaDecoderLayer": (CONFIG,), "UnquantizedLinearMethod": (), "UnquantizedEmbeddingMethod": (),
    "LogitsProcessor": (130,), "SwiGLU": (9, 5), "GluMlp": (9, 10, None, nn.SiLU, None, True, 0.0, False, False),
}  # fmt: skip


TARGETS = sorted(
    {(name, t.host, t.cls, t.path.partition(":")[2]) for name in OWN for t in registry.get(name).targets}
)


@pytest.mark.parametrize(("op", "host", "cls", "host_name"), TARGETS, ids=lambda v: str(v))
def test_every_class_constructs(op: str, host: str, cls: str, host_name: str) -> None:
    args = CONSTRUCTOR.get(host_name, (CONFIG,))
    if host_name == "Idefics2MLP":
        args = (9, 5, 9, "silu")
    elif host == "transformers" or (host, host_name) == ("sglang", "LogitsProcessor"):
        args = (CONFIG,)
    if (host, host_name) == ("vllm", "LlamaDecoderLayer"):
        args = (None, "model.layers.0", CONFIG)
    made = registry.op_class(op, cls)(*args)
    if isinstance(made, nn.Module):
        assert all(k.split(".")[-1] in ("weight", "bias") for k in made.state_dict() if "rotary" not in k)


LINEARS = sorted({(t.cls, t.path.partition(":")[2], t.host) for t in registry.get("parallel_linear").targets})


@pytest.mark.parametrize(("cls", "host_name", "host"), LINEARS, ids=lambda v: str(v))
@pytest.mark.parametrize("skip_bias_add", [False, True])
@torch.inference_mode()
def test_linear_classes_equal_torch(cls: str, host_name: str, host: str, skip_bias_add: bool) -> None:
    module = registry.op_class("parallel_linear", cls)(*CONSTRUCTOR[host_name], skip_bias_add=skip_bias_add)
    state = fill(module)
    assert list(state) == ["weight", "bias"]
    x = randn(3, state["weight"].shape[1], seed=9)
    out, bias = module(x)
    assert (bias is module.bias) if skip_bias_add else bias is None
    close(out, F.linear(x, state["weight"], None if skip_bias_add else state["bias"]))
    if host == "vllm":
        module.return_bias = False
        assert torch.is_tensor(module(x))


@torch.inference_mode()
def test_linear_loaders_place_shards() -> None:
    merged = vllm_linear.VllmMergedColumnParallelLinear(5, [7, 3, 2], bias=False)
    parts = [randn(n, 5, seed=n) for n in (7, 3, 2)]
    merged.weight_loader(merged.weight, torch.cat(parts[1:]), (1, 2))
    merged.weight_loader(merged.weight, parts[0], 0)
    assert torch.equal(merged.weight, torch.cat(parts))
    merged.weight.zero_()
    merged.weight.weight_loader(merged.weight, torch.cat(parts))
    assert torch.equal(merged.weight, torch.cat(parts))
    with pytest.raises(ValueError, match=r"shard id 3 is not in 0 \.\. 2"):
        merged.weight_loader(merged.weight, parts[0], 3)
    with pytest.raises(ValueError, match=r"7 \+ 3 \+ 2 rows"):
        merged.weight_loader(merged.weight, parts[0])
    qkv = sglang_linear.SGLangQKVParallelLinear(12, 4, 6, 2, prefix="qkv_proj")
    with pytest.raises(ValueError, match="shard id 'x' is not 'q', 'k' or 'v'"):
        qkv.weight_loader(qkv.weight, randn(8, 12), "x")
    with pytest.raises(ValueError, match=r"qkv_proj: weight of shape \(9, 12\)"):
        qkv.weight_loader(qkv.weight, randn(9, 12), "k")
    with pytest.raises(ValueError, match="quantized"):
        vllm_linear.VllmReplicatedLinear(5, 7, quant_config="fp8")
    with pytest.raises(ValueError, match="parallel_group 'other'"):
        sglang_linear.SGLangColumnParallelLinear(5, 7, parallel_group="other")
    row = sglang_linear.SGLangRowParallelLinear(5, 7, bias=False)
    fill(row)
    x, out = randn(2, 5), torch.empty(2, 7)
    assert row(x, output_tensor=out)[0] is out
    close(out, x @ row.weight.t())


def test_quant_methods_reject_unsupported_modules() -> None:
    module = vllm_linear.VllmReplicatedLinear(5, 7)
    method = vllm_linear.VllmUnquantizedLinearMethod
    assert method.supports(module) is None
    module.use_intel_amx_backend = True
    assert "AMX" in (method.supports(module) or "")
    freed = vllm_linear.VllmReplicatedLinear(5, 7)
    freed.weight = nn.Parameter(torch.empty(0))
    assert "packed or freed" in (method.supports(freed) or "")
    plain = nn.Linear(5, 7)
    assert "quant_method is builtins.NoneType" in (method.supports(plain) or "")
    lookup = vllm.VllmUnquantizedEmbeddingMethod
    assert lookup.supports(vllm.VllmVocabParallelEmbedding(130, 9)) is None


@torch.inference_mode()
def test_embeddings_equal_rows_of_the_table() -> None:
    embed = vllm.VllmVocabParallelEmbedding(130, 9)
    assert embed.weight.shape == (192, 9)
    table = randn(130, 9)
    embed.weight.weight_loader(embed.weight, table)
    assert not embed.weight[130:].any()
    ids = torch.tensor([[0, 129], [64, 7]])
    assert torch.equal(embed(ids), table[ids]) and torch.equal(embed(ids.int()), table[ids])
    with pytest.raises(ValueError, match=r"\(129, 9\) does not fit, expected \(130, 9\)"):
        embed.weight_loader(embed.weight, table[:129])
    wide = sglang.SGLangVocabParallelEmbedding(130, 9, output_dtype=torch.float64)
    wide.weight_loader(wide.weight, table)
    assert wide(ids).dtype == torch.float64
    with pytest.raises(RuntimeError, match="LogitsProcessor"):
        vllm.VllmParallelLMHead(130, 9)(ids)


@torch.inference_mode()
def test_logits_processors_equal_torch() -> None:
    head = vllm.VllmParallelLMHead(130, 9)
    head.weight_loader(head.weight, randn(130, 9))
    hidden = randn(6, 9, seed=2)
    logits = hidden @ randn(130, 9).t()
    close(vllm.VllmLogitsProcessor(130)(head, hidden), logits)
    close(
        vllm.VllmLogitsProcessor_0_26(130, scale=2.0, soft_cap=1.5)(head, hidden),
        3 * torch.tanh(logits / 1.5),
    )
    close(vllm.VllmLogitsProcessor(130, scale=2.0, logits_as_input=True)(head, logits), 2 * logits)
    config = SimpleNamespace(vocab_size=130, final_logit_softcapping=1.5)
    ours = sglang.SGLangLogitsProcessor(config, logit_scale=2.0)
    expected = 1.5 * torch.tanh(2 * logits / 1.5)
    close(ours(None, hidden, head, SimpleNamespace(extend_seq_lens=None)).next_token_logits, expected)
    prefill = SimpleNamespace(extend_seq_lens=torch.tensor([2, 1, 3]))
    close(ours(None, hidden, head, prefill).next_token_logits, expected[[1, 2, 5]])
    with pytest.raises(ValueError, match="log-probabilities"):
        ours(None, hidden, head, SimpleNamespace(extend_return_logprob=True))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from the last Tq of Tk positions: q [Tq, H, D], k and v [Tk, Hkv, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1).transpose(0, 1) for t in (k, v))
    mask = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[0])
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(q.shape[0], -1)


@pytest.mark.parametrize("host", ["vllm", "sglang"])
@torch.inference_mode()
def test_attention_prefill_then_decode_equals_torch(host: str) -> None:
    heads, kv_heads, size, lens = 6, 2, 12, [5, 1, 9]
    make = {
        "vllm": lambda: VllmAttention(heads, size, 0.3, kv_heads),
        "sglang": lambda: SGLangRadixAttention(heads, size, 0.3, kv_heads, 0),
    }[host]
    module = make()
    call = (lambda *t: module(*t, None)) if host == "sglang" else module
    with pytest.raises(RuntimeError, match="no KV cache is bound"), forward_context(metadata([1], [1], 4)):
        call(*(randn(1, n * size) for n in (heads, kv_heads, kv_heads)))
    bind_cache(module, 16, 4)
    total = sum(lens) + len(lens)
    q, k, v = (randn(total, n * size, seed=n + i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    rows = torch.arange(total).split([n + 1 for n in lens])  # a sequence's prompt and one more token
    prompt, last = torch.cat([r[:-1] for r in rows]), torch.stack([r[-1] for r in rows])
    with forward_context(metadata(lens, lens, 4)):
        first = call(q[prompt], k[prompt], v[prompt])
    with forward_context(metadata([1] * 3, [n + 1 for n in lens], 4)):
        second = call(q[last], k[last], v[last])
    for i, r in enumerate(rows):
        expected = causal(q[r].view(-1, heads, size), *(t[r].view(-1, kv_heads, size) for t in (k, v)), 0.3)
        start = sum(lens[:i])
        close(first[start : start + lens[i]], expected[:-1])
        close(second[i], expected[-1])


def test_attention_rejects_unsupported_arguments() -> None:
    with pytest.raises(ValueError, match="1 ALiBi slopes for 6 heads"):
        VllmAttention(6, 12, 0.3, alibi_slopes=[0.1])
    with pytest.raises(ValueError, match="use_alibi_sqrt"):
        VllmAttention(6, 12, 0.3, alibi_slopes=[0.1] * 6, use_alibi_sqrt=True)
    with pytest.raises(ValueError, match="is_cross_attention=True"):
        SGLangRadixAttention(6, 12, 0.3, 2, 0, is_cross_attention=True)
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        VllmAttention(6, 12, 0.3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", ["VllmLlamaMLP", "SGLangLlamaMLP_0_5_16", "SGLangLlamaMLP"])
@torch.inference_mode()
def test_gated_mlp_equals_reference(cls: str, dtype: torch.dtype) -> None:
    kind = registry.op_class("gated_mlp", cls)
    mlp = kind(63, 50, "silu")
    state = fill(mlp)
    assert sorted(state) == ["down_proj.weight", "gate_up_proj.weight"]
    x = randn(5, 63, seed=8).to(dtype)
    mlp = mlp.to(dtype)
    gate_up, down = mlp.gate_up_proj.weight, mlp.down_proj.weight
    expected = gated_mlp.reference(x.double(), gate_up.double(), down.double())
    close(mlp(x).double(), expected, 1e-5 if dtype == torch.float32 else 1.6e-2)
    assert kind.supports(mlp) is None
    mlp.act_fn = nn.GELU()
    assert "not SiluAndMul" in kind.supports(mlp)
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        kind(63, 50, "gelu")


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2"])
@torch.inference_mode()
def test_gated_mlp_equals_transformers(model: str) -> None:
    target = next(t for t in registry.get("gated_mlp").targets if f".{model}." in t.path)
    module, _, name = target.path.partition(":")
    host = getattr(importlib.import_module(module), name)(CONFIG)
    ours = TransformersLlamaMLP(CONFIG)
    ours.load_state_dict(fill(host))
    assert TransformersLlamaMLP.supports(host) is None
    x = randn(2, 3, 72, seed=4)
    before = OPS["silu_and_mul"].calls
    close(TransformersLlamaMLP.forward(host, x), host(x))
    close(ours(x), host(x))
    with torch.inference_mode(False), torch.enable_grad():
        close(ours(x.clone()), host(x))
    assert OPS["silu_and_mul"].calls == before + 3
    host.up_proj = nn.Identity()
    assert "up_proj is Identity" in (TransformersLlamaMLP.supports(host) or "")


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
@torch.inference_mode()
def test_gelu_mlp_equals_transformers(act: str) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    config = SimpleNamespace(**{**vars(CONFIG), "hidden_act": act})
    host, ours = GemmaMLP(config), TransformersGemmaMLP(config)
    ours.load_state_dict(fill(host))
    assert TransformersGemmaMLP.supports(host) is None and TransformersGemmaMLP.is_for(host)
    assert not TransformersLlamaMLP.is_for(host)
    x, before = randn(2, 3, 72, seed=4), OPS["gelu_and_mul"].calls
    close(TransformersGemmaMLP.forward(host, x), host(x))
    close(ours(x), host(x))
    assert OPS["gelu_and_mul"].calls == before + 2
    with pytest.raises(ValueError, match="hidden_act 'silu' is not supported, only gelu"):
        TransformersGemmaMLP(CONFIG)


@torch.inference_mode()
def test_packed_and_idefics_mlps_equal_transformers() -> None:
    from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP
    from transformers.models.idefics2.modeling_idefics2 import Idefics2MLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    for host, ours in (
        (Phi3MLP(CONFIG), TransformersPhi3MLP(CONFIG)),
        (GraniteMoeSharedMLP(CONFIG), TransformersGraniteMoeSharedMLP(CONFIG)),
        (Idefics2MLP(72, 50, 9, "silu"), TransformersIdefics2MLP(72, 50, 9, "silu")),
    ):
        ours.load_state_dict(fill(host))
        assert type(ours).supports(host) is None
        x = randn(2, 3, 72, seed=4)
        close(type(ours).forward(host, x), host(x))
        close(ours(x), host(x))


@pytest.mark.parametrize(
    "make",
    [lambda: TransformersLlamaMLP(CONFIG), lambda: VllmLlamaMLP(72, 100, "silu")],
    ids=["transformers", "vllm"],
)
@torch.inference_mode()
def test_gated_mlp_compiles_as_one_graph(make: Any) -> None:
    mlp = make()
    fill(mlp)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    before = OPS["silu_and_mul"].calls
    for tokens in (3, 7):
        x = randn(tokens, 72)
        close(compiled(x), mlp(x))
    assert OPS["silu_and_mul"].calls == before + 4
