"""Drop-in attention processors for diffusers: projections and norms stay the modules of the attention layer."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attend, attention_dense
from fastkernels.overrides.linear.modules import joined_linears, product, products
from fastkernels.overrides.rope.qk_norm_rope_pair import positioned
from fastkernels.overrides.rope.rope_nd import rope_nd


class DiffusersAttnProcessor2_0:
    """AttnProcessor2_0, the processor of UNets and VAEs: self and cross attention over tokens or an image.

    hidden_states [B, S, C] or [B, C, H, W]; encoder_hidden_states [B, Sk, Ck], by default hidden_states;
    attention_mask as the host's Attention.prepare_attention_mask takes it. Returns hidden_states' shape.
    """

    live_methods = ("__call__",)

    def __init__(self):
        pass

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        return _attended(attn, hidden_states, encoder_hidden_states, attention_mask, temb)


class DiffusersFluxAttnProcessor:
    """FluxAttnProcessor: joint attention of text and image tokens, or of both in one sequence, with rotary positions.

    hidden_states [B, S, C]; encoder_hidden_states [B, St, C] or None; image_rotary_emb: cosines and sines
    [St + S, head_dim]. Returns hidden_states' shape, and encoder_hidden_states' where there are any.
    """

    live_methods = ("__call__",)
    _attention_backend = None
    _parallel_config = None

    def __init__(self):
        pass

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our processor does not suit this attention layer, or None."""
        return _elsewhere(module.processor)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reason = _elsewhere(self)
        if reason is not None:  # set after the patch
            attention_dense.note(reason)
            theirs: Any = type(self).__mro__[1]  # in a live model, the host's class
            given = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return theirs.__call__(self, attn, *given)
        text = None if attn.added_kv_proj_dim is None else encoder_hidden_states
        which = "qkv" if text is None or attn.fused_projections else "qk"
        q, k, *of_image = _heads(attn, hidden_states, "to_{}", "to_qkv", which)
        text_q, text_k, *of_text = _heads(attn, text, "add_{}_proj", "to_added_qkv", which)
        if text is not None and not of_image:
            both = joined_linears(attn.add_v_proj, text, attn.to_v, hidden_states)
            of_image = [both.unflatten(-1, (-1, attn.head_dim))]
        v = torch.cat((*of_text, *of_image), dim=1) if of_text else of_image[0]
        q, k = positioned(attn, (q, text_q), (k, text_k), image_rotary_emb)
        found = attend(q, k, v, attn.head_dim**-0.5, attention_mask).to(q.dtype)
        if encoder_hidden_states is None:
            return found
        texts = encoder_hidden_states.shape[1]
        image = attn.to_out[1](product(attn.to_out[0], found[:, texts:].contiguous()))
        return image, attn.to_add_out(found[:, :texts].contiguous())  # type: ignore[return-value]


