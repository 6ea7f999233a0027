"""Recommendation and retrieval: scores of documents for queries."""
