"""Measure a running server behind an OpenAI-compatible endpoint: the client, what is sent, the
outcome of each reply, and the tables."""
