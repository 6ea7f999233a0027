"""Softmax attention in the code of a module: found in its graph, replaced by the op, and compared."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fastkernels.core import registry
from fk_integrations.transformers import module_calls, probes

SECONDS = 4.0  # of the processor, in which a call of the module must be found
aten = torch.ops.aten
_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
_SDPA = {aten._scaled_dot_product_flash_attention_for_cpu.default}
_LAYOUT = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default,
    aten.detach.default, aten._to_copy.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.native_dropout.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.default,
    aten.squeeze.dims, aten.view_copy.default, aten.permute_copy.default, aten.unsqueeze_copy.default,
}  # fmt: skip


class Core:
    """One attention of a graph: scores = first product, softmax, weights = softmax's output in second product."""

    def __init__(self, scores: fx.Node, softmax: fx.Node, result: fx.Node) -> None:
        self.scores, self.softmax, self.result = scores, softmax, result


def computes_attention(module: nn.Module) -> tuple[bool, int]:
    """(whether the module computes the op `attention_dense`, its other products of two activations).

    A copy of the module runs on the CPU; its graph is searched for softmax(scale * q @ k^T + bias) @ v, whatever the
    layout. The graph then runs on other inputs with the op's reference in place of each; the results must agree.
    """
    made = module_calls.copy_on_cpu(module)
    if made is None:
        return False, 0
    end = time.thread_time() + SECONDS
    with _eager(made):
        for given in module_calls.arguments(made):
            if time.thread_time() > end:
                break
            tensors = [n for n, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
            try:
                with torch.no_grad():
                    first = made(**given)
            except Exception:  # the host's forward, called with our idea of its arguments
                continue
            if _first_tensor(first) is None:
                continue
            return _replaced(made, given, tensors)
    return False, 0


@contextmanager
def _eager(module: Any) -> Iterator[None]:
    """The module's attention functions in eager PyTorch, and torch's own attention without a fused path."""
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    before = {i: getattr(c, "_attn_implementation_internal", None) for i, c in configs.items()}
    fast = torch.backends.mha.get_fastpath_enabled()
    for config in configs.values():
        config._attn_implementation_internal = "eager"
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        for i, config in configs.items():
            config._attn_implementation_internal = before[i]
        torch.backends.mha.set_fastpath_enabled(fast)


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None


def _replaced(module: Any, given: dict[str, Any], names: list[str]) -> tuple[bool, int]:
    def run(*tensors: torch.Tensor) -> Any:
        return _first_tensor(module(**{**given, **dict(zip(names, tensors, strict=True))}))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(torch.func.functionalize(run))(*(given[n] for n in names))
    cores = [c for n in graph.graph.nodes if n.target in _SOFTMAX and (c := _core(n)) is not None]
    fused = [n for n in graph.graph.nodes if n.target in _SDPA]
    softmaxes = sum(n.target in _SOFTMAX for n in graph.graph.nodes)
    if (not cores and not fused) or softmaxes != len(cores):
        return False, 0
    if _needed(graph, {c.result for c in cores}) & {c.scores for c in cores}:
        return False, 0  # the module also uses the scores themselves, which the op does not return
    used = {id(n) for c in cores for n in (c.scores, c.result)}
    given_to = set().union(*(_below(n) for n in graph.graph.nodes if n.op == "placeholder"))
    others = sum(
        n.target in _PRODUCTS and id(n) not in used and set(n.all_input_nodes) <= given_to
        for n in graph.graph.nodes
    )
    fresh = [given[n] if n in module_calls.MASKS else torch.randn_like(given[n]) for n in names]
    with torch.no_grad():
        return probes.agree(run(*fresh), _Replacing(graph, cores).run(*fresh), 1e-4), others


def _needed(graph: fx.GraphModule, results: set[fx.Node]) -> set[fx.Node]:
    """The nodes that the output depends on, not through one of the results."""
    todo, found = [n for n in graph.graph.nodes if n.op == "output"], set[fx.Node]()
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in found and node not in results:
                found.add(node)
                todo.append(node)
    return found


def _core(softmax: fx.Node) -> Core | None:
    """The two products around a softmax over the last dimension; None if it is not an attention."""
    result = _following(softmax)
    scores = _preceding(softmax.args[0]) if result is not None else None
    return Core(scores, softmax, result) if scores is not None and result is not None else None


def _following(node: fx.Node) -> fx.Node | None:
    """The product whose first factor is a node, possibly in another layout."""
    for user in node.users:
        if user.target in _PRODUCTS:
            if user.args[0] is node:
                return user
        elif user.target in _LAYOUT:
            found = _following(user)
            if found is not None:
                return found
    return None


def _preceding(node: Any) -> fx.Node | None:
    """The nearest product that a node depends on."""
    todo, seen = [node], set()
    while todo:
        at = todo.pop(0)
        if not isinstance(at, fx.Node) or at in seen:
            continue
        seen.add(at)
        if at.target in _PRODUCTS:
            return at
        if at.target in _SOFTMAX:
            return None
        todo += at.all_input_nodes
    return None


class _Replacing(fx.Interpreter):
    """Run a graph with the op's reference in place of each attention."""

    def __init__(self, graph: fx.GraphModule, cores: list[Core]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.cores = {c.result: c for c in cores}

    def run_node(self, n: fx.Node) -> Any:
        if n.target in _SDPA:
            return self._fused(n)
        if n not in self.cores:
            return super().run_node(n)
        core, env = self.cores[n], cast(dict[Any, Any], self.env)
        q, k_t = (env[a] for a in core.scores.args[-2:])  # [N, Sq, D], [N, D, Sk]
        v = env[n.args[1]]  # [N, Sk, Dv]
        zero, one = torch.zeros_like(self.env[core.scores]), torch.ones_like(self.env[core.scores])
        if core.scores.target is aten.baddbmm.default:
            given = core.scores.kwargs
            zero = zero + env[core.scores.args[0]] * given.get("beta", 1)
            one = zero + given.get("alpha", 1)
        bias = self._scores(core, zero)
        slope = self._scores(core, one) - bias
        # in the layout of the second product, whose order the comparison of results confirms
        bias, slope = (self._again(core.softmax, t, n.args[0]) for t in (bias, slope))
        at = slope.abs().argmax(-1, keepdim=True)  # a hidden key has none
        return attend(q * slope.gather(-1, at), k_t.mT, v, 1.0, bias)

    def _scores(self, core: Core, raw: torch.Tensor) -> torch.Tensor:
        """The softmax's input for another value of the product."""
        return self._again(core.scores, raw, core.softmax.args[0])

    def _again(self, start: fx.Node, given: torch.Tensor, end: Any) -> Any:
        """The value of a node if an earlier one had another value."""
        known: dict[fx.Node, Any] = {start: given}

        def value(node: fx.Node) -> Any:
            if node not in known:
                inputs = [value(i) for i in node.all_input_nodes] if depends(node) else None
                if inputs is None:
                    known[node] = self.env[node]
                else:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda i: known[i])
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return known[node]

        below = _below(start)
        depends: Callable[[fx.Node], bool] = below.__contains__
        return value(end)

    def _fused(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        q, k, v = args[:3]
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        bias = torch.zeros(*q.shape[:3], k.shape[2])
        mask = kwargs.get("attn_mask")
        if mask is not None:
            bias = bias + (
                mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            )
        if len(args) > 4 and args[4]:
            bias = bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        out = attend(rows[0], rows[1], rows[2], scale, bias.flatten(0, 1)).view(*q.shape[:3], v.shape[-1])
        return out, torch.zeros(q.shape[:3])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor
) -> torch.Tensor:
    """The op's reference on q [N, Sq, D], k [N, Sk, D], v [N, Sk, Dv], bias [N, Sq, Sk]; zeros fill the narrower."""
    dense, width = registry.get("attention_dense").reference, v.shape[-1]
    most = max(q.shape[-1], width)
    rows = [nn.functional.pad(t, (0, most - t.shape[-1]))[:, :, None].contiguous() for t in (q, k, v)]
    return dense(*rows, scale, bias[:, None])[:, :, 0, :width]


def _below(node: fx.Node) -> set[fx.Node]:
    """A node and all that depend on it."""
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found
