"""Perplexity in one pass, retrieval by teacher forcing: measured against the right baselines."""
