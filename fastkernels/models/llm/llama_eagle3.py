"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer that drafts the next tokens of a Llama from its hidden states.

Its input is the embedding of a token and the hidden states of the one before: those between three layers of the target,
or behind a draft, its own. The engine runs it for `speculative_config`, next to its target.

Checkpoints have SGLang's and vLLM's names, `midlayer` or `layers.0`. Their `d2t` [draft_vocab_size] is the distance
from a token of the draft's vocabulary to the target's; `t2d` is not needed. Without `embed_tokens`, embeddings are the
target's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.decoder import (
    Decoder,
    DecoderAttention,
    DecoderMlp,
    add_and_norm,
    make_norm,
)
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.linear.vllm import VllmQKVParallelLinear, VllmReplicatedLinear

NUM_STATES = 3  # of the target for each token
PARTS = frozenset({"d2t"})  # those that checkpoints may leave out, and public ones have


class DraftAttention(DecoderAttention):
    """Self-attention whose projection reads an embedding next to a hidden state: [T, 2 H] to [T, H]."""

    def __init__(self, a: d.Attention, hidden: int, prefix: str) -> None:
        super().__init__(a, hidden, prefix)
        self.qkv_proj = VllmQKVParallelLinear(
            2 * hidden, a.head_size, a.heads, a.kv_heads, bias=a.bias, prefix=f"{prefix}.qkv_proj"
        )


