"""Descriptions of decoder-only language models as data: the file of a model returns one, and two readers use it.

`decoder.Decoder` builds the modules, and `plan.plan` lists them without a tensor. Neither torch nor an op is imported.
Sizes are of the whole model, before it is shared over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastkernels.models.common.descriptions import activations
from fastkernels.models.common.descriptions.towers import Part
from fastkernels.overrides.block import attention_sizes
from fastkernels.overrides.rope.rope_types import ROPE_TYPES


class Unsupported(ValueError):
    """A config has a feature that no op of ours computes; the message names field, value and the allowed one."""


def refuse(config: Any, **allowed: Any) -> None:
    """Raise Unsupported for the first field of the config that is neither absent, None nor the allowed value.

    Lists and tuples of the same values are equal.
    """
    for name, value in allowed.items():
        found = getattr(config, name, None)
        same = _plain(found) == _plain(value) or (
            name == "hidden_act" and activations.NAMES.get(str(found)) == value
        )
        if found is not None and not same:
            raise Unsupported(f"config.{name}={found!r} is not supported, only {value!r}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def activation(config: Any, name: str = "hidden_act") -> str:
    """The activation that a field of the config names, as a key of activations.TABLE. Raises Unsupported."""
    found = getattr(config, name)
    if found not in activations.NAMES:
        raise Unsupported(f"config.{name}={found!r} is not supported, only {', '.join(activations.NAMES)}")
    return activations.NAMES[found]


@dataclass(frozen=True)
class Norm:
    """kind: 'rms', 'gemma' (RMS with weight + 1), 'unit' (RMS without a weight), 'layer', or 'layer_1p' (LayerNorm with
    weight + 1)."""

    kind: str = "rms"
    eps: float = 1e-6
    bias: bool = False


@dataclass(frozen=True)
class Attention:
    """Self-attention with a KV cache: q, k and v in one projection, rotary embedding, paged attention, projection.

    key_bias      False: with `bias`, keys have none (ARCH.absent has its name)
    scale         of the scores; None: head_size ** -0.5
    window        tokens that a query sees, itself included; None: all
    softcap       cap * tanh(score / cap); 0: none
    rope          parameters of the rotary embedding as transformers has them; None: no positions in this layer
    interleaved   pairs of the rotary embedding are neighbours (GPT-J) instead of halves (NeoX)
    head_norm     the norm of each query and key head, before the rotary embedding
    wide_norm     one norm over all query heads, and one over all key heads
    by_head       the checkpoint's packed projection has, for one key head after the other, its queries, key and value
    sinks         a learned logit of each head joins the softmax, without a value (GPT-OSS)
    out_norm      one norm over all heads' outputs, before the output projection
    value_norm    the norm of each value head; it has no weight
    keys_as_values  values are the projected keys, before their norm and the rotary embedding
    shared        the earlier layer whose keys and values this one reads: it has no projection of its own for them
    alibi         the largest exponent of ALiBi's slopes, 8 in the paper; None: no ALiBi
    gated         the output of each head is multiplied by the sigmoid of a gate, which the checkpoint's query
                  projection has after each head's query
    causal        False: tokens see those behind them, too
    """

    heads: int
    kv_heads: int
    head_size: int
    bias: bool = False
    out_bias: bool = False
    key_bias: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    rope: Mapping[str, Any] | None = None
    max_positions: int = 8192
    interleaved: bool = False
    head_norm: Norm | None = None
    wide_norm: Norm | None = None
    by_head: bool = False
    sinks: bool = False
    out_norm: Norm | None = None
    value_norm: Norm | None = None
    keys_as_values: bool = False
    shared: int | None = None
    alibi: float | None = None
    gated: bool = False
    causal: bool = True

    @property
    def slopes(self) -> list[float] | None:
        """The slope of each head (ALiBi, Press et al., arXiv 2108.12409), in the order of MPT's code."""
        if self.alibi is None:
            return None
        count = 1 << (self.heads - 1).bit_length()
        found = [2.0 ** (-self.alibi * (i + 1) / count) for i in range(count)]
        return found if count == self.heads else [*found[1::2], *found[::2]][: self.heads]

    @property
    def kv_channels(self) -> int:
        """Numbers in the cache for each token; none in another layer's cache."""
        return 2 * self.kv_heads * self.head_size if self.shared is None else 0

    def kv_read(self, context: int) -> int:
        """Numbers of the cache that a query at the end of `context` tokens reads."""
        return 2 * self.kv_heads * self.head_size * min(context, self.window or context)

    def flops(self, context: int) -> int:
        """Operations of a query at the end of `context` tokens."""
        return 4 * self.heads * self.head_size * min(context, self.window or context)


