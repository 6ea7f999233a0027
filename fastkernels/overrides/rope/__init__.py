"""Rotary position embedding, alone or fused with the KV store."""
