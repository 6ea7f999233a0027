"""Keeps its functions in its own table, which is also called `production`."""


def _normalized(x, weight, bias, eps):
    h = x.float() - x.float().mean(-1, keepdim=True)
    y = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


production = {"layer_norm": _normalized}


def layer_norm(x, weight, bias, eps):
    return production["layer_norm"](x, weight, bias, eps)
