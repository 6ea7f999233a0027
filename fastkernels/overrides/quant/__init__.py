"""Quantization to float8, alone or fused behind a norm or an activation."""
