"""Define `ropext schema`."""

from ropext.cli.output import Out, as_json


def command(out: Out) -> None:
    """Print the JSON schema of a recipe. Editors complete and check recipes with it."""
    from ropext.pipeline.recipe import recipe_schema

    schema = recipe_schema()
    out.result(as_json(schema), schema)
