"""Copies rows with index_copy_."""


def store_kvcache(key, value, key_cache, value_cache, slot_mapping, k_scale=1.0, v_scale=1.0):
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        rows = new[stored] if scale == 1.0 else new[stored].float() / scale
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows.to(cache.dtype))
