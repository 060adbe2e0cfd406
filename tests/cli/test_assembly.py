"""The table of commands agrees with the commands themselves."""

import re
from importlib import import_module

import pytest

from ropext.cli.app import COMMANDS, GROUPED
from ropext.cli.options import Heading
from ropext.options.fields import Panel


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_summary_is_the_first_sentence_of_its_help(name):
    command = import_module(f"ropext.cli.{name}").command
    assert command.__doc__.startswith(COMMANDS[name] + " ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_its_own_options(ropext, name):
    code, out, _ = ropext(name, "--help")
    assert code == 0
    assert COMMANDS[name] in " ".join(out.split())
    assert "--json" in out


@pytest.mark.parametrize("name", GROUPED)
def test_help_is_in_groups_and_help_all_has_every_option(ropext, name):
    import typer

    from ropext.cli.app import build

    short, full = ropext(name, "--help")[1], ropext(name, "--help-all")[1]
    for said in (short, full):
        for panel in ("Output:", "Which method:" if name != "finetune" else "Data:"):
            assert f"\n{panel}\n" in said
    known = typer.main.get_command(build(name)).commands[name].params
    flags = {max(own.opts, key=len) for own in known if own.param_type_name == "option"}
    shown = {flag for flag in flags if re.search(rf"{flag}(?![\w-])", full)}
    assert shown == flags
    assert {"--factor" if name in ("plan", "serve") else "--output", "--json"} <= {*short.split()}
    assert len(short.splitlines()) < len(full.splitlines()) - 10
    counted = sum(not re.search(rf"(?m)^  (-\w, )?{flag}(?![\w-])", short) for flag in flags)
    assert f"show {counted} more options" in short


def test_help_of_serve_begins_with_the_port_and_folds_the_knobs_away(ropext):
    short = ropext("serve", "--help")[1]
    first = re.findall(r"(?m)^  --[\w-]+", short)[0]
    assert first == "  --port"
    assert "--low-freq-factor" not in short
    assert "--low-freq-factor" in ropext("serve", "--help-all")[1]


def test_an_option_is_in_the_same_panel_of_every_command():
    """The options of a class name their panel; a command's own without one are under "Output"."""
    import typer

    from ropext.cli.app import build

    panels = {}
    for command in GROUPED:
        for parameter in typer.main.get_command(build(command)).commands[command].params:
            heading = getattr(parameter, "rich_help_panel", None)
            if isinstance(heading, Heading):
                assert heading in tuple(Panel)
                panels.setdefault(parameter.name, set()).add((str(heading), heading.basic))
    del panels["window"]  # a fit's is of its rows, an evaluation's of Self-Extend
    del panels["kv"]  # for memory, caches that fit; for an evaluation, more rows
    del panels["adapter"]  # for an evaluation, one more row; for a server, its adapter
    del panels["parallel"]  # for a server, questions at a time; for memory, sequences in it
    assert all(len(places) == 1 for places in panels.values()), panels
    assert panels["factor"] == {("How far", True)}
    assert panels["beta_fast"] == {("Knobs of a method", False)}
