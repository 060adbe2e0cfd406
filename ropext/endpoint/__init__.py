"""A running server behind an OpenAI-compatible port: the client, questions in words, what became of
each, and the tables."""
