"""Open, inspect and write models on the disk: checkpoints and GGUF files."""
