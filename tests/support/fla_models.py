"""GLA, RetNet and RWKV-7 by the equations of their papers, one token at a time in float64.

Names and shapes of parameters, and fields of configs with their defaults, are those of flash-linear-attention.
Importing this module makes the classes known to transformers' Auto classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Shapes = Iterator[tuple[str, tuple[int, ...]]]
T = torch.Tensor


class _Config(PreTrainedConfig):
    vocab_size: int = 32000
    hidden_size: int = 2048
    hidden_ratio: int = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    max_position_embeddings: int = 2048
    fuse_norm: bool = True
    attn: Any = None
    bos_token_id: int = 1
    eos_token_id: int = 2
    tie_word_embeddings: bool = False


class _LinearConfig(_Config):
    num_heads: int = 4
    num_kv_heads: int | None = None
    feature_map: str | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    hidden_act: str = "swish"
    elementwise_affine: bool = True
    norm_eps: float = 1e-6
    attnres_block_size: int | None = None


class GLAConfig(_LinearConfig):
    model_type = "gla"
    expand_k: float = 0.5
    expand_v: float = 1.0
    clamp_min: float | None = None
    use_gk: bool = True
    use_gv: bool = False


class RetNetConfig(_LinearConfig):
    model_type = "retnet"
    expand_k: float = 1.0
    expand_v: float = 2.0
    num_heads: int = 8
    hidden_ratio: int = 2


class RWKV7Config(_Config):
    model_type = "rwkv7"
    head_dim: int | None = 64
    num_heads: int | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    hidden_act: str = "sqrelu"
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    value_dim: Any = None


class Weights:
    """The parameters below a name, in float64."""

    def __init__(self, whole: dict[str, T], name: str) -> None:
        self.whole, self.name = whole, name

    def __getitem__(self, name: str) -> T:
        return self.whole[f"{self.name}.{name}"]

    def below(self, name: str) -> Weights:
        return Weights(self.whole, f"{self.name}.{name}")

    def linear(self, name: str, x: T) -> T:
        return F.linear(x, self[f"{name}.weight"], self.whole.get(f"{self.name}.{name}.bias"))

    def rms(self, name: str, x: T, eps: float) -> T:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self[f"{name}.weight"]

    def layer_norm(self, name: str, x: T, eps: float) -> T:
        return F.layer_norm(
            x, x.shape[-1:], self[f"{name}.weight"], self.whole.get(f"{self.name}.{name}.bias"), eps
        )


class _Model(PreTrainedModel):
    """A model with the parameters `shapes()`; `block` computes a layer for one token."""

    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vocab = (config.vocab_size, config.hidden_size)
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(*vocab)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, shape in self.shapes():
            *path, last = f"model.{name}".split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            owner.register_parameter(last, nn.Parameter(torch.ones(shape)))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings  # type: ignore[union-attr, return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def shapes(self) -> Shapes:
        raise NotImplementedError

    def block(self, i: int, x: T, at: int, state: dict[str, T], token: dict[str, T]) -> T:
        """x: [H]; at: position; state: of this layer and sequence; token: what layers share."""
        raise NotImplementedError

    def last(self, x: T) -> T:
        raise NotImplementedError

    def begin(self) -> list[dict[str, T]]:
        whole = {name: t.double() for name, t in self.named_parameters()}
        self.weights = Weights(whole, "model")
        self.head = self.lm_head.weight.double()
        return [{} for _ in range(self.config.num_hidden_layers)]

    def step(self, token: int, at: int, states: list[dict[str, T]]) -> T:
        x, shared = self.weights["embeddings.weight"][token], {}
        for i, state in enumerate(states):
            x = self.block(i, x, at, state, shared)
        return self.last(x) @ self.head.T

    @torch.inference_mode()
    def forward(self, input_ids: T, **_: Any) -> CausalLMOutput:
        states = self.begin()
        (ids,) = input_ids.tolist()
        rows = [self.step(token, at, states) for at, token in enumerate(ids)]
        return CausalLMOutput(logits=torch.stack(rows)[None].float())

    @torch.inference_mode()
    def generate(self, input_ids: T, max_new_tokens: int, **_: Any) -> T:
        """Greedy tokens."""
        states = self.begin()
        (ids,) = input_ids.tolist()
        for at in range(len(ids) + max_new_tokens - 1):
            logits = self.step(ids[at], at, states)
            if at >= len(input_ids[0]) - 1:
                ids.append(int(logits.argmax()))
        return torch.tensor([ids])


def rotated(x: T, at: int, base: float) -> T:
    """x: [heads, size], by halves."""
    half = x.shape[-1] // 2
    angle = at * base ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class _LinearModel(_Model):
    """RMS norms, a mixer with the state S = diag(decay) S + k v^T, and a gated MLP."""

    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, key heads, and the sizes of a key and a value."""
        c = self.config
        kv = c.num_kv_heads or c.num_heads
        return (
            c.num_heads,
            kv,
            int(c.hidden_size * c.expand_k) // c.num_heads,
            int(c.hidden_size * c.expand_v) // c.num_heads,
        )

    def spec(self, i: int) -> dict[str, Any] | None:
        """Of a layer with attention."""
        attn = self.config.attn
        specs = attn if isinstance(attn, list) else [attn] if attn else []
        return next((spec for spec in specs if i in spec["layers"]), None)

    def norm_name(self) -> str:
        return "g_norm_swish_gate" if self.config.fuse_norm and self.config.use_output_gate else "g_norm"

    def inner(self) -> int:
        size = self.config.intermediate_size
        return size or 256 * math.ceil(int(self.config.hidden_size * self.config.hidden_ratio * 2 / 3) / 256)

    def shapes(self) -> Shapes:
        hidden, inner = self.config.hidden_size, self.inner()
        yield "norm.weight", (hidden,)
        for i in range(self.config.num_hidden_layers):
            name = f"layers.{i}"
            yield f"{name}.attn_norm.weight", (hidden,)
            yield f"{name}.mlp_norm.weight", (hidden,)
            for part, shape in {
                "gate": (inner, hidden),
                "up": (inner, hidden),
                "down": (hidden, inner),
            }.items():
                yield f"{name}.mlp.{part}_proj.weight", shape
            mixer = self.mixer_shapes() if (spec := self.spec(i)) is None else self.attention_shapes(spec)
            yield from ((f"{name}.attn.{part}", shape) for part, shape in mixer)

    def mixer_shapes(self) -> Shapes:
        hidden, (heads, kv, key, value) = self.config.hidden_size, self.sizes()
        rows = {"q": heads * key, "k": kv * key, "v": kv * value}
        for name, n in rows.items():
            yield f"{name}_proj.weight", (n, hidden)
            if self.config.use_short_conv:
                yield f"{name}_conv1d.weight", (n, 1, self.config.conv_size)
        if self.config.use_output_gate:
            yield "g_proj.weight", (heads * value, hidden)
        yield f"{self.norm_name()}.weight", (value,)
        yield "o_proj.weight", (hidden, heads * value)

    def attention_shapes(self, spec: dict[str, Any]) -> Shapes:
        hidden = self.config.hidden_size
        rows = hidden // spec["num_heads"] * (spec.get("num_kv_heads") or spec["num_heads"])
        for name, n in {"q": hidden, "k": rows, "v": rows}.items():
            yield f"{name}_proj.weight", (n, hidden)
            if spec.get("qkv_bias"):
                yield f"{name}_proj.bias", (n,)
        yield "o_proj.weight", (hidden, hidden)

    def block(self, i: int, x: T, at: int, state: dict[str, T], token: dict[str, T]) -> T:
        w, eps, spec = self.weights.below(f"layers.{i}"), self.config.norm_eps, self.spec(i)
        own, normed = w.below("attn"), w.rms("attn_norm", x, eps)
        x = x + (self.mix(own, normed, at, state) if spec is None else attend(own, normed, at, state, spec))
        y = w.rms("mlp_norm", x, eps)
        return x + w.linear(
            "mlp.down_proj", F.silu(w.linear("mlp.gate_proj", y)) * w.linear("mlp.up_proj", y)
        )

    def last(self, x: T) -> T:
        return self.weights.rms("norm", x, self.config.norm_eps)

    def mix(self, w: Weights, x: T, at: int, state: dict[str, T]) -> T:
        heads, kv, key, value = self.sizes()
        q, k, v = (self.convolved(name, w, x, state) for name in "qkv")
        q, k, v = q.view(heads, key), k.view(kv, key), v.view(kv, value)
        q, k = self.placed(q, at), self.placed(k, at)
        k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v))
        old = state.get("S", torch.zeros(heads, key, value, dtype=x.dtype))
        state["S"] = self.decay(w, x)[..., None] * old + k[..., None] * v[:, None]
        o = torch.einsum("hk,hkv->hv", q, state["S"]) / math.sqrt(key)
        o = w.rms(self.norm_name(), o, self.config.norm_eps).flatten()
        return w.linear("o_proj", o * F.silu(w.linear("g_proj", x)) if self.config.use_output_gate else o)

    def convolved(self, name: str, w: Weights, x: T, state: dict[str, T]) -> T:
        x = w.linear(f"{name}_proj", x)
        if not self.config.use_short_conv:
            return x
        kernel = w[f"{name}_conv1d.weight"][:, 0]  # [C, W]
        window = state.get(name, torch.zeros_like(kernel))
        state[name] = torch.cat([window[:, 1:], x[:, None]], 1)
        return F.silu((state[name] * kernel).sum(1))

    def placed(self, x: T, at: int) -> T:
        return x

    def decay(self, w: Weights, x: T) -> T:
        """[heads, key or 1]"""
        raise NotImplementedError