class DraftLayer(nn.Module):
    """The decoder layer: embeddings [T, H] and hidden states [T, H] to (output [T, H], residual [T, H])."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        hidden, norm = config.hidden_size, d.Norm(eps=config.rms_norm_eps)
        bias = bool(getattr(config, "attention_bias", False))
        attention = d.attention(config, bias=bias, out_bias=bias)
        self.self_attn = DraftAttention(attention, hidden, f"{prefix}.self_attn")
        mlp = d.Mlp(config.intermediate_size, bias=bool(getattr(config, "mlp_bias", False)))
        self.mlp = DecoderMlp(mlp, hidden, f"{prefix}.mlp")
        self.input_layernorm = make_norm(norm, hidden)
        self.hidden_norm = make_norm(norm, hidden)
        self.post_attention_layernorm = make_norm(norm, hidden)
        self.norm_first = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, positions: torch.Tensor, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        residual = normed.clone() if self.norm_first else hidden
        x = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        x, residual = add_and_norm(self.post_attention_layernorm, self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class Eagle3(nn.Module):
    """config: the fields of a checkpoint's config.json, and `has`, the parts that the checkpoint holds.

    model(ids [T], positions [T], hidden [T, H]) returns (normed [T, H], hidden [T, H]): the input of compute_logits,
    and the hidden states for a draft of the next token. `hidden` may be overwritten.
    """

    target_embedding: nn.Module | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        d.refuse(
            config, hidden_act="silu", num_hidden_layers=1, norm_before_fc=False, fc_norm=False, norm_output=False,
            num_aux_hidden_states=NUM_STATES, parallel_drafting=False,
        )  # fmt: skip
        has = getattr(config, "has", PARTS)
        hidden = config.hidden_size
        self.target_size = getattr(config, "target_hidden_size", None) or hidden
        self.vocab: int = config.vocab_size
        self.draft_vocab: int = getattr(config, "draft_vocab_size", None) or self.vocab
        if "embed_tokens" in has:
            self.embed_tokens = VllmVocabParallelEmbedding(self.vocab, hidden, prefix="embed_tokens")
        self.fc = VllmReplicatedLinear(NUM_STATES * self.target_size, hidden, bias=False, prefix="fc")
        self.layers = nn.ModuleList([DraftLayer(config, "layers.0")])
        self.norm = make_norm(d.Norm(eps=config.rms_norm_eps), hidden)
        self.lm_head = VllmParallelLMHead(self.draft_vocab, hidden, prefix="lm_head")
        self.logits_processor = VllmLogitsProcessor(self.draft_vocab)
        if "d2t" in has:
            self.d2t = nn.Parameter(torch.zeros(self.draft_vocab, dtype=torch.int64), requires_grad=False)
            self.d2t.fill = 0  # type: ignore[attr-defined]
        elif self.draft_vocab != self.vocab:
            raise d.Unsupported(
                f"config.draft_vocab_size={self.draft_vocab} needs the tensor d2t, which maps it to the"
                f" {self.vocab} tokens of the target"
            )

    @staticmethod
    def fit(
        config: Any, hidden: int, layers: int, max_model_len: int, keys: Iterable[str] | None
    ) -> tuple[int, ...]:
        """Complete the config for a target of these sizes, and return between which of its layers states are read.

        The result counts the layers before the states. keys: of the checkpoint; None: it has those of public ones.
        Raises Unsupported for a target of other sizes.
        """
        wanted = getattr(config, "target_hidden_size", None) or config.hidden_size
        if wanted != hidden:
            raise d.Unsupported(f"it reads hidden states of {wanted} channels, and the target has {hidden}")
        names = {key.removeprefix("model.").removesuffix(".weight") for key in keys or PARTS}
        config.has = frozenset(names & {"d2t", "embed_tokens"})
        if "embed_tokens" not in config.has and config.hidden_size != hidden:
            raise d.Unsupported(
                f"it has no embeddings, and the target's have {hidden} channels instead of {config.hidden_size}"
            )
        # Positions are the target's, whatever length the checkpoint was trained with.
        config.max_position_embeddings = max(config.max_position_embeddings, max_model_len)
        more = getattr(config, "eagle_config", None) or {}
        given = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        given = given or more.get("eagle_aux_hidden_state_layer_ids")
        found = list(given or (2, layers // 2, layers - 3))
        right = all(type(i) is int and 0 <= i <= layers for i in found)
        if len(found) != NUM_STATES or not right or found != sorted(set(found)):
            where = "config.eagle_aux_hidden_state_layer_ids" if given else "the default 2, n / 2, n - 3"
            raise d.Unsupported(
                f"{where}, {found}, must be {NUM_STATES} ascending numbers from 0 to {layers}, the target's layers"
            )
        return tuple(found)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """[T, 3 target_size] hidden states of the target to [T, H]."""
        return self.fc(states)[0]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embed = self.embed_tokens if self.target_embedding is None else self.target_embedding
        out, residual = self.layers[0](positions, embed(input_ids), hidden)
        return add_and_norm(self.norm, out, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, vocab_size]: minus infinity for the tokens that no draft has."""
        logits = self.logits_processor(self.lm_head, hidden)
        if not hasattr(self, "d2t"):
            return logits
        targets = torch.arange(self.draft_vocab, device=logits.device) + self.d2t
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy_(1, targets, logits)

    def share(self, target: Decoder) -> None:
        """Use the target's embedding, if the checkpoint has none."""
        if not hasattr(self, "embed_tokens"):
            self.__dict__["target_embedding"] = (
                target.model.embed_tokens  # a module of the target, not one more of this model
            )

    def check_map(self) -> None:
        """Raise Unsupported if d2t leaves the target's vocabulary, or maps two tokens to one."""
        if not hasattr(self, "d2t"):
            return
        targets = torch.arange(self.draft_vocab, device=self.d2t.device) + self.d2t
        least, most = int(targets.min()), int(targets.max())
        if least < 0 or most >= self.vocab:
            wrong = least if least < 0 else most
            raise d.Unsupported(f"d2t names token {wrong}, and the target's vocabulary has {self.vocab}")
        if len(targets.unique()) != self.draft_vocab:
            raise d.Unsupported("d2t names a token of the target twice")


ARCH = Architecture(
    names=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    category="llm",
    model="Eagle3",
    runner="Draft",
    model_type="llama",
    renamed={"model.midlayer.": "layers.0.", "midlayer.": "layers.0.", "model.": ""},
    unused=("*rotary_emb.inv_freq", "t2d"),
    public={
        "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
        },
    },
)  # fmt: skip
