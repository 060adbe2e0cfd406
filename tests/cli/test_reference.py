"""docs/cli.md equals the script's output for the present commands."""

import importlib.util
import re
from pathlib import Path

from ropext.cli.app import COMMANDS
from scripts import make_models

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location(
        "make_cli_reference", ROOT / "scripts/make_cli_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_reference_is_up_to_date():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    assert text == generator().render(), "run: python scripts/make_cli_reference.py docs/cli.md"


def test_the_page_of_models_has_the_plans_as_ropext_prints_them():
    text = (ROOT / "docs/models.md").read_text("utf-8")
    assert text == make_models.page(), "run: python scripts/make_models.py"
    assert text.count("```sh") == 10


def test_the_reference_has_every_option_that_help_shows():
    import typer

    from ropext.cli.app import build

    text = generator().render()
    for name, command in typer.main.get_command(build()).commands.items():
        section = text.partition(f"\n## ropext {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for parameter in command.params:
            for word in (*parameter.opts, *parameter.secondary_opts):
                if word.startswith("--") and not word.startswith("--help"):
                    # A whole word: --eval is not there because --eval-documents is.
                    assert re.search(rf"{word}(?![\w-])", section), (name, word)
    assert len(COMMANDS) == text.count("\n## ropext ")
