"""The same for one GGUF file: read its header and small tensors, write an extended one.

The parts, from the bottom: header (any GGUF file), geometry (what its keys say of positions), model
(the Model of that), spelling (the config of that, for records and transformers), file, keys (what a
plan changes, and its carrier), like (a plan as a directory has it), opening, proving, writing.
"""

from ropext.gguf.file import GgufFile, as_file
from ropext.gguf.like import request_like
from ropext.gguf.opening import open_gguf

__all__ = ["GgufFile", "as_file", "open_gguf", "request_like"]
