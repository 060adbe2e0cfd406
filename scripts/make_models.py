"""Write docs/models.md: a table of models, and the plan that ropext prints for each config.

    python scripts/make_models.py

scripts/models.json has the configs and their sources. A test fails when page and code differ.
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

# The tree in which this script lies, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from ropext.cli.app import build
from ropext.families.config import packaged
from ropext.families.published import Published

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
DATA = ROOT / "scripts/models.json"
HEAD = """\
# Supported models

<!-- Written by python scripts/make_models.py -->

Find your model here:

- the table of ten models, each with [a block to copy](#one-block-for-each-model)
- [the recipes that authors publish](#published-recipes)
- [loaders.md](loaders.md): the methods that each engine computes exactly, for 40 families

Any other model whose type transformers describes works too.
`ropext inspect MODEL` shows how ropext reads it.
Models without a rotary embedding: [position-schemes.md](position-schemes.md).

The quality of one model was measured: [SmolLM2-135M](../README.md#what-to-expect).
The other plans follow only from the config.
Measure on your own documents whether the longer context is useful: `ropext eval`.

"context" is the length from which the plan starts. "method" is the method that ropext recommends;
for Qwen3 the command names the method that its authors publish.
"engines" compute the plan exactly in their newest measured versions.

"""
PUBLISHED = """\
## Published recipes

The authors of these models publish a length or a scaling.
`plan` names it, and warns if your plan differs.

"""
BLOCKS = """\
## One block for each model

Each block has a command, and the text that it prints. Copy the line for your engine.
The options are for a longer context than the authors' config states.

"""


def page() -> str:
    """Return the whole page."""
    models = json.loads(DATA.read_text("utf-8"))
    plans = [planned(model) for model in models]
    rows = [row(*pair) for pair in zip(models, (plan for plan, _ in plans), strict=True)]
    blocks = [block(*pair) for pair in zip(models, (text for _, text in plans), strict=True)]
    table = [
        "| model | model type | context | extended to | method | engines |",
        "|---" * 6 + "|",
    ]
    recipes = [published(Published(**entry)) for entry in packaged("published.json")]
    parts = [
        "\n".join([*table, *rows, "", ""]),
        PUBLISHED,
        published_table(recipes),
        BLOCKS,
        *blocks,
    ]
    return HEAD + "".join(parts).rstrip() + "\n"


def published_table(rows: list[str]) -> str:
    """Return the table of the authors' recipes."""
    head = [
        "| models | model type | stated length | recipe | source |",
        "|---" * 5 + "|",
    ]
    return "\n".join([*head, *rows, "", ""])


def published(recipe: Published) -> str:
    """Return the row of one published recipe."""
    how = recipe.how if recipe.method else f"no scaling; {recipe.card or recipe.context:,} tokens"
    shipped = ", in the released config" if recipe.ships else ""
    source = linked(recipe.source)
    types = ", ".join(f"`{name}`" for name in recipe.types)
    return f"| {recipe.models} | {types} | {recipe.stated:,} | {how}{shipped} | {source} |"


def row(model: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return the row of one model in the first table."""
    exact = [name for name, verdict in verdicts(plan) if verdict == "same"]
    name = f"[{model['id']}](#{anchor(model['id'])})"
    cells = [
        name,
        f"`{plan['model_type']}`",
        f"{plan['context']:,}",
        f"{plan['target']:,}",
    ]
    return f"| {' | '.join([*cells, plan['method'], ', '.join(exact)])} |"


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
    """Return what a command prints to stdout."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        build("plan", words)(words, prog_name="ropext", standalone_mode=False)
    return out.getvalue()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    PAGE.write_text(page(), "utf-8")
