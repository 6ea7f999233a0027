"""Zhipu's GLM models."""
