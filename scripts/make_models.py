"""Write docs/models.md: a table of models, and the plans that ropext prints for ten of them.

    python scripts/make_models.py

scripts/models.json has the configs of the ten and their sources, tests/support/published.py the
position keys of further released models. A test fails when page and code differ.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# This script's own tree, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from ropext import families
from ropext.cli.app import build
from ropext.families.config import packaged_facts
from ropext.families.published import Published, recipe_of
from tests.support.published import CONFIGS, config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
DATA = ROOT / "scripts/models.json"
HEAD = """\
# Supported models

<!-- Written by python scripts/make_models.py -->

Find your model here:

- one table: ten models with [a block to copy](#one-block-for-each-model), and further models
- [other model types](#other-model-types) that ropext reads without asking transformers
- [loaders.md](loaders.md): the methods that each engine computes exactly, for 40 families

Any other model whose type transformers describes works too.
`ropext inspect MODEL` shows how ropext reads it.
Models without a rotary embedding: [position-schemes.md](position-schemes.md).

The quality of one model was measured: [SmolLM2-135M](../README.md#what-to-expect).
The other plans follow only from the config.
Measure on your own documents whether the longer context is useful: `ropext eval`.

"context" is the length from which the plan starts.
"method" is the method that ropext recommends; for Qwen3 the command names the method of its
authors.
"published recipe" is the length or scaling that the authors publish.
`plan` names it, and warns if your plan differs.
"engines" compute the plan exactly in their newest measured versions.

The models without a link are planned for twice their context, from the position keys of their
released configs.
"by class default": the config states no length, so the default of its class counts.
A dash means that no config is here: ropext knows only the recipe of that model.

"""
OTHERS = """\
## Other model types

These types have a rotary embedding, and ropext knows them without asking transformers.

| from | model types |
|---|---|
"""
BLOCKS = """\
## One block for each model

Each block has a command, and the text that it prints. Copy the line for your engine.
The options are for a longer context than the authors' config states.

"""


# The ten have the first; the factors of the second are the tests' own; the third is no model.
LEFT_OUT = ("Llama 3.1", "Phi-3-mini-128k", "Llama of one layer size (linear, v4)")


def page() -> str:
    """Return the whole page."""
    models = json.loads(DATA.read_text("utf-8"))
    plans = [planned(model) for model in models]
    blocks = [block(*pair) for pair in zip(models, (text for _, text in plans), strict=True)]
    rows = [
        row(f"[{model['id']}](#{anchor(model['id'])})", plan, recipe_for(model["config"]))
        for model, (plan, _) in zip(models, plans, strict=True)
    ]
    rows += released()
    table = [
        "| model | model type | context | extended to | method | published recipe | engines |",
        "|---" * 7 + "|",
    ]
    parts = [
        "\n".join([*table, *rows, *recipes_alone(rows), "", ""]),
        BLOCKS,
        *blocks,
        OTHERS,
        *other_types(rows),
    ]
    return HEAD + "".join(parts).rstrip() + "\n"


def released() -> list[str]:
    """Return the rows of the released configs that the tests have, at twice their context."""
    rows = list[str]()
    for name in CONFIGS:
        if name not in LEFT_OUT:
            released_as = config(name)
            model = {"id": "a/b", "options": "--factor 2", "config": released_as}
            rows.append(row(name, planned(model)[0], recipe_for(released_as, name)))
    return rows


def recipe_for(released_as: dict[str, Any], name: str = "") -> Published | None:
    """Return the recipe of a config's authors, or the recipe for this model's name: the tests'
    sizes are smaller than the released ones."""
    for entry in packaged_facts("published.json"):
        if entry["models"] == name:
            return Published(**entry)
    return recipe_of(families.read(released_as))


def recipes_alone(rows: list[str]) -> list[str]:
    """Return the rows of the recipes whose models have no config here."""
    told = "\n".join(rows)
    alone = list[str]()
    for entry in packaged_facts("published.json"):
        recipe = Published(**entry)
        cell = recipe_cell(recipe)
        if cell not in told:
            types = ", ".join(f"`{name}`" for name in recipe.types)
            how = recipe_link(recipe)
            cells = [recipe.models, types, f"{recipe.stated:,}", "-", "-", how, "-"]
            alone.append(f"| {' | '.join(cells)} |")
    return alone


def recipe_cell(recipe: Published | None) -> str:
    """Return for which models the authors publish what."""
    if recipe is None:
        return "-"
    types = ", ".join(f"`{name}`" for name in recipe.types)
    link = recipe_link(recipe)
    return f"{recipe.models} ({types}; stated length {recipe.stated:,}): {link}"


def recipe_link(recipe: Published) -> str:
    """Return the authors' recipe, with its source as a link."""
    how = recipe.how if recipe.method else f"no scaling; {recipe.card or recipe.context:,} tokens"
    shipped = ", in the released config" if recipe.ships else ""
    address = re.search(r"https://[^\s,]+", recipe.source)
    assert address is not None
    place = recipe.source.replace(address[0], "")
    return f"[{how}{shipped}]({address[0]}){place}"


def row(name: str, plan: dict[str, Any], recipe: Published | None) -> str:
    """Return the row of one model."""
    exact = [engine for engine, verdict in verdicts(plan) if verdict == "same"]
    cells = [
        name,
        f"`{plan['model_type']}`",
        f"{plan['context']:,}",
        f"{plan['target']:,}",
        plan["method"],
        recipe_cell(recipe),
        ", ".join(exact),
    ]
    return f"| {' | '.join(cells)} |"


def other_types(rows: list[str]) -> list[str]:
    """Return the rows of the model types that no row above has, by their first letter."""
    shown = set(re.findall(r"`(\w+)`", "\n".join(rows)))
    by_letter = dict[str, list[str]]()
    for name in sorted(packaged_facts("types.json")["rotary"], key=str.lower):
        if name not in shown:
            by_letter.setdefault(name[0].lower(), []).append(f"`{name}`")
    return [f"| {letter} | {', '.join(names)} |\n" for letter, names in by_letter.items()]


def verdicts(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each engine's newest version range with its verdict."""
    seen = set()
    for reading in plan["loaders"]:
        if reading["loader"] not in seen:
            seen.add(reading["loader"])
            yield reading["loader"], reading["verdict"]


def linked(source: str) -> str:
    """Return a source with its address as a link."""
    return re.sub(r"https://[^\s,]+", r"<\g<0>>", source)


def anchor(name: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return "".join(c for c in name.lower() if c.isalnum() or c in "-_")


def block(model: dict[str, Any], text: str) -> str:
    """Return the section of one model."""
    command = " ".join(["ropext", *words_of(model)])
    return (
        f"### {model['id']}\n\nConfig: {linked(model['source'])}\n\n"
        f"```sh\n{command}\n```\n\n```text\n{text}```\n\n"
    )


def words_of(model: dict[str, Any]) -> list[str]:
    """Return the words of the command that plans this model."""
    return ["plan", model["id"], *model["options"].split()]


def planned(model: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the plan of one model as data and as the text that `ropext plan` prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path(model["id"]).mkdir(parents=True)
        Path(model["id"], "config.json").write_text(json.dumps(model["config"]), "utf-8")
        return json.loads(printed([*words_of(model), "--json"])), printed(words_of(model))


def printed(words: list[str]) -> str:
    """Return a command's output on stdout."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        build("plan", words)(words, prog_name="ropext", standalone_mode=False)
    return out.getvalue()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    PAGE.write_text(page(), "utf-8")
