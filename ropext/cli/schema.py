"""`ropext schema`."""

from ropext.cli import options
from ropext.cli.output import Out, as_json


def command(json_too: options.Json = False, quiet: options.Quiet = False) -> None:
    """Print the JSON schema of a recipe. Editors complete and check recipes with it."""
    from ropext.options import sections

    schema = sections.schema()
    Out(json_too, quiet).result(as_json(schema), schema)
