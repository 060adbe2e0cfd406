"""The methods as Markdown, for docs/methods.md and README.md; a test keeps them equal."""

from dataclasses import fields
from typing import Any

from ropext.scaling import METHODS, Method

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def render() -> str:
    """Everything that stands between the two markers."""
    lines = ["| method | what it does | carried as | paper |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.summary} | {m.carried} | {m.paper} |" for m in METHODS.values()]
    lines += ["", "| method | knob | default | meaning |", "|---|---|---|---|"]
    for method in METHODS.values():
        lines += _knobs(method)
    return "\n".join(lines) + "\n"


def brief() -> str:
    """The table of the README."""
    lines = ["| method | what it does | carried as |", "|---|---|---|"]
    lines += [f"| `{m.name}` | {m.summary} | {m.carried} |" for m in METHODS.values()]
    return "\n".join(lines) + "\n"


def _knobs(method: Method) -> list[str]:
    return [
        f"| `{method.name}` | `{_flag(knob.name)}` | {_shown(knob.default)} | "
        f"{knob.metadata['help']} |"
        for knob in fields(method.knobs)
        if knob.name != "short_pair_factors"  # comes in the file of --pair-factors
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "-" if default is None else f"{default:g}"
