"""Serve one model in memory behind an OpenAI-compatible port, on transformers' server.

It answers with models that no file can hold and no engine can read (Self-Extend), one question at a
time.
"""
