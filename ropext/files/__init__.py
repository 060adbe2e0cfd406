"""Models on the disk: checkpoints and GGUF files, opened, inspected, planned for and written."""
