"""Talk to a model in memory: one model behind an OpenAI-compatible port, on transformers' server.

What no file holds and no engine reads (Self-Extend) is answered from here; one question at a time.
"""
