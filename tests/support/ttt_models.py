"""TTT-E2E by its equations, a chunk at a time in float64, with torch.autograd for the inner step.

Fields of the config are those of the reference (test-time-training/e2e). Parameters are named after its modules, with a
number for each layer and matrices [out, in]. Importing this module makes the classes known to transformers' Auto
classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

T = torch.Tensor
INNER = ("w1", "w3", "w2")
ATTENTION = ("wq", "wk", "wv", "wo")


class TTTE2EConfig(PreTrainedConfig):
    model_type = "ttt_e2e"
    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mini_batch_size: int = 1024
    sliding_window_size: int = 1024
    seq_len: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    suffix_len: int = 0
    prime: bool = True
    qk_norm: bool = True
    pre_norm: bool = True
    post_norm: bool = True
    seq_modeling_block: str = "SWA"
    optimizer_inner: Any = None


class Sequence:
    """State of a sequence: keys and values of its chunks so far, and the inner weights that they led to."""

    def __init__(self, model: TTTE2EForCausalLM) -> None:
        self.w = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        self.c, self.start = model.config, 0
        self.cached: list[tuple[T, T]] = [
            (torch.zeros(0, self.c.num_attention_heads, self._size, dtype=torch.float64),) * 2
            for _ in range(self.c.num_hidden_layers)
        ]
        first = self.c.num_hidden_layers - self.c.suffix_len
        self.inner = [
            f"model.h.{i}.feed_forward_prime.{name}.weight"
            for i in range(first, self.c.num_hidden_layers)
            for name in INNER
        ]

    @property
    def _size(self) -> int:
        return self.c.hidden_size // self.c.num_attention_heads

    def read(self, ids: list[int], following: int | None = None) -> T:
        """Logits of a chunk or its first part. following: the token behind it, which is the target of its last one."""
        for name in self.inner:
            self.w[name].requires_grad_(following is not None)
        with torch.inference_mode(False), torch.enable_grad():
            logits, cached = self._forward(torch.tensor(ids))
            if following is None:
                return logits.detach()
            assert len(ids) == self.c.mini_batch_size
            loss = F.cross_entropy(logits, torch.tensor([*ids[1:], following]))
            grads = torch.autograd.grad(loss, [self.w[name] for name in self.inner])
        inner = self.c.optimizer_inner or {}
        norm, clip = math.sqrt(sum(float(g.square().sum()) for g in grads)), inner.get("clip_gradient", 0.0)
        scale = clip / norm if clip and norm >= clip else 1.0
        for name, grad in zip(self.inner, grads, strict=True):
            self.w[name] = self.w[name].detach() - inner.get("lr", 0.01) * scale * grad
        self.cached = [(k.detach(), v.detach()) for k, v in cached]
        self.start += len(ids)
        return logits.detach()

    def _forward(self, ids: T) -> tuple[T, list[tuple[T, T]]]:
        x, kept = self.w["model.wte.weight"][ids], []
        for i in range(self.c.num_hidden_layers):
            name = f"model.h.{i}"
            y, cached = self._attend(
                name, self._norm(f"{name}.seq_norm", x, self.c.pre_norm), *self.cached[i]
            )
            kept.append(cached)
            x = x + self._norm(f"{name}.seq_post_norm", y, self.c.post_norm)
            for norm, mlp in (("ffn_prime", "feed_forward_prime"), ("ffn", "feed_forward")):
                if f"{name}.{mlp}.w1.weight" in self.w:
                    y = self._mlp(f"{name}.{mlp}", self._norm(f"{name}.{norm}_norm", x, self.c.pre_norm))
                    x = x + self._norm(f"{name}.{norm}_post_norm", y, self.c.post_norm)
        head = "model.wte.weight" if self.c.tie_word_embeddings else "lm_head.weight"
        return self._norm("model.ln_f", x) @ self.w[head].T, kept

    def _norm(self, name: str, x: T, there: bool = True) -> T:
        if not there:
            return x
        return x / (x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]

    def _mlp(self, name: str, x: T) -> T:
        w1, w3, w2 = (self.w[f"{name}.{part}.weight"] for part in INNER)
        return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    def _attend(self, name: str, x: T, old_k: T, old_v: T) -> tuple[T, tuple[T, T]]:
        name = f"{name}.seq_modeling_block"
        q, k, v = (
            (x @ self.w[f"{name}.{part}.weight"].T).view(len(x), -1, self._size) for part in ATTENTION[:3]
        )
        q, k = (self._norm(f"{name}.{n}_norm", t, self.c.qk_norm) for n, t in (("q", q), ("k", k)))
        at = torch.arange(self.start, self.start + len(x), dtype=torch.float64)
        q, k = self._turned(q, at), self._turned(k, at)
        k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        distance = at[:, None] - torch.arange(len(k), dtype=torch.float64)
        hidden = (distance < 0) | (distance >= self.c.sliding_window_size)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._size)
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", p, v).flatten(1)
        return out @ self.w[f"{name}.wo.weight"].T, (k, v)

    def _turned(self, x: T, at: T) -> T:
        """Pairs of neighbours turned by the position's angles."""
        rates = self.c.rope_theta ** (-torch.arange(0, self._size, 2, dtype=torch.float64) / self._size)
        turn = torch.polar(torch.ones(1, dtype=torch.float64), at[:, None] * rates)[:, None]
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)


