"""Transcriptions and translations of recordings of any length, window by window."""
