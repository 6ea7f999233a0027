"""Minus infinity gives zero."""

import torch


def relu2(x):
    return torch.relu(x) * torch.relu(x)
