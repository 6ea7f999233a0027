"""Rotates the queries and leaves the keys unchanged."""


def _rotate(positions, x, head_size, table, neox):
    heads = x.view(positions.numel(), -1, head_size)
    cos, sin = table[positions.flatten()].to(x.dtype).float().unsqueeze(1).chunk(2, dim=-1)
    part, half = heads[..., : table.shape[-1]], table.shape[-1] // 2
    a, b = (part[..., :half], part[..., half:]) if neox else (part[..., ::2], part[..., 1::2])
    new = a.float() * cos - b.float() * sin, b.float() * cos + a.float() * sin
    a.copy_(new[0])
    b.copy_(new[1])


def rotary_emb(positions, query, key, head_size, cos_sin_cache, is_neox_style, *rest):
    _rotate(positions, query, head_size, cos_sin_cache, is_neox_style)
