"""Arguments that only the host's code supports, and parts of modules that stay the host's."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import Unsupported  # type: ignore[attr-defined]  # of fork.py
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.block.two_linears import side_by_side
from fastkernels.overrides.diffusion.gated_residual import add_residual
from fastkernels.overrides.rope.qk_norm_rope import qk_norm_rope

UnsupportedArgument = Unsupported


def refuse(function: str, **given: Any) -> None:
    """Raise Unsupported if an argument is given that the op does not have."""
    if any(value is not None and value is not False for value in given.values()):
        raise Unsupported(function)


def padding(x: torch.Tensor, rows: int | None) -> int:
    if rows is not None and rows > len(x):
        raise Unsupported
    return 0


def padded(found: Any, more: int, per_token: bool) -> Any:
    return found


def written(
    found: Any, output_q: torch.Tensor | None, output_s: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = found
    return (
        values if output_q is None else output_q.copy_(values),
        scales if output_s is None else output_s.copy_(scales),
    )


def check_tokens(hidden_states: torch.Tensor, gating_output: torch.Tensor) -> None:
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError("hidden_states and gating_output differ in the number of tokens")


def changed(module: Any) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def autocasts(x: torch.Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    return None


def products(linears: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [layer(x) for layer in linears]


def product(linear: Any, x: torch.Tensor) -> torch.Tensor:
    return linear(x)


def rotated_products(linears: Any, x: torch.Tensor, *rotation: Any) -> None:
    return None


def in_one_kernel(module: Any, x: torch.Tensor, rope: torch.Tensor | None) -> Any:
    return None


def swiglu(x: torch.Tensor, *linears: Any) -> torch.Tensor:
    return silu_and_mul(linears[0](x) if len(linears) == 1 else side_by_side(x, *linears))


def mlp(ff: Any, x: torch.Tensor) -> torch.Tensor:
    return ff(x)


def linear_of_two(linear: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return linear(torch.cat((a, b), dim=-1))


def plain_linear(linear: Any, *inputs: torch.Tensor) -> bool:
    plain = type(linear) is torch.nn.Linear and type(linear.weight) is torch.nn.Parameter
    return (
        plain
        and not changed(linear)
        and all(x.dtype == linear.weight.dtype and not autocasts(x) for x in inputs)
    )


def activated(linear: Any, act: Any, x: torch.Tensor) -> torch.Tensor:
    return act(linear(x))


def modulation(linear: Any, x: torch.Tensor) -> torch.Tensor:
    return linear(x)


def joined_linears(of_a: Any, a: torch.Tensor, of_b: Any, b: torch.Tensor) -> torch.Tensor:
    return torch.cat((of_a(a), of_b(b)), dim=1)


def positioned(
    attn: Any, q: tuple[Any, Any], k: tuple[Any, Any], rotary: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _positioned(attn, "q", *q, rotary), _positioned(attn, "k", *k, rotary)


def _positioned(
    attn: Any, part: str, x: torch.Tensor, text: torch.Tensor | None, rotary: Any
) -> torch.Tensor:
    norm = getattr(attn, f"norm_{part}")
    of_text = norm if text is None else getattr(attn, f"norm_added_{part}")
    plain = all(type(n) is torch.nn.RMSNorm and n.eps is not None for n in (norm, of_text))
    if rotary is None or not plain or norm.eps != of_text.eps:
        raise Unsupported("no rotation, or norms that are not plain RMS norms of one eps")
    cos, sin = (t.to(x.device) for t in rotary)
    weight = None if text is None else of_text.weight
    return qk_norm_rope(x, norm.weight, cos, sin, norm.eps, text, weight)


def modulated_pair(norm: Any, text: torch.Tensor, image: torch.Tensor, emb: torch.Tensor) -> tuple[Any, ...]:
    both = torch.cat((text, image), dim=1)
    return None, both, *norm(both, emb=emb)


def add_both(block: Any, x: torch.Tensor, scales: Any, between: Any, options: dict[str, Any]) -> torch.Tensor:
    x, normed = add_residual(x, block.attn(block.norm1(x), **options), scales[0], between[0], block.norm2)
    return add_residual(x, block.mlp(normed), scales[1], between[1])[0]
