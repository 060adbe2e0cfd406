"""Names of what comes with the package, understood wherever a model or data is named.

    ropext://demo       the bundled checkpoint, for a MODEL
    ropext://held-out   documents it was never trained on, for DATA
    ropext://tuning     documents to tune on, for DATA

    smoke-test          a recipe, for RECIPE (`ropext recipes ls`)

So a command or recipe that uses them runs from any directory and records no path of this machine.
"""

from pathlib import Path

from ropext.errors import InputError, did_you_mean

SCHEME = "ropext://"
_DEMO = Path(__file__).parent / "demo"

MODELS = {f"{SCHEME}demo": _DEMO / "checkpoint"}
DATA = {
    f"{SCHEME}held-out": _DEMO / "data" / "held-out.jsonl",
    f"{SCHEME}tuning": _DEMO / "data" / "tuning.jsonl",
}


def recipes() -> dict[str, Path]:
    """The recipes that come with ropext, by name: in the package, or beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a bundled recipe; a name that is none is refused with its neighbours."""
    known = recipes()
    wanted = name.removesuffix(".yaml")
    if wanted in known:
        return known[wanted]
    hint = did_you_mean(wanted, known, "`ropext recipes ls` lists them")
    if wanted != name:
        raise InputError(f"there is no file {name[:80]}, and no recipe of ropext's own; {hint}")
    raise InputError(f"no recipe of the name {name[:80]} comes with ropext; {hint}")


def find_model(name: str) -> Path | None:
    """The directory of a bundled checkpoint; None where the name is not of this kind."""
    return _find(name, MODELS, DATA, "model", "data")


def find_data(name: str) -> Path | None:
    """The file of bundled documents; None where the name is not of this kind."""
    return _find(name, DATA, MODELS, "data", "model")


def _find(
    name: str, known: dict[str, Path], others: dict[str, Path], kind: str, other: str
) -> Path | None:
    if not name.startswith(SCHEME):
        return None
    if name in known:
        return known[name]
    if name in others:
        raise InputError(f"{name} names bundled {other}, no {kind}; bundled {kind}: {_list(known)}")
    ask = did_you_mean(name, known, f"known are {_list(known)}")
    raise InputError(f"{name[:80]} names nothing that comes with ropext as {kind}; {ask}")


def _list(names: dict[str, Path]) -> str:
    return ", ".join(names)
