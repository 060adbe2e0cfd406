"""Models that do not rotate: learned tables, buckets, slopes, relative tables.

How a config is read is here at once. Their plan, their weights and what is said of one are loaded
where a model has such a scheme: no rotary model needs them.
"""

from ropext.files.schemes.reading import read_positions, refusal

__all__ = ["read_positions", "refusal"]
