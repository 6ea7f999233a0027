"""Constraints on generated tokens: structured outputs, bad_words and allowed_token_ids."""
