"""Writes the even tokens and then the odd ones."""


def store_kvcache(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    for first in (0, 1):
        slots = slot_mapping[first::2].long()
        stored = slots >= 0
        for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            rows = new[first::2][stored]
            rows = rows if scale == 1.0 else rows.float() / scale
            cache.view(-1, *cache.shape[2:])[slots[stored]] = rows.to(cache.dtype)
