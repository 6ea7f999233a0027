"""linear_silu_and_mul in place of a layer and the activation after it, in a host's graph or between its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_map

from fastkernels.core import registry, tuning
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fastkernels.patch import Request
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import APART, NAME, Gated, of_model
from fk_integrations.core.journal import Journal

UNPROVED = "between the host's modules it has not run on a GPU; ops=['linear_silu_and_mul'] requests it"


def requested(request: Request) -> bool:
    """Whether the user has requested the op: it then runs wherever a batch has more tokens than decodes."""
    return NAME in {*(request.ops or ()), *request.candidates, *Environment.read().provider}


def unproved(request: Request) -> bool:
    """Whether the op stays out of the place between two modules of a host."""
    return not (requested(request) or Environment.read().verify)


def settled(adapter: Adapter, request: Request) -> Reason | None:
    """Why no block gets the op; None if the blocks' own reasons decide."""
    if disabled := {NAME, *APART} & {*request.disable}:
        return Reason(Kind.DISABLED, f"FASTKERNELS_DISABLE={','.join(sorted(disabled))}")
    named = {*request.candidates, *Environment.read().provider} & {*APART}
    if named and not requested(request):
        return Reason(Kind.LEFT_TO_HOST, f"{' and '.join(sorted(named))} was requested by name")
    if not adapter.own and not adapter.has_passes() and unproved(request):
        return Reason(Kind.LEFT_TO_HOST, UNPROVED)
    if mode := adapter.batch_invariant():
        return Reason(Kind.LEFT_TO_HOST, f"{mode} is on, and this op's results may depend on the batch")
    return None


def stays(adapter: Adapter, request: Request, gated: Gated, device: str) -> Reason | None:
    """Why a block keeps its two modules apart; None if ours runs at some sizes."""
    if gated.unsupported is not None:
        return Reason(Kind.UNSUPPORTED if requested(request) else Kind.LEFT_TO_HOST, gated.unsupported)
    if not requested(request):
        op = registry.get(NAME).op
        slower = tuning.not_faster(NAME, op.key, op.key.module(gated.layer), device)
        if slower is not None:
            return Reason(Kind.LEFT_TO_HOST, slower)
    return None


def chosen(adapter: Adapter, request: Request, model: Any, device: str) -> list[Gated]:
    """The blocks that get the op."""
    included = request.ops is None or NAME in request.ops or NAME in request.candidates
    if not included or settled(adapter, request) is not None:
        return []
    return [gated for gated in of_model(model) if stays(adapter, request, gated, device) is None]


class Rows:
    """The blocks of a model by class: {class: blocks that got the op}, and {class: reasons of the others}."""

    def __init__(self) -> None:
        self.modules: Counter[str] = Counter()
        self.reasons: dict[str, Counter[Reason]] = {}

    def leave(self, gated: Gated, reason: Reason) -> None:
        self.reasons.setdefault(type(gated.block).__name__, Counter())[reason] += 1


def apply(adapter: Adapter, request: Request, model: Any, device: str, journal: Journal) -> Rows:
    """Have the blocks of a model run the op where it was measured to win."""
    rows = Rows()
    if request.ops is not None and NAME not in request.ops and NAME not in request.candidates:
        return rows
    whole = settled(adapter, request)
    for gated in of_model(model):
        reason: Reason | bool | None = whole or stays(adapter, request, gated, device)
        if reason is None:
            reason = adapter.in_pass(gated)
        if reason is False and unproved(request):
            reason = Reason(Kind.LEFT_TO_HOST, UNPROVED)
        if reason is False:
            reason = between(gated, requested(request), journal)
        if isinstance(reason, Reason):
            rows.leave(gated, reason)
        else:
            rows.modules[type(gated.block).__name__] += 1
    return rows


class Product(torch.Tensor):
    """The product of x and a layer's packed gate and up, not computed yet.

    SiluAndMul computes it with the activation. Any other operation computes it first, and from then on it is a tensor
    like others.
    """

    x: torch.Tensor
    layer: Any
    bias: torch.Tensor | None
    compute: Callable[[], torch.Tensor]
    computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, x: torch.Tensor, layer: Any, bias: torch.Tensor | None, compute: Callable[[], torch.Tensor]
    ) -> Product:
        shape = (*x.shape[:-1], layer.weight.shape[0])
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)  # type: ignore[attr-defined]
        made.x, made.layer, made.bias, made.compute, made.computed = x, layer, bias, compute, None
        # Code that asks C++ for the pointer, as DLPack does, gets an error, not null
        torch._C._set_throw_on_mutable_data_ptr(made)  # type: ignore[attr-defined]
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def value(self) -> torch.Tensor:
        """The product itself."""
        if self.computed is None:
            self.computed = self.compute()
        return self.computed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _method_of_value(name: str) -> Callable[..., Any]:
    def method(self: Product, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.value(), name)(*args, **kwargs)

    return method


# They read the memory of a tensor without an operation
for _name in ("__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "data_ptr", "numpy", "storage",
              "tolist", "untyped_storage"):  # fmt: skip
    setattr(Product, _name, _method_of_value(_name))


def _value(found: Any) -> Any:
    return found.value() if isinstance(found, Product) else found


def _hooked(layer: Any, activation: Any) -> bool:
    """Whether hooks may keep the product until x or the weight has other values."""
    return bool(
        layer._forward_hooks
        or activation._forward_pre_hooks
        or activation._forward_hooks
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
    )


def between(gated: Gated, always: bool, journal: Journal) -> Reason | None:
    """Have a block that no compiler traces compute product and activation at once; None, or why not.

    always: for all batches larger than those of decodes; else where a table lists ours as faster
    """
    from fastkernels.overrides.linear.linear_silu_and_mul import FEW, fuses, linear_silu_and_mul

    method, activation = gated.layer.quant_method, gated.activation
    if "apply" in vars(method) or "forward" in vars(activation):
        return Reason(Kind.REPLACED, "its product or its activation was replaced by other code")

    def theirs(*args: Any) -> torch.Tensor:
        return type(method).apply(method, *args)  # type: ignore[no-any-return]

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or layer is not gated.layer:
            return theirs(layer, x, bias)
        if _hooked(layer, activation):
            return theirs(layer, x, bias)
        many = x.numel() > FEW * x.shape[-1]
        if many and bias is layer.bias and (always or fuses(layer, x)):
            return Product(x, layer, bias, lambda: theirs(layer, x, bias))
        return theirs(layer, x, bias)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(x, Product):
            if x.computed is None and not args and not kwargs:
                return linear_silu_and_mul(x.x, x.layer.weight, x.bias)  # type: ignore[no-any-return]
            x = x.value()
        return type(activation).forward(activation, x, *args, **kwargs)  # type: ignore[no-any-return]

    journal.set_attribute(method, "apply", apply)
    journal.set_attribute(activation, "forward", forward)
    return None