class DiffusersHunyuanVideo15AttnProcessor2_0:
    """HunyuanVideo15AttnProcessor2_0: joint attention of a video's tokens and the valid tokens of its text.

    hidden_states [B, S, C]; encoder_hidden_states [B, St, C]; attention_mask [B, St] of the text, whose valid tokens
    come first, as the host's model sorts them; image_rotary_emb: cosines and sines [S, head_dim]. Returns both shapes;
    what the text has behind its valid tokens is projected zeros. The host adds a mask of all pairs of tokens, 2.5
    billion for 121 frames of 480 x 832 pixels. Here the padding is a sequence of its own.
    """

    live_methods = ("__call__",)
    _attention_backend = None
    _parallel_config = None

    def __init__(self):
        pass

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our processor does not suit this attention layer, or None."""
        if getattr(module, "fused_projections", False):
            return "its projections were fused"
        return _elsewhere(module.processor)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reason = _elsewhere(self)
        if encoder_hidden_states is None or attention_mask is None:
            reason = "it was called without a text or its mask"
        elif attention_mask.shape[1] != encoder_hidden_states.shape[1]:
            reason = "its mask is not of the text alone"
        if reason is not None:
            attention_dense.note(reason)
            theirs: Any = type(self).__mro__[1]  # in a live model, the host's class
            given = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
            return theirs.__call__(self, attn, *given)
        assert encoder_hidden_states is not None and attention_mask is not None
        heads = (attn.heads, -1)
        q, k, v = (t.unflatten(2, heads) for t in products((attn.to_q, attn.to_k, attn.to_v), hidden_states))
        q, k = positioned(attn, (q, None), (k, None), image_rotary_emb)
        text = products((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), encoder_hidden_states)
        text_q, text_k, text_v = (t.unflatten(2, heads) for t in text)
        text_q = text_q if attn.norm_added_q is None else attn.norm_added_q(text_q)
        text_k = text_k if attn.norm_added_k is None else attn.norm_added_k(text_k)
        both = [torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v))]
        valid = attention_mask.bool()
        tokens, length = q.shape[1], both[0].shape[1]
        starts = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32) * length
        ends = starts[:-1] + tokens + valid.sum(1, dtype=torch.int32)  # of what is valid
        cu = torch.cat((torch.stack((starts[:-1], ends), dim=1).flatten(), starts[-1:]))
        flat = [t.flatten(0, 1)[None] for t in both]
        found = attention_dense(*flat, flat[0].shape[-1] ** -0.5, None, cu, cu, length, length)
        found = found.view(len(q), length, -1).to(q.dtype)
        image = attn.to_out[1](product(attn.to_out[0], found[:, :tokens].contiguous()))
        return image, attn.to_add_out(found[:, tokens:] * valid[..., None])  # type: ignore[return-value]


class DiffusersJointAttnProcessor2_0:
    """JointAttnProcessor2_0 of Stable Diffusion 3: joint attention of image tokens and the text behind them.

    hidden_states [B, S, C]; encoder_hidden_states [B, St, C] or None. Returns hidden_states' shape, and
    encoder_hidden_states' where there are any. As in the host, an attention_mask is not used.
    """

    live_methods = ("__call__",)

    def __init__(self):
        pass

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        q, k, v = _normed(
            attn, products((attn.to_q, attn.to_k, attn.to_v), hidden_states), attn.norm_q, attn.norm_k
        )
        text = encoder_hidden_states
        if text is not None:
            added = products((attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), text)
            of_text = _normed(attn, added, attn.norm_added_q, attn.norm_added_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in zip((q, k, v), of_text, strict=True))
        found = attend(q, k, v, q.shape[-1] ** -0.5).to(q.dtype)
        if text is None:
            return attn.to_out[1](product(attn.to_out[0], found))
        tokens = hidden_states.shape[1]
        image = attn.to_out[1](product(attn.to_out[0], found[:, :tokens].contiguous()))
        texts = found[:, tokens:]
        if not attn.context_pre_only:
            texts = attn.to_add_out(texts.contiguous())
        return image, texts  # type: ignore[return-value]


class DiffusersSanaAttnProcessor2_0:
    """SanaAttnProcessor2_0: self and cross attention whose norms, if any, are over all heads of a token.

    hidden_states [B, S, C]; encoder_hidden_states [B, Sk, Ck], by default hidden_states; attention_mask as the host's
    Attention.prepare_attention_mask takes it. Returns hidden_states' shape. Sana's linear attention has another class.
    """

    live_methods = ("__call__",)

    def __init__(self):
        pass

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        mask = _prepared(attn, attention_mask, context)
        q, (k, v) = attn.to_q(hidden_states), products((attn.to_k, attn.to_v), context)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (q, k, v))
        found = attend(q, k, v, q.shape[-1] ** -0.5, mask).to(q.dtype)
        found = attn.to_out[1](product(attn.to_out[0], found))
        return found if attn.rescale_output_factor == 1 else found / attn.rescale_output_factor


class DiffusersHunyuanAttnProcessor2_0:
    """HunyuanAttnProcessor2_0 of HunyuanDiT: AttnProcessor2_0 whose queries have rotary positions.

    image_rotary_emb: cosines and sines [S, head_dim] of neighboring pairs of channels; keys have them in self attention
    only. The rest as in DiffusersAttnProcessor2_0.
    """

    live_methods = ("__call__",)

    def __init__(self):
        pass

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _attended(attn, hidden_states, encoder_hidden_states, attention_mask, temb, image_rotary_emb)


def _attended(
    attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, attention_mask: Any,
    temb: torch.Tensor | None, rotary: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Self or cross attention over tokens or an image, with the layer's norms, residual and factor."""
    x = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
    image = x.shape if x.dim() == 4 else None
    if image is not None:
        x = x.flatten(2).transpose(1, 2)
    if attn.group_norm is not None:
        x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
    context = x if encoder_hidden_states is None else encoder_hidden_states
    mask = _prepared(attn, attention_mask, context)
    if encoder_hidden_states is not None and attn.norm_cross:
        context = attn.norm_encoder_hidden_states(context)
    if encoder_hidden_states is None:
        projected = products((attn.to_q, attn.to_k, attn.to_v), x)
    else:
        projected = attn.to_q(x), *products((attn.to_k, attn.to_v), context)
    q, k, v = _normed(attn, projected, attn.norm_q, attn.norm_k)
    if rotary is not None:
        cos, sin = (t.to(q.device) for t in rotary)
        q = rope_nd(q, cos, sin, False)
        k = k if attn.is_cross_attention else rope_nd(k, cos, sin, False)
    # The host leaves the scale to PyTorch, too, whatever attn.scale is.
    found = attend(q, k, v, q.shape[-1] ** -0.5, mask).to(q.dtype)
    found = attn.to_out[1](attn.to_out[0](found))
    if image is not None:
        found = found.transpose(-1, -2).reshape(image)
    if attn.residual_connection:
        found = found + hidden_states
    return found if attn.rescale_output_factor == 1 else found / attn.rescale_output_factor


