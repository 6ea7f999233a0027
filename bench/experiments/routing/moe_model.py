"""A Mixtral for training in plain PyTorch, saved in the format of transformers' MixtralForCausalLM."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SHARD = 14 << 20  # bytes of one file of weights


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    inner: int = 192  # of one expert
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    vocab: int = 4096
    theta: float = 10000.0
    eps: float = 1e-5


# Experts and choices as in Mixtral-8x7B and Qwen3-30B-A3B, in small sizes.
PRESETS = {
    "e8k2": Sizes(),
    "e128k8": Sizes(inner=32, layers=4, experts=128, top_k=8),
    "tiny": Sizes(64, 32, 2, 2, 1, 32, 16, 2, 512),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, heads, S, D] by cos, sin [S, D / 2]; pairs are the two halves."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def loop_experts(x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """x: [T, H], ids: [T, K]. Return [T, K, H], computed expert by expert."""
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=len(w13)).tolist()
    outs = []
    for expert, rows in enumerate(x[order // ids.shape[1]].split(counts)):
        gate, up = F.linear(rows, w13[expert]).chunk(2, dim=-1)
        outs.append(F.linear(F.silu(gate) * up, w2[expert]))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return torch.cat(outs)[back].view(*ids.shape, -1)


def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, align: int = 16
) -> torch.Tensor:
    """Like loop_experts, in two grouped products without synchronization; experts' rows start at multiples of `align`.

    Padding rows are zeros; rows behind the last expert's are never read, forward or backward.
    """
    flat = ids.reshape(-1)
    experts, pairs = len(w13), flat.numel()
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    padded = (counts + align - 1) // align * align
    ends, begins = padded.cumsum(0), counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
    expert = flat[order]
    to = (ends - padded)[expert] + torch.arange(pairs, device=x.device) - begins[expert]
    rows = x.new_zeros(-(-pairs // align) * align + experts * align, x.shape[1])
    rows = rows.index_copy(0, to, x[order // ids.shape[1]])
    offs = ends.to(torch.int32)
    gate, up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=offs).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)
    back = torch.empty_like(to).scatter_(0, order, to)
    return out[back].view(*ids.shape, -1)


def grouped_works(device: torch.device, dtype: torch.dtype) -> str:
    """Return '' if grouped_experts equals loop_experts on this device, forward and backward; else the difference."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        made = torch.randn(*size, generator=generator, device=device) / 8
        return made.to(dtype).requires_grad_()

    x, w13, w2 = randn(300, 64), randn(16, 64, 64), randn(16, 64, 32)
    scores = torch.rand(300, 16, generator=generator, device=device)
    scores[:, 3] = -1.0  # an expert without tokens
    ids = scores.topk(3).indices
    try:
        found = []
        for experts in (loop_experts, grouped_experts):
            out = experts(x, ids, w13, w2)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, w13, w2))))
        for a, b in zip(*found, strict=True):
            gap = (a.float() - b.float()).abs().max().item() / max(a.float().abs().max().item(), 1e-9)
            if not gap < 0.03:
                return f"relative difference {gap:.3g}"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


