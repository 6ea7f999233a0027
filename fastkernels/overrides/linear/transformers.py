"""Drop-in MLP of transformers' V-JEPA 2: its linear layers stay the host's modules."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.linear.linear_gelu import activated_erf, has_epilogue
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.linear.unlike import not_linear


class TransformersVJEPA2MLP(nn.Module):
    """VJEPA2MLP with GELU (erf): hidden_state [..., hidden_size] to the same."""

    def __init__(self, config, hidden_size: int = 1024, mlp_ratio: float = 4.0):
        super().__init__()
        if config.hidden_act != "gelu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only gelu")
        self.fc1 = nn.Linear(hidden_size, int(hidden_size * mlp_ratio))
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(int(hidden_size * mlp_ratio), hidden_size)

    @staticmethod
    def applies(module: nn.Module) -> bool:
        """Whether the first product has a kernel with this activation as its epilogue."""
        erf = type(module.activation).__name__ in ("GELUActivation", "GELU") and not changed(
            module.activation
        )
        return erf and not not_linear(module, "fc1") and has_epilogue(module.fc1)

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        return self.fc2(activated_erf(self.fc1, self.activation, hidden_state))


TARGETS = {
    "linear_gelu": (
        Target(
            "transformers", "transformers.models.vjepa2.modeling_vjepa2:VJEPA2MLP", "TransformersVJEPA2MLP", "module",
            default=False, tried=True, note="decided at first calls on a GPU, elsewhere replaced on request",
            compiled=True,
        ),
    ),
}  # fmt: skip
