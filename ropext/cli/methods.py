"""Define `ropext methods [NAME]`."""

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from ropext import scaling
from ropext.cli.output import Out
from ropext.options.evaluate import SelfExtend
from ropext.options.fields import flag, shown_default
from ropext.scaling import Method, self_extend


@dataclass(frozen=True)
class Knob:
    """One knob of a method, as its page lists it."""

    flag: str
    default: object
    help: str


@dataclass(frozen=True)
class MethodPage:
    """The page that `ropext methods NAME` prints."""

    name: str
    summary: str
    paper: str
    carried: str
    knobs: tuple[Knob, ...]

    def text(self, carried: str) -> str:
        """Return the text that the command `ropext methods NAME` prints in the terminal. `carried`
        is the sentence about the place that stores the method."""
        lines = [
            f"{self.name}: {self.summary}",
            f"  paper    {self.paper}",
            f"  stored   {carried}",
        ]
        for knob in self.knobs:
            lines.append(f"  {knob.flag:<20} {knob.help}{shown_default(knob.default)}")
        return "\n".join(lines)


def _page_of(method: Method) -> MethodPage:
    """Return the page that `ropext methods NAME` prints about a method."""
    knobs = list[Knob]()
    for field in fields(method.knobs):
        if field.name == "short_pair_factors":
            continue  # a second set comes in the file of --pair-factors
        knobs.append(Knob(flag(field.name), field.default, field.metadata["help"]))
    return MethodPage(method.name, method.summary, method.paper, method.carried, tuple(knobs))


def _folding_knobs() -> tuple[Knob, ...]:
    """Return the flags of Self-Extend with their help, as the command `ropext methods` prints
    them."""
    knobs = list[Knob]()
    for name, info in SelfExtend.model_fields.items():
        help_text = (info.description or "").removeprefix(f"{self_extend.NAME}: ")
        knobs.append(Knob(flag(name), info.default, help_text))
    return tuple(knobs)


# No config can store Self-Extend, so it is not in the list of methods.
_FOLDING = MethodPage(
    name=self_extend.NAME,
    summary=f"{self_extend.SUMMARY[:1].upper()}{self_extend.SUMMARY[1:]}.",
    paper="Self-Extend (Jin et al. 2024, arXiv 2401.01325)",
    carried="only in memory: ropext serve, ropext.patch, ropext eval, ropext plan --measure",
    knobs=_folding_knobs(),
)


def command(
    out: Out,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="one method")] = None,
) -> None:
    """List the scaling methods, or show one. With its options, its paper and its rope type."""
    if name == self_extend.NAME:
        page_text = _FOLDING.text(_FOLDING.carried)
        out.result(f"{page_text}\n  {self_extend.EXCEPTION}", _FOLDING)
        return
    if name is not None:
        page = _page_of(scaling.find(name))
        text = page.text(f"as {page.carried} in config.json")
        common = "  --attention-factor and --temperature work with every method"
        out.result(f"{text}\n{common}", page)
        return
    rows = [f"{m.name:<9} {m.summary}" for m in scaling.METHODS.values()]
    rows.append(f"\nOnly in memory: {self_extend.NAME}: {self_extend.SUMMARY}.")
    rows.append("\nropext methods NAME shows the knobs, the paper and how a config carries it.")
    out.result("\n".join(rows), [_page_of(m) for m in scaling.METHODS.values()])
