"""Recipes made at random are read, or refused in one sentence that names the line; never anything
else.

A recipe that was read prints itself as a text that is read again as the same.
"""

import random
import re

import pytest

from ropext.base.errors import RopextError
from ropext.options.fields import recipe_key, value_kind
from ropext.pipeline.recipe import (
    SECTIONS,
    RecipeSource,
    parse_recipe,
    read_recipe,
    recipe_from_source,
)

GOOD = {
    int: "3 8 1_000 1e3 16.0 4k",
    float: "0.5 2 2e-4 .5",
    bool: "true false",
    str: "a b.jsonl no",
}
BAD = (
    *("four", "[1, 2]", "{a: b}", "[[1]]", "-1", "0", "1e400", "nan", ".inf", "''", "'4'", "~", ""),
    *("4kb", "a,b", "2,4", "9" * 21, "!!str x", "&a x", "*a", "${NOWHERE}", "$x", "- x", "? x"),
)
USUAL = {"method": "yarn pi auto", "for": "vllm", "tasks": "passkey", "model": "ropext://demo"}


def value(rng, key, info):
    if rng.random() < 0.25:
        return rng.choice(BAD)
    item, is_list, choices = value_kind(info)
    words = choices or USUAL.get(key, GOOD[item]).split()
    return f"[{rng.choice(words)}]" if is_list and rng.random() < 0.5 else rng.choice(words)


def recipe(seed):
    """Return the text of a recipe, and a word of the command line."""
    rng = random.Random(seed)
    lines = ["model: ropext://demo"] * (rng.random() < 0.95)
    for section, kind in SECTIONS.items():
        if rng.random() < (0.95 if section == "extend" else 0.4):
            keys = {} if section == "extend" else {"data": "ropext://tuning"}
            for name, info in kind.model_fields.items():
                if rng.random() < 0.06:
                    keys[recipe_key(name)] = value(rng, recipe_key(name), info)
            keys |= {"bogus": "3"} if rng.random() < 0.03 else {}
            lines += [f"{section}:" + " {}" * (not keys), *(f"  {k}: {v}" for k, v in keys.items())]
    section = rng.choice(list(SECTIONS))
    name, info = rng.choice(list(SECTIONS[section].model_fields.items()))
    word = f"{section}.{recipe_key(name)}={value(rng, recipe_key(name), info)}"
    return "\n".join(lines) + "\n", [word] * (rng.random() < 0.2)


def read(seed):
    text, words = recipe(seed)
    return recipe_from_source(RecipeSource("my.yaml", parse_recipe(text, "my.yaml")), words)


@pytest.mark.parametrize("block", range(4))
def test_a_recipe_is_read_or_refused_with_its_line(block):
    taken = 0
    for seed in range(250 * block, 250 * (block + 1)):
        try:
            found = read(seed)
        except RopextError as error:
            said = str(error)
            assert re.search(r"my\.yaml, line \d+|^\w+\.\w+=|^my\.yaml ", said), (seed, said)
            assert len(said) < 900, (seed, said)
            continue
        taken += 1
        again = read_recipe(found.resolved())
        assert again.resolved() == found.resolved(), seed
        assert again.extend_options() == found.extend_options(), seed
        if found.fit:  # its weights go to the same place as the extension's by default
            fits = [one.fit_options().changed(link="copy") for one in (found, again)]
            assert fits[0] == fits[1], seed
    assert taken > 20
