"""Hold a model in memory for evaluation and training: load it, check that its head is a plain
matrix, measure its memory, and share it between processes."""
