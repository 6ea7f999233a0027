"""The ops that are special in SGLang: its adapter finds them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fastkernels.verify.measure import Live
from fk_integrations.core.host_op import HostOp
from fk_integrations.core.journal import Journal
from fk_integrations.sglang import attention, decode_points, experts, heads, linear_points


class _OfRunner(HostOp):
    """model_runner: None before construction."""

    def __init__(self, model_runner: Any, version: str):
        self.model_runner, self.version = model_runner, version


class Attention(_OfRunner):
    """Attention with keys and values of several heads."""

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        return attention.attention_shape(self.model_runner, module)

    def whole_shape(self, op: Any, module: Any) -> tuple[Any, ...] | None:
        served = attention.served(self.model_runner, module)
        return super().whole_shape(op, module) if served else None

    def points(self, op: Any) -> Sequence[tuple[int, ...]]:
        return attention.points(self.model_runner)

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live | None:
        return Live(decode_points.calls_on(self.model_runner), decode_points.host_kernel(self.model_runner))

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return attention.swap_attention(self.model_runner, module, self.version, journal, by_table)


class Linear(_OfRunner):
    """Linear layers, and the product of the LM head, which the logits processor computes."""

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        processor = heads.is_processor(module)
        return super().shape(op, heads.head(self.model_runner.model) if processor else module)

    def whole_shape(self, op: Any, module: Any) -> tuple[Any, ...] | None:
        return None if heads.is_processor(module) else super().whole_shape(op, module)

    def heads(self, model: Any) -> Sequence[Any]:
        found = heads.head(model)
        return [found] if heads.unsupported(found) is None else []

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live | None:
        return Live(linear_points.calls)


class LogitsProcessor(_OfRunner):
    """Logits of an LM head."""

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return heads.swap(module, heads.head(self.model_runner.model), self.version, journal, by_table)


class Experts(_OfRunner):
    """Mixtures of experts."""

    in_tables = False

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        found = experts.shape(op, module)
        if isinstance(found, Reason) or experts.measured(op, found, module.w2_weight.device.type):
            return found
        return Reason(Kind.LEFT_TO_HOST, experts.NOT_MEASURED)

    def whole_shape(self, op: Any, module: Any) -> tuple[Any, ...] | None:
        found = experts.shape(op, module)
        return None if isinstance(found, Reason) else found

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live | None:
        return experts.live(op, shape, modules)

    def runner(self, module: Any) -> Any:
        return experts.experts(module)

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return experts.swap_experts(module, ours, self.version, journal, by_table)


SPECIAL: dict[str, type[_OfRunner]] = {
    "attention": Attention, "attention_decode": Attention, "linear": Linear, "logits_processor": LogitsProcessor,
    "fused_experts": Experts, "fused_experts_fp8": Experts,
}  # fmt: skip
