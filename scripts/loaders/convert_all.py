"""Convert a family's checkpoints with llama.cpp's own converter: convert_all.py CONVERTER FAMILY

Each FORM in it gets a model.gguf in float32. What fails leaves its words in convert.error.
"""

import sys
from pathlib import Path

from convert_gguf import convert

converter, folder = map(Path, sys.argv[1:])
for place in sorted(folder.glob("*/config.json")):
    for old in ("model.gguf", "convert.error"):
        (place.parent / old).unlink(missing_ok=True)
    try:
        convert(converter, place.parent, place.parent / "model.gguf")
    except Exception as error:  # a converter fails in its own ways: its message is kept
        text = f"{type(error).__name__}: {error}"[:2000]
        (place.parent / "convert.error").write_text(text)
