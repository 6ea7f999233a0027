"""Rounding of vLLM's CPU kernel, which an exported file does not imitate."""

from __future__ import annotations

import torch

host_truncates, truncate = bool, torch.Tensor.bfloat16
