"""Classes that timm's blocks have as defaults, under the host's names."""

from __future__ import annotations

from fastkernels.overrides.dense_attention.timm import TimmAttention
from fastkernels.overrides.linear.timm import TimmMlp
from fastkernels.overrides.norm.timm import TimmLayerNorm


class LayerNorm(TimmLayerNorm):
    """timm's norm, the default of its blocks."""


class Mlp(TimmMlp):
    """timm's MLP, the default of its blocks."""

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Attention(TimmAttention):
    """timm's attention, the default of its blocks."""
