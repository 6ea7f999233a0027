"""LLaDA by the equations of its papers (arXiv 2502.09992, 2505.22618), one prompt at a time in float64.

Names and shapes of parameters and fields of configs are those of the public checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.tiny import byte_tokenizer

T = torch.Tensor
FIELDS: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 64, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2, "mlp_hidden_size": 96, "mlp_ratio": 4, "activation_type": "silu", "block_type": "llama",
    "rope": True, "rope_theta": 500000.0, "layer_norm_type": "rms", "rms_norm_eps": 1e-5, "include_bias": False,
    "include_qkv_bias": False, "bias_for_layer_norm": False, "max_sequence_length": 256, "vocab_size": 512,
    "embedding_size": 512, "weight_tying": False, "mask_token_id": 500, "eos_token_id": 1, "pad_token_id": 1,
    "torch_dtype": "float32", "use_cache": False, "flash_attention": False, "scale_logits": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
}  # fmt: skip


def make_tiny_llada(folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """A random float32 checkpoint in `folder` with the public checkpoints' names, and a tokenizer.

    overrides: fields of the config
    """
    from safetensors.torch import save_file

    fields = {**FIELDS, **overrides}
    generator, folder = torch.Generator().manual_seed(seed), Path(folder)

    def normal(*shape: int, mean: float = 0.0, std: float = 0.25) -> T:
        return torch.empty(shape).normal_(mean, std, generator=generator)

    hidden, inner, vocab = fields["d_model"], fields["mlp_hidden_size"], fields["vocab_size"]
    kv = hidden // fields["n_heads"] * (fields["n_kv_heads"] or fields["n_heads"])
    made = {"wte.weight": normal(vocab, hidden, std=1.0), "ln_f.weight": normal(hidden, mean=1.0)}
    for i in range(fields["n_layers"]):
        for name, rows, columns in (
            ("q_proj", hidden, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("attn_out", hidden, hidden),
            ("ff_proj", inner, hidden), ("up_proj", inner, hidden), ("ff_out", hidden, inner),
        ):  # fmt: skip
            made[f"blocks.{i}.{name}.weight"] = normal(rows, columns)
        if fields["include_qkv_bias"]:
            for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
                made[f"blocks.{i}.{name}.bias"] = normal(rows)
        for name in ("attn_norm", "ff_norm"):
            made[f"blocks.{i}.{name}.weight"] = normal(hidden, mean=1.0)
    if not fields["weight_tying"]:
        made["ff_out.weight"] = normal(vocab, hidden, std=0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"model.transformer.{k}": v for k, v in made.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


class Llada:
    """The model of a checkpoint. caches: keys and values [L, heads, D] of each layer, which a call may fill or read."""

    def __init__(self, folder: Path):
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text())
        self.w = {
            k.removeprefix("model.transformer."): v.double()
            for k, v in load_file(folder / "model.safetensors").items()
        }

    def _norm(self, x: T, name: str) -> T:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.w[f"{name}.weight"]

    def _linear(self, x: T, name: str) -> T:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _rope(self, x: T, at: T) -> T:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (at[:, None] * rates)[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], first: int = 0, caches: list[list[T]] | None = None) -> T:
        """Logits [n, V] of tokens first, first + 1, ... of a sequence; caches: of all of its tokens."""
        n, x = len(ids), self.w["wte.weight"][torch.tensor(ids)]
        at = torch.arange(first, first + n, dtype=torch.float64)
        heads = self.config["n_heads"]
        for i in range(self.config["n_layers"]):
            block = f"blocks.{i}"
            y = self._norm(x, f"{block}.attn_norm")
            q, k, v = (
                self._linear(y, f"{block}.{p}").view(n, -1, x.shape[1] // heads)
                for p in ("q_proj", "k_proj", "v_proj")
            )
            q, k = self._rope(q, at), self._rope(k, at)
            if caches is not None and len(caches) <= i:
                caches.append([k, v])
            elif caches is not None:
                for old, new in zip(caches[i], (k, v), strict=True):
                    old[first : first + n] = new
                k, v = caches[i]
            k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
            weights = (torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + self._linear(mixed, f"{block}.attn_out")
            y = self._norm(x, f"{block}.ff_norm")
            gate, up = (self._linear(y, f"{block}.{p}") for p in ("ff_proj", "up_proj"))
            x = x + self._linear(F.silu(gate) * up, f"{block}.ff_out")
        head = self.w["wte.weight"] if self.config["weight_tying"] else self.w["ff_out.weight"]
        return F.linear(self._norm(x, "ln_f"), head)

    def generate(
        self, prompt: Sequence[int], max_tokens: int, block_length: int, steps: int | None = None,
        threshold: float | None = None, cfg_scale: float = 0.0, block_cache: str = "none",
    ) -> tuple[list[int], int]:  # fmt: skip
        """(the greedy answer with low-confidence remasking, calls of the model with the prompt)."""
        mask, calls = self.config["mask_token_id"], 0
        tokens = np.array([*prompt, *[mask] * max_tokens])
        for start in range(len(prompt), len(tokens), block_length):
            end, step, caches = start + block_length, 0, list[list[T]]()
            each, rest = divmod(block_length, (steps or max_tokens) * block_length // max_tokens)
            while (hidden := start + np.flatnonzero(tokens[start:end] == mask)).size:
                first, last = 0, len(tokens)
                if step and block_cache != "none":
                    first, last = start, end if block_cache == "dual" else len(tokens)
                logits = self.logits(
                    tokens[first:last].tolist(), first, None if block_cache == "none" else caches
                )[hidden - first]
                calls += 1
                if cfg_scale:
                    blind = tokens.copy()
                    blind[: len(prompt)] = mask
                    without = self.logits(blind.tolist())[hidden]
                    logits = without + (cfg_scale + 1) * (logits - without)
                chances = logits.softmax(-1)
                chances[:, mask] = 0.0
                best, ids = (t.numpy() for t in chances.max(-1))
                order = np.argsort(-best)
                count = each + (step < rest)
                if threshold is not None:
                    count = max(1, int((best >= threshold).sum()))
                tokens[hidden[order[:count]]] = ids[order[:count]]
                step += 1
        return tokens[len(prompt) :].tolist(), calls
