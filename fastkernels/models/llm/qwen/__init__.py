"""Alibaba's Qwen models."""
