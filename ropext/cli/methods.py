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


def command(
    out: Out,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="one method")] = None,
) -> None:
    """List the scaling methods, or show one. With its knobs, its paper and how it is carried."""
    if name is not None:
        method = scaling.find(name)
        out.result(_page(method), _data(method))
        return
    rows = [f"{m.name:<9} {m.summary}" for m in scaling.METHODS.values()]
    rows.append(f"\nIn memory alone: {self_extend.NAME}: {self_extend.SUMMARY}.")
    rows.append("\nropext methods NAME shows the knobs, the paper and how a config carries it.")
    out.result("\n".join(rows), [_data(m) for m in scaling.METHODS.values()])
