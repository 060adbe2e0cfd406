"""Print which forms a loader reads right, and if one is wrong, its misreading.

    python check.py expected.json answers.json

It needs Python alone. answers.json holds the loader's numbers, by family and form:

    {"llama": {"yarn": {"log_probabilities": {"128": [...], "512": [...]},
                        "embeddings": {"": {"inv_freq": [...], "attention_factor": 1.1}}}}}

log_probabilities are at the positions of expected.json; a length may be left out. So may
embeddings, which are by layer type ("" if a model has one), and each of their numbers. A form
without numbers is wrong if answers.json has its family. Exit code: 0 if all is right, 3 if
something is wrong, 2 if the kit has no such family, form or length.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Data = Mapping[str, Any]


class NotInKit(Exception):
    """An answer for a family, form, length or number that the kit does not have."""


def _of(holder: Data, key: str, where: str) -> Any:
    if key not in holder:
        raise NotInKit(f"{where} {key!r} is not in the kit, which has {', '.join(holder)}")
    return holder[key]


def findings(expected: Data, answers: Data) -> dict[str, list[str]]:
    """Return FAMILY/FORM -> its errors, for every form of an answered family; a right reading has
    none."""
    out = {}
    for family, own in answers.items():
        forms = _of(expected["families"], family, "family")
        for form in own:
            _of(forms, form, f"{family}: form")
        for form, wanted in forms.items():
            wrong = _wrong(wanted, own.get(form, {}), expected["tolerances"])
            out[f"{family}/{form}"] = wrong
    return out or {"answers": ["no family was answered"]}


def _wrong(form: Data, answer: Data, tolerances: Data) -> list[str]:
    said, given = [], answer.get("log_probabilities", {})
    if not any(given.values()) and not any(answer.get("embeddings", {}).values()):
        return ["no answer"]
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
            off = _off(_of(_of(embeddings, label, "layer type"), name, "number"), found)
            if not off <= tolerances["relative"]:
                where = f" of {label}" if label else ""
                said.append(f"{name}{where} is off by {off:.2g} of its value")
    return said


def _gap(wanted: Data, given: Data) -> float:
    """Return the largest difference at the answered lengths."""
    if any(len(_of(wanted, at, "length")) != len(given[at]) for at in given):
        return float("inf")
    pairs = [(a, b) for at in given for a, b in zip(wanted[at], given[at], strict=True)]
    return max((abs(a - b) if b == b else float("inf") for a, b in pairs), default=0.0)


def _off(wanted: Any, found: Any) -> float:
    """Return the largest relative difference of two numbers or two lists of them."""
    wanted, found = ([own] if isinstance(own, int | float) else own for own in (wanted, found))
    if len(wanted) != len(found):
        return float("inf")
    pairs = zip(wanted, found, strict=True)
    return max((abs(b - a) / (abs(a) or 1.0) for a, b in pairs), default=0.0)


def main(expected: str, answers: str) -> int:
    """Print the right and wrong forms; return the exit code."""
    try:
        wrong = findings(*(json.loads(Path(p).read_text("utf-8")) for p in (expected, answers)))
    except NotInKit as error:
        sys.stderr.write(f"{answers}: {error}\n")
        return 2
    for name, said in wrong.items():
        sys.stdout.write(f"{name}: {'; '.join(said) or 'right'}\n")
    return 3 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