@dataclass(frozen=True)
class Indexer:
    """The choice of keys in sparse attention (DeepSeek-V3.2), by small queries of `heads` and one small key per token.

    topk         keys that a query attends to
    interleaved  pairs of the indexer's rotary embedding are neighbours instead of halves
    shared       the layer has none, and attends to the keys that the layer before it attends to
    """

    heads: int
    head_size: int
    topk: int
    interleaved: bool = False
    shared: bool = False
    norm: Norm = Norm("layer", 1e-6, True)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): the cache holds one latent and one rotary key for each token.

    query_rank    channels of the queries' latent; None: queries are projected directly
    rank          channels of the latent of keys and values
    nope_size, rope_size, value_size  channels of a head: key without positions, rotary key, value
    scale         of the scores; None: (nope_size + rope_size) ** -0.5
    bias          of the projections to latents and of the output
    indexer       of sparse attention; None: queries attend to all keys
    """

    heads: int
    query_rank: int | None
    rank: int
    nope_size: int
    rope_size: int
    value_size: int
    scale: float | None = None
    bias: bool = False
    rope: Mapping[str, Any] | None = None
    max_positions: int = 8192
    interleaved: bool = True
    norm: Norm = Norm()
    window: None = None
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        """Raise Unsupported for sizes that are missing."""
        fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = (self.rank, self.nope_size, self.rope_size, self.value_size)
        for name, size in zip(fields, sizes, strict=True):
            if size is None:
                raise Unsupported(f"config.{name}=None is not supported, only integers above 0")

    @property
    def index_channels(self) -> int:
        """Numbers in the indexer's cache for each token."""
        return 0 if self.indexer is None or self.indexer.shared else self.indexer.head_size

    @property
    def kv_channels(self) -> int:
        """Numbers in the cache for each token."""
        return self.rank + self.rope_size + self.index_channels

    def _chosen(self, context: int) -> int:
        return context if self.indexer is None else min(context, self.indexer.topk)

    def kv_read(self, context: int) -> int:
        """Numbers of the cache that a query at the end of `context` tokens reads."""
        return self._chosen(context) * (self.rank + self.rope_size) + context * self.index_channels

    def flops(self, context: int) -> int:
        """Operations of a query at the end of `context` tokens, which is in the space of latents."""
        scored = 2 * self.indexer.heads * self.index_channels if self.indexer is not None else 0
        return 2 * self.heads * (2 * self.rank + self.rope_size) * self._chosen(context) + scored * context


