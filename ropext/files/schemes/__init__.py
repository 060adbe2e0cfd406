"""Models that do not rotate: learned tables, buckets, slopes, relative tables.

Importing this package loads only the reader of their configs. Their plans, weights and warnings are
loaded if a model has such a scheme: no rotary model needs them.
"""

from ropext.files.schemes.reading import read_positions, refusal

__all__ = ["read_positions", "refusal"]
