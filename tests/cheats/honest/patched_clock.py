"""Sets attributes of its own objects."""

import torch


class Settings:
    pass


SETTINGS = Settings()
for _name, _value in (("compute", torch.float32), ("keepdim", True)):
    setattr(SETTINGS, _name, _value)


def layer_norm(x, weight, bias, eps):
    h = x.to(SETTINGS.compute)
    h = h - h.mean(-1, keepdim=SETTINGS.keepdim)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=SETTINGS.keepdim) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
