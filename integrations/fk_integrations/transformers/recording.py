"""One forward pass of a small model of transformers, recorded: each module's call, and each call of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
    """q [H, T, D], k and v [KV, T, D], output [T, H * D]; visible [T, T]: what each token sees.

    unknown: arguments, or parts of the scores, that this recording does not understand
    """

    path: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    visible: torch.Tensor | None
    scale: float | None
    softcap: float
    unknown: tuple[str, ...]


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
    written = _Written(made)
    hooks = [m.register_forward_hook(_hook(made, name), with_kwargs=True) for m, name in names.items()]
    for module, name in names.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: written.inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: written.leave()))
    try:
        with _probe(model, made, names, written), written, torch.no_grad():
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
                # Copies: some modules add to the output of another one in place.
                ModuleCall(
                    path,
                    module,
                    tuple(t.clone() for t in _tensors([*args, *kwargs.values()])),
                    outputs[0].clone(),
                )
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


PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}


class _Written(TorchFunctionMode):
    """Records attention that a module writes out: softmax of a product and a bias, times the values."""

    def __init__(self, made: Recording) -> None:
        super().__init__()
        self.made = made
        self.inside: list[str] = []  # modules that run now
        self.off = False
        self._product: tuple[torch.Tensor, torch.Tensor] | None = None  # q, transposed k
        self._softmax: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # product, scores, probabilities

    def leave(self) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.off or not isinstance(found, torch.Tensor):
            return found
        if name in PRODUCTS:
            self._multiplied(name, args, kwargs, found)
        elif name == "softmax" and found.shape[-1] == found.shape[-2] == len(self.made.ids):
            self._softmax = (self._product, args[0].clone(), found) if self._product is not None else None
        return found

    def _multiplied(self, name: str, args: Any, kwargs: Any, found: torch.Tensor) -> None:
        given = [*args, *(kwargs[n] for n in ("batch1", "batch2", "mat2", "other") if n in kwargs)]
        if len(given) < 2:
            return
        a, b = given[-2:] if name == "baddbmm" else given[:2]
        if name == "__rmatmul__":
            a, b = b, a
        if not isinstance(b, torch.Tensor) or min(a.dim(), b.dim()) < 3:
            return
        tokens = len(self.made.ids)
        if (
            self._softmax is not None
            and a.shape == self._softmax[2].shape
            and torch.equal(a, self._softmax[2])
        ):
            self._attended(b, found)
            self._softmax = None
        elif a.shape[-2] == tokens and b.shape[-1] == tokens:
            self._product = a, b

    def _attended(self, v: torch.Tensor, output: torch.Tensor) -> None:
        assert self._softmax is not None
        (q, turned), scores, _ = self._softmax
        tokens = len(self.made.ids)
        flat_q, k, flat_v = (t.reshape(-1, *t.shape[-2:]) for t in (q, turned.transpose(-1, -2), v))
        scores = scores.reshape(-1, tokens, tokens).float()
        seen = scores > scores.amax() - 1e4
        visible = seen[0] if bool((seen == seen[:1]).all()) else None
        k, flat_v = _without_copies(k, flat_v)
        raw = flat_q @ k.repeat_interleave(len(flat_q) // len(k), 0).transpose(1, 2)
        first, second = scores[seen].double(), raw[seen].double()
        scale = float(first @ second / (second @ second))
        fits = bool((first - scale * second).abs().max() <= 1e-4 * first.abs().max() + 1e-9)
        unknown = () if fits else ("scores that are not a scaled product of queries and keys (a bias?)",)
        if visible is not None and (slopes := _slopes(scores, raw, visible)) is not None:
            least, most = float(slopes.abs().min()), float(slopes.abs().max())
            unknown = (
                f"a bias by the distance of query and key (ALiBi), with slopes from {least:.3g} to {most:.3g}",
            )
        out = output.reshape(-1, tokens, output.shape[-1]).transpose(0, 1).flatten(1)
        self.made.attention.append(
            AttentionCall(
                self.inside[-1] if self.inside else "", flat_q, k, flat_v, out, visible, scale, 0.0,
                unknown,
            )
        )  # fmt: skip


def _slopes(scores: torch.Tensor, raw: torch.Tensor, visible: torch.Tensor) -> torch.Tensor | None:
    """The factor of the key's position in each head's scores [H]; None if they have none, or other parts."""
    row, column = visible.nonzero(as_tuple=True)
    rows = torch.nn.functional.one_hot(row, len(visible)).double()  # softmax ignores a constant of each query
    found = []
    for mine, product in zip(scores, raw, strict=True):
        y = mine[row, column].double()
        given = torch.cat([product[row, column, None].double(), column[:, None].double(), rows], 1)
        solved = torch.linalg.lstsq(given, y[:, None], driver="gelsd").solution
        if bool((given @ solved - y[:, None]).abs().max() > 1e-5 * y.abs().max()):
            return None
        found.append(solved[1, 0])
    slopes = torch.stack(found)
    return slopes if bool((slopes.abs() > 1e-6 * scores[:, visible].abs().max()).any()) else None


def _without_copies(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [H, T, D] without those that a module repeats for several query heads: [KV, T, D]."""
    for repeats in range(len(k), 1, -1):
        if len(k) % repeats == 0 and len(k) == len(v):
            grouped = [t.unflatten(0, (-1, repeats)) for t in (k, v)]
            if all(bool((g == g[:, :1]).all()) for g in grouped):
                return grouped[0][:, 0], grouped[1][:, 0]
    return k, v


@contextmanager
def _probe(model: Any, made: Recording, names: dict[nn.Module, str], written: _Written) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, softcap: float | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        written.off = True
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
        written.off = False
        return out, None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[PROBE] = attend
    AttentionMaskInterface.register(PROBE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])  # for the whole process
    try:
        with suppress(ValueError):  # a model that does not use transformers' attention functions stays eager
            model.config._attn_implementation = PROBE
        yield
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[PROBE]
