"""The same for one GGUF file: read its header and small tensors, write an extended one.

The parts, from the bottom: header (any GGUF file), file (a model's metadata as a config), keys
(what a plan changes, also as a directory has it), writing.
"""

from ropext.gguf.file import GgufFile, open_gguf
from ropext.gguf.keys import key_edits, request_like

__all__ = ["GgufFile", "key_edits", "open_gguf", "request_like"]
