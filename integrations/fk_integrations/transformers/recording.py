"""One forward pass of a small model of transformers, recorded: each module's call, and each call of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PROBE = "fastkernels_probe"  # the name of the attention function that records
TOKENS = 12
# Arguments of an attention function that change nothing that a causal mask does not say.
NEUTRAL = (
    "dropout",
    "sliding_window",
    "position_ids",
    "is_causal",
    "cache_position",
    "output_attentions",
    "use_cache",
)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call: inputs and output are the floating-point tensors in it."""

    path: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """q [H, T, D], k and v [KV, T, D], output [T, H * D]; visible [T, T]: what each token sees."""

    path: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    visible: torch.Tensor | None
    scale: float | None
    softcap: float
    unknown: tuple[str, ...]  # arguments that this recording does not understand


@dataclass
class Recording:
    """Module calls are in the order in which they end."""

    ids: torch.Tensor
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def of(self, module: nn.Module) -> ModuleCall | None:
        return next((c for c in self.calls if c.module is module), None)

    def inside(self, path: str) -> list[ModuleCall]:
        """Calls of the modules below this path."""
        return [c for c in self.calls if c.path.startswith(f"{path}.")]


def record(model: Any, vocab: int) -> Recording:
    """Run a model on a few tokens, with an attention function that records."""
    ids = torch.tensor([(i * 37 + 3) % vocab for i in range(TOKENS)])
    made = Recording(ids)
    names = {module: name for name, module in model.named_modules()}
    hooks = [m.register_forward_hook(_hook(made, name), with_kwargs=True) for m, name in names.items()]
    try:
        with _probe(model, made, names), torch.no_grad():
            made.logits = model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return made


def _hook(made: Recording, path: str) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = _tensors([output])
        if outputs:
            made.calls.append(
                ModuleCall(path, module, tuple(_tensors([*args, *kwargs.values()])), outputs[0])
            )

    return hook


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif hasattr(value, "last_hidden_state"):
            found.append(value.last_hidden_state)
    return found


@contextmanager
def _probe(model: Any, made: Recording, names: dict[nn.Module, str]) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, softcap: float | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        repeat = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        visible = None
        if isinstance(attention_mask, torch.Tensor):
            visible = attention_mask[0, 0, -query.shape[2] :, : key.shape[2]] == 0
            scores = scores + attention_mask[..., : key.shape[2]]
        out = (scores.softmax(-1) @ value.repeat_interleave(repeat, 1)).transpose(1, 2).contiguous()
        unknown = tuple(k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in NEUTRAL)
        made.attention.append(
            AttentionCall(
                names[module], query[0], key[0], value[0], out[0].flatten(1), visible, scaling, softcap or 0.0, unknown
            )
        )  # fmt: skip
        return out, None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[PROBE] = attend
    AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])  # for the whole process
    model.config._attn_implementation = PROBE
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[PROBE]
