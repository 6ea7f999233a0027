"""vLLM's experts on a CPU with weights as a checkpoint has them, as its Triton kernels on a GPU have, in PyTorch."""

import torch
from fk_integrations.core.expert_layers import path_of
from fk_integrations.vllm import experts


def plain_apply(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
    a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
):  # fmt: skip
    """FusedMoEExpertsModular.apply, one token at a time; experts of other ranks add nothing."""
    output.zero_()
    for token, ids in enumerate(topk_ids.tolist()):
        for i, weight in zip(ids, topk_weights[token], strict=True):
            here = i if expert_map is None else int(expert_map[i])
            if here >= 0:
                gate, up = (w1[here] @ hidden_states[token]).chunk(2)
                part = w2[here] @ (torch.nn.functional.silu(gate) * up)
                output[token] += (part * weight).to(output.dtype)


def install(patch) -> None:
    """Have vLLM's layers use it, and the seam know it. patch(object, name, value) sets an attribute."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
        X86CPUUnquantizedExperts,
    )

    patch(X86CPUUnquantizedExperts, "_supports_current_device", lambda: False)  # preferred with AMX
    patch(CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None)
    patch(CPUUnquantizedExperts, "apply", plain_apply)
    patch(experts, "PLAIN", {*experts.PLAIN, path_of(CPUUnquantizedExperts)})


class InWorkers:
    """worker_extension_cls of vLLM: `install` in each worker process, which imports it before it loads a model."""

    install(setattr)

    def experts_here(self) -> list[int]:
        """The number of experts of each layer on this rank."""
        return [
            m.w13_weight.shape[0] for m in self.get_model().modules() if type(m).__name__ == "RoutedExperts"
        ]
