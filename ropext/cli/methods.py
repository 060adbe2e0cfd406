"""`ropext methods [NAME]`."""

from dataclasses import fields
from typing import Annotated, Any

import typer

from ropext import scaling
from ropext.cli.output import Out
from ropext.options.fields import flag, shown_default
from ropext.scaling import Method, self_extend


def _data(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "carried": method.carried,
        "knobs": [
            {"flag": flag(f.name), "default": f.default, "help": f.metadata["help"]}
            for f in fields(method.knobs)
            if f.name != "short_pair_factors"  # a second set comes in the file of --pair-factors
        ],
    }


def _page(method: Method) -> str:
    lines = [f"{method.name}: {method.summary}", f"  paper    {method.paper}"]
    lines.append(f"  carried  as {method.carried} in config.json")
    for knob in _data(method)["knobs"]:
        lines.append(f"  {knob['flag']:<20} {knob['help']}{shown_default(knob['default'])}")
    lines.append("  --attention-factor and --temperature work with every method")
    return "\n".join(lines)


# Self-Extend is no way to write a config, so that it has no place in the list of methods.
_FOLDING: dict[str, Any] = {
    "name": self_extend.NAME,
    "summary": f"{self_extend.SUMMARY[:1].upper()}{self_extend.SUMMARY[1:]}.",
    "paper": "Self-Extend (Jin et al. 2024, arXiv 2401.01325)",
    "carried": "in memory alone: ropext serve, ropext.patch, ropext eval",
    "knobs": [
        {"flag": "window", "default": None, "help": "how near is near [half of the context]"},
        {
            "flag": "group",
            "default": None,
            "help": "how many positions far keys share [1.5 times what the target needs]",
        },
    ],
}


def _folding_page() -> str:
    lines = [f"{_FOLDING['name']}: {_FOLDING['summary']}", f"  paper    {_FOLDING['paper']}"]
    lines.append(f"  carried  {_FOLDING['carried']}")
    lines += [f"  {knob['flag']:<20} {knob['help']}" for knob in _FOLDING["knobs"]]
    return "\n".join(lines)


def command(
    out: Out,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="one method")] = None,
) -> None:
    """List the scaling methods, or show one. With its knobs, its paper and how it is carried."""
    if name == self_extend.NAME:
        out.result(_folding_page(), _FOLDING)
        return
    if name is not None:
        method = scaling.find(name)
        out.result(_page(method), _data(method))
        return
    rows = [f"{m.name:<9} {m.summary}" for m in scaling.METHODS.values()]
    rows.append(f"\nIn memory alone: {self_extend.NAME}: {self_extend.SUMMARY}.")
    rows.append("\nropext methods NAME shows the knobs, the paper and how a config carries it.")
    out.result("\n".join(rows), [_data(m) for m in scaling.METHODS.values()])