def attend(w: Weights, x: T, at: int, state: dict[str, T], spec: dict[str, Any]) -> T:
    """Softmax attention with rotary positions."""
    heads, kv = spec["num_heads"], spec.get("num_kv_heads") or spec["num_heads"]
    base, window = spec.get("rope_theta") or 10000.0, spec.get("window_size")
    q, k, v = (w.linear(f"{n}_proj", x).view(m, -1) for n, m in (("q", heads), ("k", kv), ("v", kv)))
    new = {"k": rotated(k, at, base)[None], "v": v[None]}
    for name, row in new.items():
        state[name] = torch.cat([state[name], row]) if name in state else row
    k, v = (state[n][-window if window else 0 :].repeat_interleave(heads // kv, 1) for n in "kv")
    scores = torch.einsum("hd,thd->ht", rotated(q, at, base), k) / math.sqrt(q.shape[-1])
    return w.linear("o_proj", torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten())


class GLAForCausalLM(_LinearModel):
    config_class = GLAConfig

    def mixer_shapes(self) -> Shapes:
        yield from super().mixer_shapes()
        rows = self.sizes()[1] * self.sizes()[2]
        yield "gk_proj.0.weight", (16, self.config.hidden_size)
        yield "gk_proj.1.weight", (rows, 16)
        yield "gk_proj.1.bias", (rows,)

    def decay(self, w: Weights, x: T) -> T:
        heads, kv, key, _ = self.sizes()
        g = F.logsigmoid(w.linear("gk_proj.1", w.linear("gk_proj.0", x))).view(kv, key) / 16
        g = g if self.config.clamp_min is None else g.clamp(min=self.config.clamp_min)
        return g.exp().repeat_interleave(heads // kv, 0)


class RetNetForCausalLM(_LinearModel):
    config_class = RetNetConfig

    def placed(self, x: T, at: int) -> T:
        return rotated(x, at, 10000.0)

    def decay(self, w: Weights, x: T) -> T:
        return 1 - 2.0 ** (-5 - torch.arange(self.sizes()[0], dtype=x.dtype)[:, None])


class RWKV7ForCausalLM(_Model):
    config_class = RWKV7Config

    def shapes(self) -> Shapes:
        c, hidden = self.config, self.config.hidden_size
        inner = c.intermediate_size or 32 * math.ceil(hidden * c.hidden_ratio / 32)
        norms = ["norm"] + [
            f"layers.{i}.{n}_norm" for i in range(c.num_hidden_layers) for n in ("attn", "ffn")
        ]
        norms += ["layers.0.pre_norm"] if c.norm_first else []
        for name in norms:
            yield f"{name}.weight", (hidden,)
            if c.norm_bias:
                yield f"{name}.bias", (hidden,)
        for i in range(c.num_hidden_layers):
            name = f"layers.{i}"
            yield f"{name}.ffn.x_k", (hidden,)
            yield f"{name}.ffn.key.weight", (inner, hidden)
            yield f"{name}.ffn.value.weight", (hidden, inner)
            for x in "rwkvag":
                yield f"{name}.attn.x_{x}", (1, 1, hidden)
            yield f"{name}.attn.k_k", (hidden,)
            yield f"{name}.attn.k_a", (hidden,)
            yield f"{name}.attn.r_k", (hidden // c.head_dim, c.head_dim)
            for x in "rkvo":
                yield f"{name}.attn.{x}_proj.weight", (hidden, hidden)
            yield f"{name}.attn.g_norm.weight", (hidden,)
            yield f"{name}.attn.g_norm.bias", (hidden,)
            loras = {"w": c.decay_low_rank_dim, "a": c.a_low_rank_dim, "g": c.gate_low_rank_dim}
            for x, rank in {**loras, "v": c.v_low_rank_dim}.items():
                if x == "v" and i == 0:
                    continue
                yield f"{name}.attn.{x}_lora.lora.0.weight", (rank, hidden)
                yield f"{name}.attn.{x}_lora.lora.2.weight", (hidden, rank)
                if x != "g":
                    yield f"{name}.attn.{x}_lora.lora.2.bias", (hidden,)

    def block(self, i: int, x: T, at: int, state: dict[str, T], token: dict[str, T]) -> T:
        w, eps = self.weights.below(f"layers.{i}"), self.config.norm_eps
        if i == 0 and self.config.norm_first:
            x = w.layer_norm("pre_norm", x, eps)
        x = x + self.mix(w.below("attn"), w.layer_norm("attn_norm", x, eps), state, token)
        y = w.layer_norm("ffn_norm", x, eps)
        before, state["ffn"] = state.get("ffn", torch.zeros_like(y)), y
        mixed = y + (before - y) * w["ffn.x_k"]
        return x + w.linear("ffn.value", F.relu(w.linear("ffn.key", mixed)) ** 2)

    def last(self, x: T) -> T:
        return self.weights.layer_norm("norm", x, self.config.norm_eps)

    def mix(self, w: Weights, x: T, state: dict[str, T], token: dict[str, T]) -> T:
        by_head = (-1, self.config.head_dim)
        before, state["x"] = state.get("x", torch.zeros_like(x)), x
        xr, xw, xk, xv, xa, xg = (x + (before - x) * w[f"x_{n}"].flatten() for n in "rwkvag")

        def lora(n: str, x: T, act: Callable[[T], T] = lambda y: y) -> T:
            return w.linear(f"{n}_lora.lora.2", act(w.linear(f"{n}_lora.lora.0", x)))

        r, k, v = w.linear("r_proj", xr), w.linear("k_proj", xk), w.linear("v_proj", xv)
        if "v" in token:
            v = v + (token["v"] - v) * lora("v", xv).sigmoid()
        else:
            token["v"] = v
        decay = torch.exp(-math.exp(-0.5) * lora("w", xw, torch.tanh).sigmoid()).view(by_head)
        rate, gate = lora("a", xa).sigmoid(), lora("g", xg, torch.sigmoid)
        kappa = (k * w["k_k"]).view(by_head)
        kappa = kappa / (kappa.square().sum(-1, keepdim=True) + (1e-6 if self.config.fuse_norm else 0)).sqrt()
        k = k * (1 + (rate - 1) * w["k_a"])
        r, k, v, rate = (t.view(by_head) for t in (r, k, v, rate))
        old = state.get("S", torch.zeros(*v.shape, k.shape[-1], dtype=x.dtype))
        moved = torch.diag_embed(decay) - kappa[..., None] * (rate * kappa)[:, None]
        state["S"] = old @ moved + v[..., None] * k[:, None]
        y = torch.einsum("hvk,hk->hv", state["S"], r)
        y = F.layer_norm(y, by_head[1:], eps=by_head[1] * self.config.norm_eps).flatten()
        y = y * w["g_norm.weight"] + w["g_norm.bias"]
        y = y + ((r * k * w["r_k"]).sum(-1, keepdim=True) * v).flatten()
        return w.linear("o_proj", y * gate)


for _kind in (GLAForCausalLM, RetNetForCausalLM, RWKV7ForCausalLM):
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class)
    AutoModelForCausalLM.register(_kind.config_class, _kind)
