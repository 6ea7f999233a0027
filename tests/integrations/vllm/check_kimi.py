"""vLLM's layer of Kimi delta attention: its class, weights and states, against the recurrence in float64.

vLLM's CPU build makes no Kimi-Linear (its model needs cutlass), and runs no Triton kernel: the layer alone, which is
unpatched until `apply`, with its two other functions for GPUs (initial states, the gated norm's kernel) in PyTorch.
"""

import pytest
import torch
import torch.nn.functional as F
from fk_integrations.patching.apply import apply
from fk_integrations.vllm.host import VllmAdapter
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as host
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from fastkernels.patch import Request

HEADS, SIZE, WIDTH, HIDDEN = 3, 16, 4, 48
PREFIX = "model.layers.0.self_attn"
OPS = ("kda", "causal_conv1d")
KDA = ("chunk_kda_with_fused_gate", "fused_recurrent_kda_packed_decode")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    _custom_ops._supports_onednn = False  # else vLLM packs linear layers and frees their weights
    found = VllmConfig()
    with set_current_vllm_config(found):
        file = tmp_path_factory.mktemp("ranks") / "store"
        init_distributed_environment(1, 0, f"file://{file}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield found


def gathered(state, indices, has):
    return torch.where(has.view(-1, 1, 1, 1), state[indices.long()], 0)


@pytest.fixture(params=[None, -5.0], ids=["unbounded", "bounded"])
def layer(request, config, monkeypatch):
    monkeypatch.setattr(host, "gather_initial_states", gathered)
    linear = {"kda_layers": [1], "full_attn_layers": [], "num_heads": HEADS, "head_dim": SIZE}
    linear |= {"short_conv_kernel_size": WIDTH, "gate_lower_bound": request.param}
    config.compilation_config.static_forward_context.pop(PREFIX, None)
    given = KimiLinearConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, linear_attn_config=linear)
    made = host.KimiGatedDeltaNetAttention(given, config, PREFIX)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator).float()
    for module in made.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
    shapes = made.get_state_shape()
    made.kv_cache = tuple(torch.randn(5, *shape, generator=generator) for shape in shapes)
    return made


def patched(layer):
    return apply(VllmAdapter(), torch.nn.ModuleList([layer]), Request("patch", ops=OPS))


def run(layer, config, x, lengths, slots, started):
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    one = all(n == 1 for n in lengths) and all(started)
    more = {"num_prefills": 0 if one else len(lengths), "num_decodes": len(lengths) if one else 0}
    more |= {"num_prefill_tokens": 0 if one else len(x), "num_decode_tokens": len(x) if one else 0}
    batch = GDNAttentionMetadata(
        **more, num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=len(x),
        has_initial_state=torch.tensor(started), non_spec_query_start_loc=borders,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip
    with torch.no_grad(), set_forward_context({PREFIX: batch}, config, num_tokens=len(x)):
        return layer(x, torch.arange(len(x)))


def expected(layer, x, conv, state):
    """The layer in float64 for one sequence, from the last inputs of its convolution [3 H K, W - 1] and its state."""
    weight = {n: p.detach().double() for n, p in layer.named_parameters()}
    x, width = x.double(), HEADS * SIZE
    rows = x @ weight["in_proj_qkvgfab.weight"].T
    mixed, beta, low = rows.split([3 * width, HEADS, SIZE], 1)
    padded = torch.cat([conv.double(), mixed.T], 1)
    mixed = F.silu(F.conv1d(padded[None], weight["conv1d.weight"], groups=3 * width)[0]).T
    q, k, v = (part.unflatten(1, (HEADS, SIZE)) for part in mixed.split(width, 1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    steps = (low @ weight["f_b_proj.weight"].T + weight["dt_bias"]).unflatten(1, (HEADS, SIZE))
    rate = weight["A_log"].exp()[:, None]
    bound = layer.gate_lower_bound
    g = -rate * F.softplus(steps) if bound is None else bound * (rate * steps).sigmoid()
    state, out = state.double().transpose(1, 2), []  # [H, K, V]
    for t in range(len(x)):
        state = state * g[t].exp()[..., None]
        write = beta[t].sigmoid()[:, None] * (v[t] - (state * k[t][..., None]).sum(1))
        state = state + k[t][..., None] * write[:, None]
        out.append((state * q[t][..., None]).sum(1) * SIZE**-0.5)
    out = torch.stack(out)
    out = out * (out.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * weight["o_norm.weight"]
    gate = (x @ weight["g_a_proj.weight"].T @ weight["g_b_proj.weight"].T).sigmoid()
    return (out.flatten(1) * gate) @ weight["o_proj.weight"].T, padded[:, 1 - WIDTH :], state.transpose(1, 2)


def test_layer_is_patched_proved_and_undone(layer, config):
    kind = type(layer)
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    before = [getattr(kda, name) for name in KDA]
    made = patched(layer)
    oriented = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2)
    torch.manual_seed(1)
    # Two prompts, one of a part before; then a token of each; slot 4 stays.
    known = {2: (oriented[2].clone(), layer.kv_cache[1][2].clone())}
    known[1] = tuple(torch.zeros_like(t) for t in known[2])
    kept = [t[4].clone() for t in layer.kv_cache]
    for lengths, started in (((70, 3), (False, True)), ((1, 1), (True, True)), ((1, 1), (True, True))):
        x = torch.randn(sum(lengths), HIDDEN)
        found = run(layer, config, x, lengths, (1, 2), started)
        for slot, part, ours in zip((1, 2), x.split(lengths), found.split(lengths), strict=True):
            want, *known[slot] = expected(layer, part, *known[slot])
            torch.testing.assert_close(ours, want.float(), atol=2e-5, rtol=2e-4)
            torch.testing.assert_close(layer.kv_cache[1][slot], known[slot][1].float(), atol=2e-5, rtol=2e-4)
    assert all(torch.equal(t[4], old) for t, old in zip(layer.kv_cache, kept, strict=True))
    rows = {r["host_class"]: r for r in made.report() if r["modules"]}
    assert {name: rows[name]["calls"] for name in KDA} == {KDA[0]: 1, KDA[1]: 2}
    assert all(r["proof"] == "calls" and not r["fallbacks"] for r in rows.values())
    assert sum(r["calls"] for n, r in rows.items() if n.startswith("causal_conv1d")) == 5
    assert [getattr(kda, name) for name in KDA] == before  # other layers keep them
    assert not any("fastkernels" in name for name in KimiK3DeltaAttention._forward.__code__.co_names)
    made.undo()
    assert type(layer) is kind
    assert not any("fastkernels" in name for name in type(layer)._forward.__code__.co_names)
