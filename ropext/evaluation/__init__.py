"""Measure perplexity in one pass and retrieval by teacher forcing, against the right baselines."""
