"""Vocabulary-parallel embeddings and the logits of language-model heads."""
