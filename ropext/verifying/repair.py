"""Write the spellings of a config again."""

from pathlib import Path

from ropext import families
from ropext.base.errors import InputError, RopextError, UsageError
from ropext.base.jsontext import Json, JsonObject, dump
from ropext.files.checkpoint import open_snapshot, provenance
from ropext.scaling.rope import Edit


def repair(
    directory: str | Path, trust: str | None = None
) -> tuple[dict[str, Json], tuple[Edit, ...]]:
    """Return config.json as `verify --fix` repairs it, with every spelling written again, and the
    edits: from the record if there is one, else from the reading of transformers 5.

    `trust` names the right one of two spellings that disagree.
    """
    snapshot = open_snapshot(str(directory))
    known = provenance.read_record(snapshot.directory)
    if known is None:
        fixed = families.respell(families.with_spelling_in_force(snapshot.config, trust))
    elif trust is not None:
        raise UsageError(
            f"--trust {trust}: {directory} has a ropext.json, which decides; use --fix without"
            " --trust"
        )
    else:
        planned = [dict(site.params) for site in known.sites if site.scaled]
        try:
            fixed = families.respell(snapshot.config, planned, known.target)
        except RopextError:
            raise
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{snapshot.path(provenance.NAME)} is damaged: ropext does not write such a rope "
                "dict; copy the file again from the source of the checkpoint"
            ) from None
    return fixed, tuple(families.diff(snapshot.config, fixed))


def write_config(directory: str | Path, config: JsonObject) -> None:
    """Write the config.json that the check repaired (`verify --fix`) in one step, so that a reader
    sees the old or the new one whole."""
    provenance.replace_listed(Path(directory), "config.json", dump(config))