def _normed(attn: Any, projected: Any, norm_q: Any, norm_k: Any) -> list[torch.Tensor]:
    """Queries, keys and values [B, S, H, D] of their projections, the first two normalized for each head."""
    q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in projected)
    return [q if norm_q is None else norm_q(q), k if norm_k is None else norm_k(k), v]


def _prepared(attn: Any, mask: torch.Tensor | None, context: torch.Tensor) -> torch.Tensor | None:
    """The mask of an attention layer, [B, H, 1 or S, Sk]."""
    if mask is None:
        return None
    batch, length = context.shape[:2]
    mask = attn.prepare_attention_mask(mask, length, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])


def _elsewhere(processor: Any) -> str | None:
    """Why the host computes a processor's attention in another way, or None."""
    backend = getattr(processor._attention_backend, "value", processor._attention_backend)
    if processor._parallel_config is not None:
        return "context parallelism is on"
    return None if backend in (None, "native") else f"set_attention_backend({backend!r})"


def _heads(attn: Any, x: torch.Tensor | None, projection: str, fused: str, which: str) -> list[Any]:
    """Queries and keys, or values, too, [B, S, H, head_dim] of x [B, S, C]; of projections or of the fused one."""
    if x is None:
        return [None, None]
    if attn.fused_projections:
        return [t.unflatten(-1, (-1, attn.head_dim)) for t in getattr(attn, fused)(x).chunk(3, dim=-1)]
    layers = [getattr(attn, projection.format(part)) for part in which]
    return [t.unflatten(-1, (-1, attn.head_dim)) for t in products(layers, x)]


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(module: str, name: str) -> Target:
    path = f"diffusers.models.{module}:{name}"
    return Target(
        "diffusers",
        path,
        f"Diffusers{name}",
        "processor",
        default=False,
        note=_NOTE,
        tried=True,
        compiled=True,
    )


TARGETS = {
    "attention_dense": (
        # As fast as the compiled host's; the division by 1 would be a kernel before a gated_residual.
        _target("attention_processor", "AttnProcessor2_0"),
        # FLUX.1, 1024 px, 4 steps, bfloat16: 106 ms of attention, in the compiled host 128 (H100); 109 and 129 (H200)
        _target("transformers.transformer_flux", "FluxAttnProcessor"),
        _target("transformers.transformer_hunyuan_video15", "HunyuanVideo15AttnProcessor2_0"),
        _target("attention_processor", "JointAttnProcessor2_0"),
        _target("attention_processor", "HunyuanAttnProcessor2_0"),
        _target("transformers.sana_transformer", "SanaAttnProcessor2_0"),
    )
}
