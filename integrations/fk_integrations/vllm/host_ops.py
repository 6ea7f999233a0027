"""The ops that are special in vLLM: its adapter finds them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastkernels.core.reasons import Reason
from fastkernels.overrides.linear.kernels.linear_fp8_scales import holder_of
from fastkernels.verify.measure import Live
from fk_integrations.core.host_op import BATCHES, HostOp
from fk_integrations.core.journal import Journal
from fk_integrations.vllm import attention, experts, fusions, mla


class _OfWorker(HostOp):
    """worker: None before construction."""

    def __init__(self, worker: Any, version: str):
        self.worker, self.version = worker, version


class Attention(_OfWorker):
    """Attention with keys and values of several heads."""

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        return attention.attention_shape(module)

    def whole_shape(self, op: Any, module: Any) -> tuple[Any, ...] | None:
        if self.worker is None:
            return super().whole_shape(op, module)
        return attention.whole_shape(module, self.worker.vllm_config)

    def points(self, op: Any) -> Sequence[tuple[int, ...]]:
        if self.worker is None:
            return super().points(op)
        config = self.worker.vllm_config
        most, context = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        return [(batch, context) for batch in BATCHES if batch <= most]

    def serves(self, module: Any) -> bool:
        return attention.is_cross(module)

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return attention.swap_attention(module, self.version, self.worker.vllm_config, journal, by_table)


class LatentAttention(_OfWorker):
    """Multi-head latent attention (MLA)."""

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return mla.swap_decode(module, self.version, self.worker.vllm_config, journal, by_table)


class Experts(_OfWorker):
    """Mixtures of experts."""

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        return experts.shape(op, module)

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live | None:
        return experts.live(op, shape, modules)

    def runner(self, module: Any) -> Any:
        return experts.experts(module)

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        return experts.swap_experts(module, ours, self.version, journal, by_table)


class Fp8Linear(_OfWorker):
    """Linear layers in FP8, whose kernel object is replaced."""

    def swapped(self, module: Any) -> None:
        if self.worker is not None:
            fusions.take_quantization(self.worker.vllm_config, holder_of(module).fp8_linear)


SPECIAL: dict[str, type[_OfWorker]] = {
    "attention": Attention, "attention_decode": Attention, "mla_decode": LatentAttention, "fused_experts": Experts,
    "fused_experts_fp8": Experts, "linear_fp8": Fp8Linear,
}  # fmt: skip
