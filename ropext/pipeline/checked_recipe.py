"""Prepare a recipe for a run: read it, check its paths, data and gates, and refuse secrets."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext.base import bundled, guard
from ropext.base.errors import InputError, UsageError
from ropext.base.inputs import from_home
from ropext.base.locks import check_unlocked, run_folder
from ropext.base.narration import scrub
from ropext.evaluation.corpus.sources import Source, is_missing
from ropext.options.fields import (
    EVALUATE,
    EXTEND,
    FINETUNE,
    READ_ROLES,
    Role,
    flag,
    places_in_option,
    recipe_key,
)
from ropext.pipeline.recipe import (
    CHOSEN,
    SECTIONS,
    Entry,
    Loc,
    Recipe,
    RecipeSource,
    key_role,
    options_by_key,
    read_recipe,
    recipe_from_source,
)
from ropext.results.gates import Gate, parse_gate, split_run_spec


def open_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe, words: Sequence[str] = ()
) -> Recipe:
    """Return the recipe for any argument of `run`, with `key=value` overrides.

    If there is no such file, return the bundled recipe of that name. Relative paths in it count
    from the working directory.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping) or from_home(recipe).exists():
        return _checked(read_recipe(recipe, words))
    if "/" in str(recipe):
        raise InputError(f"{recipe} does not exist; name a recipe file")
    return _checked(read_recipe(bundled.find_recipe(str(recipe)), words, Path()))


def recipe_from_options(
    top: Mapping[str, Any],
    extend: Mapping[str, Any],
    later: dict[str, str | None],
    words: Sequence[str] = (),
    where: str = "the command line",
) -> Recipe:
    """Return the recipe of a command line or call.

    `top` has the keys above the sections, `extend` the options of that section, `later` the data of
    each later section. The `key=value` words set the rest.
    """
    later = {FINETUNE: extend.get(FINETUNE)} | later
    entries: dict[Loc, Entry] = {(name,): Entry(value, where) for name, value in top.items()}
    entries[EXTEND,] = Entry({}, where)
    given = {name: value for name, value in extend.items() if name != FINETUNE}
    entries |= {(EXTEND, recipe_key(name)): Entry(value, where) for name, value in given.items()}
    entries |= {(name, "data"): Entry(data, where) for name, data in later.items() if data}
    return _checked(recipe_from_source(RecipeSource(where, entries), words))


def _checked(recipe: Recipe) -> Recipe:
    """Return the recipe; refuse one with a secret in one of its values, or with a gate that cannot
    be read."""
    for loc, entry in recipe.source.entries.items():
        if isinstance(entry.value, str) and scrub(entry.value) != entry.value:
            raise UsageError(
                f"{entry.where}: {'.'.join(loc)} looks like a secret, and the run would record "
                "it; set HF_TOKEN, or log in with `hf auth login`"
            )
    with recipe.source.naming(EVALUATE):
        gates_of(recipe)
    return recipe


def gates_of(recipe: Recipe) -> tuple[Gate, ...]:
    """Return the gates of the evaluation."""
    return tuple(map(parse_gate, recipe.evaluate.fail_if if recipe.evaluate else ()))


def placed_gates(recipe: Recipe, labels: Collection[str], final: str | None) -> tuple[Gate, ...]:
    """Return the gates of the evaluation, each with its model, by default the finished checkpoint.

    The path of another run is resolved from the recipe's folder.
    """
    gates = list[Gate]()
    for gate in gates_of(recipe):
        other = gate.run
        if other is not None and other not in labels:
            other = os.path.join(recipe.source.entries[EVALUATE, "fail_if"].folder, other)
        gates.append(replace(gate, variant=gate.variant or final, run=other))
    return tuple(gates)


def previous_output(output: Path) -> Path:
    """Return OUT.previous, which keeps the replaced output of the last run with --keep-previous."""
    return output.with_name(f"{output.name}.previous")


def check_places(recipe: Recipe, output: Path, keep_previous: bool = False) -> None:
    """Refuse to write over, into or around an input.

    OUT.run may not be an input of its own run. With `keep_previous` the same holds for
    OUT.previous.
    """
    read: dict[str, Any] = {"the recipe": recipe.source.file, "--model": recipe.model}
    for section in SECTIONS:
        for name, value in recipe.options(section).items():
            loc = (section, recipe_key(name))
            entry = recipe.source.entries.get(loc)
            if key_role(loc) not in READ_ROLES or entry is None:
                continue
            if entry.where == CHOSEN:  # the run's own files
                continue
            is_later = name == "data" and section != EXTEND
            of_file = f"{section}.{recipe_key(name)}"
            of_flag = flag(section if is_later else name)
            read[of_file if recipe.source.file else of_flag] = places_in_option(value)
    judged = recipe.source.entries.get((EVALUATE, "fail_if"))
    folder = judged.folder if judged else Path()
    read["--fail-if"] = [folder / split_run_spec(g.run)[0] for g in gates_of(recipe) if g.run]
    written = {"--output": output, "where the run works": run_folder(output)}
    if keep_previous:
        written["where --keep-previous keeps what is replaced"] = previous_output(output)
    guard.check(read, written)
    check_unlocked(output)


def check_data(recipe: Recipe) -> None:
    """Raise InputError if local documents are missing, before hours of other work."""
    for loc, entry in recipe.source.entries.items():
        if key_role(loc) is not Role.DOCUMENTS or entry.value is None:
            continue
        section, key = loc
        place = recipe.options(section)[options_by_key(section)[key]]
        if is_missing(Source(place)):
            raise InputError(
                f"{entry.where}: {section}.{key} is {place}, and there is no such file or folder"
            )
