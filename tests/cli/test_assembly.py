"""The table of commands says what the commands say themselves."""

import re
from importlib import import_module

import pytest

from ropext.cli.app import COMMANDS, GROUPED
from ropext.cli.options import PANELS


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
    assert {"--output" if name != "plan" else "--factor", "--json"} <= {*short.split()}
    assert len(short.splitlines()) < len(full.splitlines()) - 10
    counted = sum(not re.search(rf"(?m)^  (-\w, )?{flag}(?![\w-])", short) for flag in flags)
    assert f"show {counted} more options" in short


def test_every_parameter_of_a_panel_is_one_of_a_command():
    import typer

    from ropext.cli.app import build

    names = {
        own.name
        for command in typer.main.get_command(build()).commands.values()
        for own in command.params
    }
    listed = [name for names in PANELS.values() for name in names.replace("|", " ").split()]
    assert not {*listed} - names
    assert len(listed) == len({*listed})
