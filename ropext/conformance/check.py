"""Say which forms a loader reads right, and where it does not, what it reads instead.

    python check.py expected.json answers.json

It needs Python alone. answers.json holds what the loader gave, by family and form:

    {"llama": {"yarn": {"log_probabilities": {"128": [...], "512": [...]},
                        "embeddings": {"": {"inv_freq": [...], "attention_factor": 1.1}}}}}

log_probabilities are at the positions of expected.json; a length may be left out. So may
embeddings, which are by layer type ("" where a model has one), and each of their numbers.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Data = Mapping[str, Any]


def findings(expected: Data, answers: Data) -> dict[str, list[str]]:
    """FAMILY/FORM -> what is wrong with its reading; nothing where it is right."""
    return {
        f"{family}/{form}": _wrong(expected["families"][family][form], own, expected["tolerances"])
        for family, forms in answers.items()
        for form, own in forms.items()
    }


def _wrong(form: Data, answer: Data, tolerances: Data) -> list[str]:
    said, given = [], answer.get("log_probabilities", {})
    gap = _gap(form["log_probabilities"], given)
    if not gap <= tolerances["log_probability"]:
        alike = [
            what
            for what, own in form["misread"].items()
            if _gap(own, given) <= tolerances["log_probability"]
        ]
        said.append(f"log-probabilities are off by up to {gap:.2g}")
        said += [f"it reads the form {what}" for what in alike]
    embeddings = {own["layer_type"]: own for own in form["embeddings"]}
    for label, own in answer.get("embeddings", {}).items():
        for name, found in own.items():
            off = _off(embeddings[label][name], found)
            if not off <= tolerances["relative"]:
                where = f" of {label}" if label else ""
                said.append(f"{name}{where} is off by {off:.2g} of its value")
    return said


def _gap(wanted: Data, given: Data) -> float:
    """The largest difference at the lengths that were answered."""
    pairs = [(a, b) for at in given for a, b in zip(wanted[at], given[at], strict=True)]
    return max((abs(a - b) if b == b else float("inf") for a, b in pairs), default=0.0)


def _off(wanted: Any, found: Any) -> float:
    """The largest relative difference of two numbers or two lists of them."""
    wanted, found = ([own] if isinstance(own, int | float) else own for own in (wanted, found))
    if len(wanted) != len(found):
        return float("inf")
    pairs = zip(wanted, found, strict=True)
    return max((abs(b - a) / (abs(a) or 1.0) for a, b in pairs), default=0.0)


if __name__ == "__main__":
    wrong = findings(*(json.loads(Path(path).read_text("utf-8")) for path in sys.argv[1:3]))
    for name, said in wrong.items():
        sys.stdout.write(f"{name}: {'; '.join(said) or 'right'}\n")
    sys.exit(any(wrong.values()))
