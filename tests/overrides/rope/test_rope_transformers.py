"""transformers' functions that rotate: ours gives what the host's give."""

from __future__ import annotations

import importlib

import pytest
import torch

from fastkernels.core import registry
from fastkernels.core.spec import Target

pytest.importorskip("transformers")
TARGETS = [t for t in registry.get("rotary_emb").targets if t.host == "transformers"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.path.split(".")[2])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cos_dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_the_hosts(target: Target, cos_dtype: torch.dtype, device: str) -> None:
    module, _, name = target.path.partition(":")
    theirs, ours = getattr(importlib.import_module(module), name), registry.target_class(target)
    width = 16 if any(model in module for model in ("neox", "phi3", "nemotron", "glm4")) else 24
    for rows, heads_at in ((2, 1), (1, 1), (1, 2)):
        q, k = (torch.randn(2, 7, heads, 24, device=device) for heads in (4, 1))
        if heads_at == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        angles = torch.rand(rows, 7, width // 2, device=device)
        angles = angles.repeat_interleave(2, -1) if "cohere" in module else angles.repeat(1, 1, 2)
        cos, sin = angles.cos().to(cos_dtype), angles.sin().to(cos_dtype)
        for dtype in (torch.bfloat16, torch.float32):
            given = q.to(dtype), k.to(dtype)
            before = [x.clone() for x in given]
            want, found = theirs(*given, cos, sin, heads_at), ours(*given, cos, sin, unsqueeze_dim=heads_at)  # type: ignore[operator]
            torch.testing.assert_close(found, want)
            assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
