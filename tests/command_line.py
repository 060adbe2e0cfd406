"""The command line in this process."""

import sys

import pytest


def run(*words, capsys=None):
    """(exit code, what capsys heard) of `ropext words...`."""
    from ropext.cli.app import main

    code = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ropext", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, capsys.readouterr() if capsys else None