class Layer(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        for name, shape in {
            "q": (q, s.hidden), "k": (kv, s.hidden), "v": (kv, s.hidden), "o": (s.hidden, q),
            "gate": (s.experts, s.hidden), "w13": (s.experts, 2 * s.inner, s.hidden),
            "w2": (s.experts, s.hidden, s.inner),
        }.items():  # fmt: skip
            last = name in ("o", "w2")
            std = 0.02 / (2 * s.layers) ** 0.5 if last else 0.02
            self.register_parameter(name, nn.Parameter(torch.randn(*shape) * std))
        self.norm1, self.norm2 = nn.Parameter(torch.ones(s.hidden)), nn.Parameter(torch.ones(s.hidden))

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        s, (batch, length, _) = self.s, x.shape

        def heads(w: torch.Tensor, n: int) -> torch.Tensor:
            return F.linear(x, w.to(x.dtype)).view(batch, length, n, s.head_dim).transpose(1, 2)

        q, k = rotate(heads(self.q, s.heads), cos, sin), rotate(heads(self.k, s.kv_heads), cos, sin)
        v, groups = heads(self.v, s.kv_heads), s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(batch, length, -1), self.o.to(x.dtype))

    def moe(self, x: torch.Tensor, experts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        """x: [T, H]. Return the output, the balancing loss of Switch Transformers (eq. 4) and the ids [T, K]."""
        probs = F.linear(x, self.gate.to(x.dtype)).float().softmax(dim=-1)
        weights, ids = probs.topk(self.s.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        with torch.no_grad():
            counts = torch.zeros(self.s.experts, device=x.device)
            counts.scatter_add_(0, ids.reshape(-1), torch.ones(ids.numel(), device=x.device))
        balance = self.s.experts * (counts / len(x) * probs.mean(dim=0)).sum()
        y = experts(x, ids, self.w13.to(x.dtype), self.w2.to(x.dtype))
        return (y * weights[..., None].to(x.dtype)).sum(dim=1), balance, ids

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, experts):  # type: ignore[no-untyped-def]
        x = x + self.attention(rms_norm(x, self.norm1, self.s.eps), cos, sin)
        y, balance, ids = self.moe(rms_norm(x, self.norm2, self.s.eps).flatten(0, 1), experts)
        return x + y.view(x.shape), balance, ids


class Model(nn.Module):
    """Float32 master weights; `dtype` is the compute dtype. The head shares the embedding's matrix."""

    def __init__(self, s: Sizes, dtype: torch.dtype, experts=loop_experts) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.s, self.dtype, self.experts = s, dtype, experts
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """tokens: [B, S]. Returns hidden states [B, S, H], the mean balancing loss, and each layer's ids [B * S, K]."""
        half = self.s.head_dim // 2
        rate = self.s.theta ** -(torch.arange(half, device=tokens.device).float() / half)
        angle = torch.arange(tokens.shape[1], device=tokens.device).float()[:, None] * rate
        x, routed = F.embedding(tokens, self.embed).to(self.dtype), []
        balance = torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x, loss, ids = layer(x, angle.cos(), angle.sin(), self.experts)
            balance = balance + loss / self.s.layers
            routed.append(ids)
        return rms_norm(x, self.norm, self.s.eps), balance, routed

    def loss(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """tokens: [B, S + 1]. Return the cross-entropy in nats a token, the balancing loss and the ids."""
        hidden, balance, routed = self(tokens[:, :-1])
        logits = F.linear(hidden, self.embed.to(self.dtype))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()), balance, routed


def state_dict(model: Model) -> dict[str, torch.Tensor]:
    """Return the weights in bfloat16 under Mixtral's checkpoint names."""
    named = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        at, moe = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
        for name in "qkvo":
            named[f"{at}self_attn.{name}_proj.weight"] = getattr(layer, name)
        named[f"{at}input_layernorm.weight"] = layer.norm1
        named[f"{at}post_attention_layernorm.weight"] = layer.norm2
        named[f"{moe}gate.weight"] = layer.gate
        for expert in range(model.s.experts):
            gate, up = layer.w13[expert].chunk(2)
            for name, w in (("w1", gate), ("w2", layer.w2[expert]), ("w3", up)):
                named[f"{moe}experts.{expert}.{name}.weight"] = w
    return {k: w.detach().to(torch.bfloat16).cpu().contiguous() for k, w in named.items()}


def config(s: Sizes, aux: float) -> dict:
    """Return config.json of transformers.MixtralConfig."""
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": s.hidden,
        "intermediate_size": s.inner, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "vocab_size": s.vocab,
        "max_position_embeddings": 4096, "rms_norm_eps": s.eps, "rope_theta": s.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.theta}, "hidden_act": "silu",
        "sliding_window": None, "tie_word_embeddings": True, "num_local_experts": s.experts,
        "num_experts_per_tok": s.top_k, "router_aux_loss_coef": aux, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def save(model: Model, folder: Path, aux: float) -> list[Path]:
    """Write config.json and safetensors files of at most SHARD bytes; return the weight files."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, w in state_dict(model).items():
        if size + w.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = w
        size += w.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    files, where = [], {}
    for i, shard in enumerate(shards):
        name = (
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.append(folder / name)
        where.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(model.s, aux), indent=1))
    (folder / "sizes.json").write_text(json.dumps(asdict(model.s)))
    return files
