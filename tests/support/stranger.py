"""A stranger's model: the demo's model, with code of its own for everything that transformers would
load.

The code leaves a sign when it runs.
"""

import json
import shutil
from pathlib import Path

from ropext.base.bundled import MODELS

CODE = """\
import sys
with open({ran!r}, "a") as file:
    file.write(" ".join(sys.argv[:2]) + "\\n")
class C: pass
"""
AUTO_MAPS = {
    "config.json": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"},
    "tokenizer_config.json": {"AutoTokenizer": ["evil.C", "evil.C"]},
}


def write_stranger(folder: Path, ran: Path) -> None:
    """Write the model; the file `ran` gets a line whenever its code is imported."""
    shutil.copytree(MODELS["ropext://demo"], folder)
    for name, classes in AUTO_MAPS.items():
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | {"auto_map": classes}))
    (folder / "evil.py").write_text(CODE.format(ran=str(ran)))