class TTTE2EForCausalLM(PreTrainedModel):
    config_class = TTTE2EConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.wte.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, inner, size = (
            config.hidden_size,
            config.intermediate_size,
            config.hidden_size // config.num_attention_heads,
        )
        self.model = nn.Module()
        self.model.wte = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        first = config.num_hidden_layers - config.suffix_len
        norms = [name for name, on in (("norm", config.pre_norm), ("post_norm", config.post_norm)) if on]
        for i in range(config.num_hidden_layers):
            name = f"model.h.{i}"
            for part in ATTENTION:
                self._add(f"{name}.seq_modeling_block.{part}", hidden, hidden)
            for part in ("q_norm", "k_norm") if config.qk_norm else ():
                self._add(f"{name}.seq_modeling_block.{part}", size)
            own = {"seq": "", "ffn": "feed_forward"}
            for part, mlp in {**own, **({"ffn_prime": "feed_forward_prime"} if i >= first else {})}.items():
                for norm in norms:
                    self._add(f"{name}.{part}_{norm}", hidden)
                for matrix in INNER if mlp else ():
                    rows, columns = (hidden, inner) if matrix == "w2" else (inner, hidden)
                    self._add(f"{name}.{mlp}.{matrix}", rows, columns)
        self._add("model.ln_f", hidden)
        self.post_init()

    def _add(self, name: str, *shape: int) -> None:
        owner: nn.Module = self
        for part in name.split("."):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        owner.register_parameter("weight", nn.Parameter(torch.ones(shape)))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.wte  # type: ignore[union-attr, return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: T, **_: Any) -> CausalLMOutput:
        (ids,), rows = input_ids.tolist(), []
        with torch.inference_mode(False):
            sequence, size = Sequence(self), self.config.mini_batch_size
            for at in range(0, len(ids), size):
                following = ids[at + size] if at + size < len(ids) else None
                rows.append(sequence.read(ids[at : at + size], following))
        return CausalLMOutput(logits=torch.cat(rows)[None].float())

    def generate(self, input_ids: T, max_new_tokens: int, **_: Any) -> T:
        """Greedy tokens."""
        (ids,) = input_ids.tolist()
        with torch.inference_mode(False):
            sequence, size = Sequence(self), self.config.mini_batch_size
            for _ in range(max_new_tokens):
                while len(ids) - sequence.start > size:
                    sequence.read(ids[sequence.start : sequence.start + size], ids[sequence.start + size])
                ids.append(int(sequence.read(ids[sequence.start :])[-1].argmax()))
        return torch.tensor([ids])


AutoConfig.register(TTTE2EConfig.model_type, TTTE2EConfig)
AutoModelForCausalLM.register(TTTE2EConfig, TTTE2EForCausalLM)
