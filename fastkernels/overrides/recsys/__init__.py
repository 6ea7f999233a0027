"""Recommendation and retrieval: scores of documents for queries, bags of embeddings, graphs of users and items."""
