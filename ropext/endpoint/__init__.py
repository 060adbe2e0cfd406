"""Measure a running server behind an OpenAI-compatible endpoint: the client, questions in words,
their outcomes, and the tables."""
