"""Read the header and small tensors of a GGUF file, and write an extended one.

The order of the modules, from the bottom: header, stock_form, geometry, file, keys, like,
opening, proving, writing.
"""

from ropext.files.gguf.file import GgufFile, as_file
from ropext.files.gguf.like import request_like
from ropext.files.gguf.opening import open_gguf

__all__ = ["GgufFile", "as_file", "open_gguf", "request_like"]
