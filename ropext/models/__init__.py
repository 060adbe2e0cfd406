"""A model in memory, as measuring and training want it: loaded, its head proved to be a plain
matrix, the memory that it takes, and the processes that share it."""
