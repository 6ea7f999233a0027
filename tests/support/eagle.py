"""EAGLE-3 by its equations (arXiv 2503.01840), in float64, and tiny checkpoints with the public ones' names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

T = torch.Tensor
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 512, "draft_vocab_size": 300,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip


def make_tiny_eagle3(folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """A random float32 draft model for tiny.make_tiny's Llama. overrides: fields of the config; None leaves one out.

    embeddings=True: with embeddings of its own
    """
    from safetensors.torch import save_file

    embeddings = overrides.pop("embeddings", False)
    fields = {k: v for k, v in {**FIELDS, **overrides}.items() if v is not None}
    generator, folder = torch.Generator().manual_seed(seed), Path(folder)

    def normal(*shape: int, mean: float = 0.0, std: float = 0.15) -> T:
        return torch.empty(shape).normal_(mean, std, generator=generator)

    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    target, size = fields.get("target_hidden_size", hidden), hidden // fields["num_attention_heads"]
    keys, vocab = size * fields["num_key_value_heads"], fields["vocab_size"]
    drafts = fields.get("draft_vocab_size", vocab)
    made = {
        "fc.weight": normal(hidden, 3 * target), "norm.weight": normal(hidden, mean=1.0),
        "lm_head.weight": normal(drafts, hidden, std=0.5),
    }  # fmt: skip
    for name, rows, columns in (
        ("self_attn.q_proj", hidden, 2 * hidden), ("self_attn.k_proj", keys, 2 * hidden),
        ("self_attn.v_proj", keys, 2 * hidden), ("self_attn.o_proj", hidden, hidden),
        ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
    ):  # fmt: skip
        made[f"midlayer.{name}.weight"] = normal(rows, columns)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{name}.weight"] = normal(hidden, mean=1.0)
    if drafts != vocab:
        chosen = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        made["d2t"] = chosen - torch.arange(drafts)
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    if embeddings:
        made["embed_tokens.weight"] = normal(vocab, hidden, std=1.0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


class Eagle:
    """The draft model of a checkpoint, one sequence at a time. embedding: the target's [V, H]."""

    def __init__(self, folder: Path, embedding: T):
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.w = {k.removeprefix("midlayer."): v.double() for k, v in weights.items() if "2" not in k}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        drafts = len(self.w["lm_head.weight"])
        self.targets = torch.arange(drafts) + weights.get("d2t", torch.zeros(drafts, dtype=torch.int64))

    def _norm(self, x: T, name: str) -> T:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[f"{name}.weight"]

    def _linear(self, x: T, name: str) -> T:
        return F.linear(x, self.w[f"{name}.weight"])

    def _rope(self, x: T) -> T:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (torch.arange(len(x), dtype=torch.float64)[:, None] * rates)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _layer(self, tokens: T, hidden: T) -> tuple[T, T]:
        """tokens [n], each behind its hidden state [n, H]. Returns draft logits and the next hidden states of all."""
        n, heads = len(tokens), self.config["num_attention_heads"]
        embedded = self._norm(self.embedding[tokens], "input_layernorm")
        x = torch.cat([embedded, self._norm(hidden, "hidden_norm")], -1)
        q, k, v = (
            self._linear(x, f"self_attn.{p}_proj").view(n, -1, hidden.shape[1] // heads) for p in "qkv"
        )
        q, k = self._rope(q), self._rope(k)
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        start = self._norm(hidden, "hidden_norm") if self.config.get("norm_before_residual") else hidden
        x = start + self._linear(mixed, "self_attn.o_proj")
        y = self._norm(x, "post_attention_layernorm")
        x = x + self._linear(
            F.silu(self._linear(y, "mlp.gate_proj")) * self._linear(y, "mlp.up_proj"), "mlp.down_proj"
        )
        return self._linear(self._norm(x, "norm"), "lm_head"), x

    @torch.inference_mode()
    def draft(self, states: T, tokens: Sequence[int], count: int) -> tuple[list[int], list[T]]:
        """(greedy drafts, the logits [draft_vocab_size] of each) behind `tokens`.

        states: [len(tokens) - 1, 3 H] of the target for all tokens but the last
        """
        hidden, ids = self._linear(states.double(), "fc"), list(tokens[1:])
        drafts, all_logits = list[int](), list[T]()
        for _ in range(count):
            logits, out = self._layer(torch.tensor(ids), hidden)
            all_logits.append(logits[-1])
            drafts.append(int(self.targets[logits[-1].argmax()]))
            hidden, ids = torch.cat([hidden, out[-1:]]), [*ids, drafts[-1]]
        return drafts, all_logits


def make_scripted_eagle3(folder: str | Path, target: Path, wrong: str = "") -> Path:
    """A draft model of a target by tiny.make_scripted, which drafts its text, but the wrong token behind some letters.

    Attention adds nothing. The MLP turns the hidden state of a token to that of the next one in the text.
    """
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedTokenizerFast

    theirs = load_file(target / "model.safetensors")
    embedding, head = theirs["model.embed_tokens.weight"], theirs["lm_head.weight"]
    hidden = embedding.shape[1]
    folder = make_tiny_eagle3(folder, draft_vocab_size=None, intermediate_size=hidden)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(1.0) if "norm" in name else weight.zero_()
    # A token is 10 * hidden in its channel. The MLP's inner values are `hidden` there, so that it moves this to the
    # next token's channel. fc reads the states before the first layer, the embeddings.
    weights["fc.weight"][:, :hidden] = 10.0 * hidden * torch.eye(hidden)
    following = head.T @ embedding - 10.0 * torch.eye(hidden)  # [channel of a token, channel of the next one]
    weights["midlayer.mlp.gate_proj.weight"] += torch.eye(hidden)
    weights["midlayer.mlp.up_proj.weight"] += torch.eye(hidden)
    weights["midlayer.mlp.down_proj.weight"] += following.T
    weights["lm_head.weight"] += head
    for token in PreTrainedTokenizerFast.from_pretrained(target)(wrong).input_ids:
        channel = int(embedding[token].argmax())
        weights["lm_head.weight"][:, channel] = 0.0
        weights["lm_head.weight"][400, channel] = 1.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
