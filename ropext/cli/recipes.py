"""Define `ropext recipes [ls] | cat NAME`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from ropext.base import bundled
from ropext.base.errors import UsageError
from ropext.base.table import wrapped_line
from ropext.cli.output import Out

Action = Annotated[
    str, typer.Argument(metavar="[ls|cat]", help="ls lists them, cat NAME prints one to be edited")
]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="name of the recipe, for cat")]


def recipe_header(path: Path) -> dict[str, str]:
    """Return, for the list that the command `ropext recipes` prints, the lines above a recipe's
    keys. Their names are what for, needs, command, run."""
    lines = dict[str, str]()
    key = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        named = re.match(r"# ([A-Z][a-z ]+):\s+(.*)", line)
        if named:
            key = named[1].lower()
            lines[key] = named[2].strip()
        elif key:
            lines[key] += f" {line.lstrip('# ').strip()}"
    return lines


def command(
    out: Out,
    action: Action = "ls",
    name: Name = None,
) -> None:
    """List the recipes that come with ropext, or print one. `ropext run NAME` runs it."""
    if action not in ("ls", "cat"):
        raise UsageError(f"recipes takes ls, or cat NAME, and not {action!r}")
    if action == "ls" and name is not None:
        raise UsageError(f"recipes ls takes no name; `ropext recipes cat {name}` prints one")
    if action == "cat":
        if name is None:
            raise UsageError("recipes cat wants a NAME; `ropext recipes ls` lists them")
        path = bundled.find_recipe(name)
        text = path.read_text(encoding="utf-8")
        out.result(text, {"name": path.stem, "text": text} | recipe_header(path))
        return
    headers = list[dict[str, str]]()
    text = ""
    for stem, path in bundled.recipes().items():
        recipe = {"name": stem} | recipe_header(path)
        headers.append(recipe)
        text += stem + "\n"
        for line in (recipe["what for"], f"needs: {recipe['needs']}", f"run: {recipe['run']}"):
            text += wrapped_line(line, "  ", "    ") + "\n"
        text += "\n"
    out.result(text, headers)