NO_POSITIONS: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Recurrent:
    """Base of mixers that keep a state of fixed size for each sequence instead of the keys of its tokens.

    kernel  tokens that the short convolution sees, which keeps kernel - 1 of them
    """

    kernel: int = 4
    # Fields of other mixers
    window = None
    rope = NO_POSITIONS
    interleaved = False
    kv_channels = max_positions = 0

    def kv_read(self, context: int) -> int:
        """Numbers of the cache that a query at the end of `context` tokens reads."""
        return 0

    @property
    def conv_channels(self) -> int:
        raise NotImplementedError

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of the recurrent state of a sequence, in float32."""
        raise NotImplementedError

    def flops(self, context: int) -> int:
        """Operations of a token in the convolution and the recurrence, for any context."""
        return 2 * self.kernel * self.conv_channels + 6 * math.prod(self.state)

    @property
    def shared(self) -> dict[str, int]:
        """Sizes that the ranks share: {name in a message: size}."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mamba(Recurrent):
    """A selective state space layer (Mamba, arXiv 2312.00752).

    inner      channels, each of which has a state of `size` numbers
    rank       channels of the projection to time steps
    bias       of the projections from and to the stream
    part_norm  the norm of the time steps, B and C, each (Jamba); None: none
    """

    inner: int = 0
    size: int = 0
    rank: int = 0
    conv_bias: bool = True
    bias: bool = False
    part_norm: Norm | None = None

    @property
    def conv_channels(self) -> int:
        return self.inner

    @property
    def state(self) -> tuple[int, ...]:
        return self.inner, self.size

    @property
    def shared(self) -> dict[str, int]:
        return {f"{self.inner} channels of Mamba": self.inner}


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """A state space layer with one decay for each head (Mamba-2, arXiv 2405.21060).

    heads, head_size  of the input; groups of heads share B and C of `size` numbers
    norm              of each group's output, after its gate
    bias              of the projections from and to the stream
    dt_limits         least and largest time step; None: no limit
    """

    heads: int = 0
    head_size: int = 0
    groups: int = 1
    size: int = 0
    norm: Norm = Norm()
    conv_bias: bool = True
    bias: bool = False
    dt_limits: tuple[float, float | None] = (0.0, None)

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.size

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.head_size, self.size

    @property
    def shared(self) -> dict[str, int]:
        sizes = {f"{self.heads} heads of Mamba-2": self.heads}
        # One group is copied to all ranks.
        return sizes if self.groups == 1 else {**sizes, f"{self.groups} groups of Mamba-2": self.groups}


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """The gated delta rule (arXiv 2412.06464): one decay for each value head.

    key_heads, key_size      of queries and keys, each of which serves the same number of value heads
    value_heads, value_size  of values and of the output's gate
    norm                     of each head's output, before its gate
    projections              how many of queries, keys, values, gates, rates and decays, in this order, each projection
                             of the checkpoint has; (): two projections of four and two, whose rows are sorted by key
                             head (Qwen3-Next)
    rate_scale               multiplies the sigmoid of the rates; 2: eigenvalues of the state's change may be negative
    """

    key_heads: int = 0
    value_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    norm: Norm = Norm()
    projections: tuple[int, ...] = ()
    rate_scale: float = 1.0

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def state(self) -> tuple[int, ...]:
        return self.value_heads, self.key_size, self.value_size

    @property
    def shared(self) -> dict[str, int]:
        return {f"{self.key_heads} key heads of the delta rule": self.key_heads}


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A convolution between two gates, all projected from the stream (LFM2): out(gate2 * conv(gate1 * x)).

    channels  of the convolution; bias: of the projections and the convolution
    """

    channels: int = 0
    bias: bool = False

    @property
    def conv_channels(self) -> int:
        return self.channels

    @property
    def state(self) -> tuple[int, ...]:
        return (0,)

    @property
    def shared(self) -> dict[str, int]:
        return {f"{self.channels} channels of the convolution": self.channels}


@dataclass(frozen=True)
class NoMixer(Recurrent):
    """A layer that mixes no tokens: it has an MLP alone (Nemotron-H)."""

    kernel: int = 1

    @property
    def conv_channels(self) -> int:
        return 0

    @property
    def state(self) -> tuple[int, ...]:
        return (0,)

    @property
    def shared(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class KimiDelta(Recurrent):
    """The delta rule with a decay for each channel of a key (Kimi Linear, arXiv 2510.26692).

    norm  of each head's output, before its gate
    """

    heads: int = 0
    head_size: int = 0
    norm: Norm = Norm()

    @property
    def conv_channels(self) -> int:
        return 3 * self.heads * self.head_size

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.head_size, self.head_size

    @property
    def shared(self) -> dict[str, int]:
        return {f"{self.heads} heads of the delta rule": self.heads}


@dataclass(frozen=True)
class LinearAttention(Recurrent):
    """Linear attention with a decay: GLA (arXiv 2312.06635) or retention (arXiv 2307.08621).

    kernel                   1: no short convolution of queries, keys and values
    heads, key_size          of queries; kv_heads: of keys and values, each of which serves the same number of heads
    value_size               of a head's values, and of the output's gate
    rank                     channels of the projection to the decays of each channel of a key, whose log-sigmoid is
                             divided by `normalizer` and is at least `least_decay`; None: retention's constant decays,
                             one for each head
    rope                     of queries and keys; None: no positions
    norm, norm_name          of each head's output, before its gate, and its name in the checkpoint
    gated                    the output has a gate
    """

    heads: int = 0
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    rank: int | None = None
    normalizer: float = 1.0
    least_decay: float | None = None
    rope: Mapping[str, Any] | None = None
    max_positions: int = 0
    norm: Norm = Norm()
    norm_name: str = "g_norm"
    gated: bool = True

    @property
    def conv_channels(self) -> int:
        channels = self.heads * self.key_size + self.kv_heads * (self.key_size + self.value_size)
        return channels if self.kernel > 1 else 0

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.key_size, self.value_size

    @property
    def shared(self) -> dict[str, int]:
        heads = {f"{self.heads} heads of linear attention": self.heads}
        return heads | {f"{self.kv_heads} key heads of linear attention": self.kv_heads}


@dataclass(frozen=True)
class Rwkv7(Recurrent):
    """RWKV-7's time mixing (arXiv 2503.14456): a delta rule whose erased and written directions differ.

    kernel                   tokens that each projection reads a mix of
    heads, head_size         of queries, keys, values and the output's gate, together the channels of the stream
    decay_rank, rate_rank, gate_rank  channels of the projections to decays, to the rates of the delta rule, and to the
                             gate
    value_rank               channels of the projection to the part of the first layer's values in this layer's; None:
                             the first layer
    key_eps                  added to the squared length of the erased direction before its root
    norm                     of each head's output, with a weight and bias of its own
    """

    kernel: int = 2
    heads: int = 0
    head_size: int = 0
    decay_rank: int = 0
    rate_rank: int = 0
    gate_rank: int = 0
    value_rank: int | None = None
    key_eps: float = 1e-6
    norm: Norm = Norm("layer", bias=True)

    @property
    def conv_channels(self) -> int:
        return self.heads * self.head_size

    @property
    def state(self) -> tuple[int, ...]:
        return self.heads, self.head_size, self.head_size

    @property
    def shared(self) -> dict[str, int]:
        return {f"{self.heads} heads of RWKV-7": self.heads}


Mixer = Attention | LatentAttention | Recurrent


@dataclass(frozen=True)
class Mlp:
    """down(norm(act(gate(x)) * up(x))), or without a gate down(norm(act(up(x)))). inner_norm: None leaves it out.

    shift  x is a mix of a token and the one before it, with a learned weight for each channel (RWKV)
    """

    intermediate: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    inner_norm: Norm | None = None
    shift: bool = False


@dataclass(frozen=True)
class Experts:
    """A router and the gated MLPs of each token's top_k experts.

    normalize   their weights sum to 1
    names       an expert's gate, up and down projection in the checkpoint
    scoring     'softmax' or 'sigmoid' of the router's logits
    correction  the ranks of experts are their scores plus a bias, which their weights are without
    groups, top_groups  experts are chosen from the best top_groups of so many equal groups
    scale       multiplies the weights
    shared      intermediate size of the experts of all tokens, as one MLP; 0: none
    shared_gate that MLP's result is multiplied by sigmoid(gate(x)), one number for each token
    clamped     alpha and limit of GPT-OSS's clamped SwiGLU: router and experts then have biases, and the checkpoint has
                one tensor for all experts; None: SiLU
    mxfp4       the matrices of these are in MXFP4
    activation  'silu' or 'gelu_tanh'
    """

    count: int
    top_k: int
    intermediate: int
    normalize: bool = True
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    scoring: str = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    shared_gate: bool = False
    clamped: tuple[float, float] | None = None
    mxfp4: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        """Raise Unsupported for groups that cannot be formed, or that have too few experts."""
        count, groups, best = self.count, self.groups, self.top_groups
        least = 2 if self.correction else 1  # a group's score is then that of its best two
        if count % groups or count < least * groups:
            fits = ", ".join(str(n) for n in range(1, count // least + 1) if count % n == 0)
            raise Unsupported(f"config.n_group={groups} is not supported with {count} experts, only {fits}")
        if not 1 <= best <= groups:
            raise Unsupported(f"config.topk_group={best} is not supported, only 1 to n_group={groups}")
        most = best * (count // groups)
        known = isinstance(self.top_k, int)  # DeepSeek-V2's default config has none
        if known and not 1 <= self.top_k <= most:
            raise Unsupported(
                f"config.num_experts_per_tok={self.top_k} is not supported, only 1 to {most}, the experts in"
                f" {best} of {groups} groups"
            )

    @property
    def plain(self) -> bool:
        """Whether the router is a softmax over all experts."""
        return (self.scoring, self.correction, self.groups, self.scale) == ("softmax", False, 1, 1.0)


NUMBERED = ("w1", "w3", "w2")
# {names of an expert's gate, up and down projection: the function in decoder.py for Architecture.experts}
EXPERT_MAPPINGS = {Experts.names: "expert_mapping", NUMBERED: "numbered_expert_mapping"}


@dataclass(frozen=True)
class ParallelExperts:
    """Experts next to a layer's MLP, which read the same x (Gemma 4):

        mlp(before_mlp(x)) becomes norm(mlp(before_mlp(x))) + norm(experts(norm(x), router(x)))

    The router's projection reads the normalized x times a weight, divided by the root of its channels. Each expert has
    a learned factor of its weights. norm: of all four, without a weight in the router.
    """

    experts: Experts
    norm: Norm = Norm()

    def __post_init__(self) -> None:
        _only_gelu(self.experts.activation, "experts next to an MLP")


@dataclass(frozen=True)
class LayerInput:
    """Inputs of each layer in addition to the residual stream x (Gemma 4's per-layer embeddings):

        x += norm(projection(act(gate(x)) * input))

    with input = (norm(projection(embedding) / sqrt(hidden)) + sqrt(size) * own embedding) / sqrt(2).

    vocab, size  of the layers' own embeddings
    """

    vocab: int
    size: int
    activation: str = "gelu_tanh"
    norm: Norm = Norm()

    def __post_init__(self) -> None:
        _only_gelu(self.activation, "inputs of layers")


def _only_gelu(activation: str, what: str) -> None:
    if activation != "gelu_tanh":
        raise Unsupported(
            f"config.hidden_activation: {activation!r} of {what} is not supported, only 'gelu_tanh'"
        )


@dataclass(frozen=True)
class Positions:
    """A learned embedding of each position, added to that of the token.

    count   positions; offset: row of the first one, after rows that are not used
    """

    count: int
    offset: int = 0


@dataclass(frozen=True)
class Cross:
    """Attention to an encoder's states after self-attention, with the norm before it. Keys have no bias."""

    heads: int
    head_size: int
    norm: Norm


@dataclass(frozen=True)
class InnerMlp:
    """A gated MLP whose weights a sequence changes while it is read (TTT-E2E), with its norms:

        x += after(mlp(before(x)))

    At the end of each chunk of tokens, one step of SGD on the mean loss of the chunk's next tokens changes the weights
    of these MLPs in all layers: W -= rate * g. If the global norm of the gradients is above `clip`, g is scaled down to
    it. The gradient passes through the whole layers, and through the chunk's own keys and values, not earlier ones.

    chunk  tokens; clip: 0: none
    """

    intermediate: int
    chunk: int
    rate: float
    clip: float = 0.0
    before: Norm | None = None
    after: Norm | None = None


@dataclass(frozen=True)
class Layer:
    """One decoder layer on the residual stream x:

        x += multiplier * after_attention(attention(before_attention(x)))
        x += multiplier * after_mlp(mlp(before_mlp(x)))

    or, if `parallel`, both from the same x; without before_mlp the MLP then reads what the attention reads. Norms that
    are None are left out, and so is an MLP that is None. names: the modules' names in the checkpoint, where they are
    not Llama's. experts: next to the MLP. scaled: a learned number multiplies the layer's result. cross: between
    attention and MLP.
    """

    attention: Mixer
    mlp: Mlp | Experts | None
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    multiplier: float = 1.0
    names: Mapping[str, str] = field(default_factory=dict)
    experts: ParallelExperts | None = None
    scaled: bool = False
    cross: Cross | None = None
    inner: InnerMlp | None = None

    @property
    def all_experts(self) -> Experts | None:
        """The layer's experts, instead of an MLP or next to one."""
        if self.experts is not None:
            return self.experts.experts
        return self.mlp if isinstance(self.mlp, Experts) else None

    def name(self, part: str) -> str:
        """The name of a module: self_attn, mlp, or one of the four norms."""
        return self.names.get(part, NAMES.get(part, part))


NAMES = {
    "before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm", "out_norm": "attn_sub_norm",
    "inner_norm": "ffn_sub_norm", "cross": "encoder_attn", "before_cross": "encoder_attn_layer_norm",
    "inner": "inner_mlp", "before_inner": "inner_layernorm", "after_inner": "post_inner_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model: embedding, layers, final norm, head.

    tied              the head's weight is the embedding's
    head_bias         the head has a bias
    embedding_scale   multiplies the embedding; logits_scale multiplies the logits
    embedding_norm    the norm of the embedding (RWKV); None: none
    logits_softcap    cap * tanh(logit / cap); 0: none
    layer_input       what each layer reads of a token itself; None: nothing
    positions         learned positions; None: none
    tower             modules that tokens of a text do not pass
    more_ids          ids behind the vocabulary, which the model reads and never writes
    """

    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    layer_input: LayerInput | None = None
    positions: Positions | None = None
    embedding_norm: Norm | None = None
    tower: tuple[Part, ...] = ()
    more_ids: int = 0


def limits(values: Sequence[float]) -> tuple[float, float | None]:
    """The limits of Mamba-2's time steps from a config's pair of numbers, of which the second may be infinite."""
    pair = isinstance(values, list | tuple) and [type(n) in (int, float) for n in values] == [True] * 2
    if not pair or not 0 <= values[0] <= values[1]:
        raise Unsupported(
            f"config.time_step_limit={values!r:.80} is not supported, only two numbers from 0, the lesser one first"
        )
    least, most = values
    return float(least), None if math.isinf(most) else float(most)


def gated_size(config: Any) -> int:
    """config.intermediate_size, or with config.block_auto_adjust_ff_dim (LFM2) Llama's rule for gated MLPs:

    two thirds of it, times block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of.
    """
    size: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    size = int((1.0 if factor is None else factor) * int(2 * size / 3))
    rounded: int = multiple * -(-size // multiple)
    return rounded


def head_size(config: Any) -> int:
    """The size of an attention head. Raises Unsupported if none is given and the hidden size does not divide."""
    try:
        return attention_sizes.head_size(config)
    except ValueError as error:
        raise Unsupported(str(error)) from error


ROPE_NUMBERS = (
    "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
MAY_BE_ZERO = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")  # as if absent


def check_rope(parameters: Mapping[str, Any], field: str = "rope_parameters") -> None:
    """Raise Unsupported for rotary parameters that are no numbers, or none that can be used.

    field: of the config, which has them
    """
    for name in ROPE_NUMBERS:
        value = parameters.get(name)
        number = type(value) in (int, float)
        if value is None or (number and 0 < value < math.inf) or (value == 0 and name in MAY_BE_ZERO):
            continue
        raise Unsupported(f"config.{field}: {name}={value!r} is not supported, only numbers above 0")
    if (parameters.get("partial_rotary_factor") or 1.0) > 1:
        factor = parameters["partial_rotary_factor"]
        raise Unsupported(f"config.{field}: partial_rotary_factor={factor!r} is not supported, at most 1")


def rope(config: Any, kind: str = "", partial: bool = False) -> dict[str, Any]:
    """The rotary parameters of a config. Raises Unsupported.

    kind     those of one layer type, where layers differ
    partial  the model of this architecture may rotate a part of each head (partial_rotary_factor)
    """
    given = getattr(config, "rope_parameters", None)
    own = given.get(kind, given) if isinstance(given, Mapping) else given
    if not isinstance(own, Mapping | None) or (own is None and given is not None):
        what = f"{kind}={own!r}" if isinstance(given, Mapping) else repr(given)
        raise Unsupported(f"config.rope_parameters: {what} is not supported, only a table of fields")
    found = attention_sizes.rope_parameters(config, kind)
    scaling = found.get("rope_type") or found.get("type") or "default"
    if type(scaling) is not str or (scaling != "default" and scaling not in ROPE_TYPES):
        known = ", ".join(map(repr, ("default", *ROPE_TYPES)))
        raise Unsupported(f"config.rope_parameters: rope_type={scaling!r} is not supported, only {known}")
    check_rope(found)
    partial = partial or scaling == "proportional"
    if not partial and (found.pop("partial_rotary_factor", None) or 1.0) != 1.0:
        factor = attention_sizes.rope_parameters(config, kind)["partial_rotary_factor"]
        raise Unsupported(ambiguous(config, f"partial_rotary_factor={factor!r}", "rotates whole heads"))
    if scaling == "yarn" and own is not given and not found.get("truncate", True):
        raise Unsupported(
            ambiguous(config, f"rope_parameters: truncate=False of {kind}", "reads it for all layers alone")
        )
    if scaling == "longrope":
        found = _longrope(config, found)
    missing = [name for name in ROPE_TYPES.get(scaling, ()) if found.get(name) is None]
    if missing:
        raise Unsupported(f"config.rope_parameters: rope_type={scaling!r} needs {', '.join(missing)}")
    if scaling == "proportional" and found.get("factor", 1.0) != 1.0:
        factor = found["factor"]
        raise Unsupported(
            f"config.rope_parameters: factor={factor!r} with rope_type='proportional' is not supported, only 1"
        )
    return found


def ambiguous(config: Any, field: str, meaning: str) -> str:
    """The message about a field that transformers ignores in this architecture and vLLM applies.

    meaning: what transformers' model does instead
    """
    name = (getattr(config, "architectures", None) or ["this architecture"])[0]
    return (
        f"config.{field} is not supported: {name} of transformers {meaning}, and vLLM applies the field; remove it,"
        " or use an architecture that has it"
    )


def _longrope(config: Any, found: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE's parameters with the lengths that choose the factors. config.max_model_len: set by the engine."""
    longest = getattr(config, "max_model_len", None) or config.max_position_embeddings
    found = {"max_model_len": longest, **found}
    pairs = int(head_size(config) * found.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        given = found.get(name)
        count = len(given) if isinstance(given, Sequence) else None
        if count != pairs:
            what = f"{name}={given!r}" if count is None else f"{name} with {count} numbers"
            raise Unsupported(
                f"config.rope_parameters: {what} is not supported, only {pairs} numbers, one for each pair of channels"
            )
    if type(found["original_max_position_embeddings"]) is not int:
        raise Unsupported(
            "config.rope_parameters: rope_type='longrope' needs original_max_position_embeddings"
        )
    return found


def windows(config: Any) -> list[int | None]:
    """The window of each layer by config.layer_types; None: full attention."""
    size = config.sliding_window or None
    types = config.layer_types
    if types is None:
        return [None] * config.num_hidden_layers
    return [size if kind == "sliding_attention" else None for kind in types]


def one_window(config: Any) -> list[int | None]:
    """The same for architectures in which all layers have config.sliding_window."""
    return [config.sliding_window or None] * config.num_hidden_layers


def attention(config: Any, window: int | None = None, partial: bool = False, **differs: Any) -> Attention:
    """Llama's attention with the sizes of a config.

    partial: see rope. differs: fields of Attention that are not Llama's
    """
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    made: dict[str, Any] = {
        "heads": config.num_attention_heads, "kv_heads": kv_heads, "head_size": head_size(config), "window": window,
        "max_positions": config.max_position_embeddings, **differs,
    }  # fmt: skip
    return Attention(**{"rope": rope(config, partial=partial), **made} if "rope" not in made else made)


def llama(
    config: Any, windows: Sequence[int | None] | None = None, mlp_bias: bool = False, **differs: Any
) -> Decoder:
    """Llama with the sizes of a config.

    windows: of each layer; None: full attention. differs: arguments of `attention`
    """
    norm = Norm(eps=config.rms_norm_eps)
    mlp = Mlp(config.intermediate_size, activation(config), bias=mlp_bias)
    layers = tuple(
        Layer(attention(config, window, **differs), mlp, before_attention=norm, before_mlp=norm)
        for window in windows or [None] * config.num_hidden_layers
    )
    return Decoder(config.vocab_size, config.hidden_size, layers, norm, bool(config.tie_word_embeddings))


def latent_attention(config: Any, interleaved: bool = True) -> LatentAttention:
    """DeepSeek's attention with the sizes of a config. With YaRN the scores are scaled by its magnitude, squared."""
    parameters, size = rope(config), config.qk_nope_head_dim + config.qk_rope_head_dim
    scale, over, factor = size**-0.5, parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    scaled = (parameters.get("rope_type") or "default") != "default"
    if scaled and over and factor > 1.0:
        scale *= (0.1 * over * math.log(factor) + 1.0) ** 2
    return LatentAttention(
        config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim,
        config.qk_rope_head_dim, config.v_head_dim, scale, bool(config.attention_bias), parameters,
        config.max_position_embeddings, interleaved,
    )  # fmt: skip


def sigmoid_experts(config: Any) -> Experts:
    """DeepSeek-V3's router and experts with the sizes of a config."""
    refuse(config, hidden_act="silu", topk_method="noaux_tc", scoring_func="sigmoid")
    return Experts(
        config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob),
        scoring="sigmoid", correction=True, groups=config.n_group, top_groups=config.topk_group,
        scale=config.routed_scaling_factor, shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )  # fmt: skip


def indexer(config: Any, interleaved: bool, shared: bool = False) -> Indexer:
    """DeepSeek-V3.2's indexer with the sizes of a config. Raises Unsupported for the other rotary layout."""
    refuse(config, indexer_rope_interleave=interleaved)
    if config.index_head_dim < config.qk_rope_head_dim:
        raise Unsupported(
            f"config.index_head_dim={config.index_head_dim} is not supported, only sizes from"
            f" qk_rope_head_dim={config.qk_rope_head_dim} on"
        )
    return Indexer(config.index_n_heads, config.index_head_dim, config.index_topk, interleaved, shared)


def dense_layers(config: Any) -> list[bool]:
    """Which layers have an MLP instead of experts, by config.mlp_layer_types. Raises Unsupported for other kinds."""
    kinds = config.mlp_layer_types[: config.num_hidden_layers]
    if len(kinds) < config.num_hidden_layers or set(kinds) - {"dense", "sparse"}:
        raise Unsupported(
            f"config.mlp_layer_types={config.mlp_layer_types!r} is not supported, only 'dense' or 'sparse' for each of"
            f" {config.num_hidden_layers} layers"
        )
    return [kind == "dense" for kind in kinds]


def latent_decoder(
    config: Any, experts: Experts, dense: Sequence[bool] | None = None, indexers: Sequence[Indexer] = (),
    interleaved: bool = True,
) -> Decoder:  # fmt: skip
    """DeepSeek's decoder with the sizes of a config: some layers have an MLP, the others experts.

    dense: which have an MLP; by default the first config.first_k_dense_replace. indexers: one for each layer, or none.
    interleaved: see LatentAttention
    """
    if dense is None:
        dense = [i < config.first_k_dense_replace for i in range(config.num_hidden_layers)]
    norm, attention = Norm(eps=config.rms_norm_eps), latent_attention(config, interleaved)
    mlp = Mlp(config.intermediate_size, activation(config))
    none: list[Indexer | None] = [None] * config.num_hidden_layers
    attentions = [replace(attention, indexer=x) for x in indexers or none]
    layers = tuple(
        Layer(a, mlp if has_mlp else experts, before_attention=norm, before_mlp=norm)
        for a, has_mlp in zip(attentions, dense, strict=True)
    )
    return Decoder(config.vocab_size, config.hidden_size, layers, norm, bool(config.tie_word_embeddings))
