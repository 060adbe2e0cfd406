"""The table of commands says what the commands say themselves."""

from importlib import import_module

import pytest

from ropext.cli.app import COMMANDS


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
