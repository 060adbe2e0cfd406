"""Models that do not rotate: grow and inspect their learned tables, buckets, slopes and relative
tables, and plan for them.

No rotary model needs these modules. They are loaded if a model has such a scheme.
"""
