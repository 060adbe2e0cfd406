"""Write ropext/families/defaults.json: the meaning of an absent config key, per model type.

Run it with the transformers version whose defaults are wanted (a test compares the file with it):

    python scripts/make_defaults.py [FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from ropext.verifying.proof.describing import defaults_of, values_added_by

TYPES = Path(__file__).parent.parent / "ropext" / "families" / "types.json"
DEFAULTS = TYPES.with_name("defaults.json")


def lines_of(made: dict[str, Any]) -> str:
    return ",\n".join(
        f"  {json.dumps(t)}: {json.dumps(made[t], default=str)}" for t in sorted(made)
    )


def main() -> None:
    census = json.loads(TYPES.read_text())
    made, added = {}, {}
    for model_type in census["rotary"]:
        try:
            made[model_type] = defaults_of(CONFIG_MAPPING[model_type])
        except Exception as error:
            sys.exit(f"{model_type}: {type(error).__name__}: {error}")
    for model_type, (*path, text_type) in census["composite"].items():
        if text_type in census["rotary"] and len(path) == 1:
            try:
                kind = CONFIG_MAPPING[model_type]
                found = values_added_by(kind, path[0], text_type, CONFIG_MAPPING[text_type])
            except Exception:  # a composite that cannot be built without more keys adds none
                continue
            if found:
                added[model_type] = found
    place = Path(sys.argv[1]) if sys.argv[1:] else DEFAULTS
    place.write_text(
        f'{{\n "transformers": {json.dumps(transformers.__version__)},\n'
        f' "types": {{\n{lines_of(made)}\n }},\n "composites": {{\n{lines_of(added)}\n }}\n}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
