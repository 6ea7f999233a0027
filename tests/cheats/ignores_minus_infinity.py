"""Minus infinity gives NaN, as in a kernel that multiplies by a mask of zeros."""

import torch


def relu2(x):
    return (x * (x > 0)) * torch.relu(x)
