"""The tests test something: classic mistakes, made one at a time in a copy, each die by a value.

Every mistake was found in a published implementation. A mutant must import and compute finite
spectra that are more than 1e-3 off; the first test that fails on it must fail by an assertion.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparing import worst_pair

import ropext

PACKAGE = Path(ropext.__file__).parent
TESTS = Path(__file__).parent
PURE = ("scaling/test_paper_values.py", "scaling/test_transcription.py", "test_forms.py")
READING = ("test_forms.py",)
SAVED = ("test_spellings.py",)


@dataclass(frozen=True)
class Mutant:
    """One mistake: file, a text that occurs there exactly once, its replacement."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    killers: tuple[str, ...] = PURE


def mutant(name: str, file: str, old: str, new: str, **kwargs: tuple[str, ...]) -> Mutant:
    return Mutant(name, ((file, old, new),), **kwargs)


# A plan reads its own output again, and refuses another spectrum: here the tests must notice the
# mistake.
UNREAD = (
    "planning/rotary.py",
    "if site.label in wanted and not same(site.rope.spectrum, wanted[site.label]):",
    "if False:",
)


def written(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, (("families/writing.py", old, new), UNREAD), SAVED)


MUTANTS = (
    mutant(
        "ramp inverted (litgpt)",
        "scaling/yarn.py",
        "1 / (r / s + 1 - r) for r",
        "1 / ((1 - r) / s + r) for r",
    ),
    mutant(
        "half_dim for dim in the ramp (levanter)",
        "scaling/forms.py",
        "low = dim * math.log(context",
        "low = dim // 2 * math.log(context",
    ),
    mutant(
        "clamp one short of dim - 1 (OLMo-core)",
        "scaling/forms.py",
        "min(high, dim - 1)",
        "min(high, dim // 2 - 1)",
    ),
    mutant(
        "factor applied twice (levanter)",
        "scaling/yarn.py",
        "1 / (r / s + 1 - r) for r",
        "s / (r / s + 1 - r) for r",
    ),
    mutant(
        "factor applied twice in the exported dict",
        "scaling/__init__.py",
        "divided(now.inv_freq, scaling.pair_factors),\n        rope.attention_factor",
        "divided(divided(now.inv_freq, scaling.pair_factors), scaling.pair_factors),\n"
        "        rope.attention_factor",
    ),
    mutant(
        "sqrt of the temperature (levanter)",
        "scaling/forms.py",
        "0.1 * m * math.log(factor) + 1.0",
        "math.sqrt(0.1 * m * math.log(factor) + 1.0)",
    ),
    mutant(
        "temperature left out (litgpt)",
        "scaling/yarn.py",
        "return Scaling(factors, attention, native)",
        "return Scaling(factors, 1.0, native)",
    ),
    mutant(
        "theta lost in reading",
        "scaling/forms.py",
        'theta = _number(params, "rope_theta")',
        "theta = 10_000.0",
        killers=READING,
    ),
    written(
        "theta lost in the saved config (transformers 5's own save)",
        '_set_everywhere(text, row.theta, modern["rope_theta"])',
        "[text.pop(key, None) for key in row.theta]",
    ),
    written(
        "only the new spelling written (transformers 5's own save)",
        'text["rope_scaling"] = _legacy(modern, row, text.get("rope_scaling"), target)',
        'text["rope_scaling"] = None',
    ),
    written(
        "partial factor lost beside a legacy dict",
        '_set_everywhere(text, row.partial, modern["partial_rotary_factor"])',
        "[text.pop(key, None) for key in row.partial]",
    ),
    mutant(
        "head_dim for the rotary dim",
        "families/geometry.py",
        "dim = int(head * partial_factor(text.row, params))",
        "dim = head",
        killers=SAVED,
    ),
    mutant(
        "truncation forgotten",
        "scaling/forms.py",
        "if truncate:",
        "if False:",
    ),
    mutant(
        "max_position_embeddings for the original (transformers 4.43 to 4.50)",
        "scaling/forms.py",
        "lengths = {ORIGINAL: params.get(ORIGINAL) or context}",
        "lengths = {ORIGINAL: context}",
    ),
    mutant(
        "d for d - 2 in NTK's exponent",
        "scaling/ntk.py",
        "s ** (rope.dim / (rope.dim - 2))",
        "s ** (rope.dim / rope.dim)",
    ),
    mutant(
        "wavelength for turns in by-parts",
        "scaling/forms.py",
        "r = context * f / (2 * math.pi)",
        "r = context * f",
    ),
    Mutant(
        "mscale pair dropped",
        (
            (
                "scaling/__init__.py",
                "if rope.softmax_mscale and rope.mscale_all_dim:",
                "if False:",
            ),
            (
                "scaling/forms.py",
                "return {key: value for key, value in pair.items() if value}",
                "return {}",
            ),
        ),
    ),
)


def run(copy: Path, killers: tuple[str, ...]) -> dict:
    done = subprocess.run(
        [sys.executable, str(TESTS / "mutant_run.py"), str(copy), str(TESTS), *killers],
        capture_output=True,
        text=True,
        cwd=copy,
        check=False,
    )
    assert done.returncode == 0, f"the copy does not run:\n{done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def copy_to(directory: Path) -> Path:
    shutil.copytree(
        PACKAGE, directory / "ropext", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    return directory


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Run an unchanged copy: it must pass every killer, or its verdicts on the others mean
    nothing."""
    every = tuple(dict.fromkeys(killer for m in MUTANTS for killer in m.killers))
    found = run(copy_to(tmp_path_factory.mktemp("healthy")), every)
    assert found["killer"] is None, found["killer"]
    return found["spectra"]


def furthest(spectra: dict, healthy: dict) -> tuple[float, str]:
    """Return the largest relative difference from the healthy copy, and its place."""
    differences = {}
    for key, value in spectra.items():
        # A mutant may see another number of pairs: only the pairs of both are compared.
        pairs = min(len(value), len(healthy[key]))
        differences[key] = worst_pair(value[:pairs], healthy[key][:pairs])[1]
    where = max(differences, key=differences.__getitem__)
    return differences[where], where


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_dies_by_a_value(mutant: Mutant, healthy: dict, tmp_path: Path) -> None:
    copy = copy_to(tmp_path)
    for file, old, new in mutant.edits:
        path = copy / "ropext" / file
        text = path.read_text("utf-8")
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new), "utf-8")
    found = run(copy, mutant.killers)
    off, where = furthest(found["spectra"], healthy)
    assert off > 1e-3, f"{mutant.name}: hardly a mutant, {off:.3g} off at {where}"
    assert found["killer"], f"{mutant.name} survived: {off:.3g} off at {where}"
    test, kind, message = found["killer"]
    assert kind == "AssertionError", f"{mutant.name} died by {kind} in {test}: {message}"
    print(f"\n{mutant.name}: {off:.3g} off at {where}; killed by {test}\n    {message}")
