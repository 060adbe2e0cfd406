"""Find the trained window of a served model. A server's own number is its limit, never this."""

from pathlib import Path

from ropext.base import bundled
from ropext.base.errors import InputError
from ropext.base.jsontext import read_object
from ropext.families.schemes import read_positions
from ropext.files.checkpoint.provenance import record_in
from ropext.files.inspecting import naming_config, open_model


def trained_window(context: int | None, against: str | None) -> tuple[int, str] | None:
    """Return the number of tokens that a served model was trained on, and the source: --context, or
    the original length in the plan, directory or GGUF of --against."""
    if context is not None:
        return context, "--context"
    if against is None:
        return None
    if Path(against).is_file() and bundled.find_gguf(against) is None:
        window = read_object(Path(against)).get("context")
        if type(window) is not int or window < 1:
            raise InputError(f"--against {against} is not a plan; `ropext plan --json` writes one")
        return window, f"the plan {Path(against).name}"
    snapshot = open_model(against)
    if (record := record_in(snapshot)) is not None:
        return record.context, f"the record of {snapshot.name}"
    if (positions := read_positions(snapshot.config)) is not None:
        return positions.context, f"the config of {snapshot.name}"
    with naming_config(snapshot):
        model = snapshot.as_read()
    sites = model.scaled_sites
    window = model.context
    if sites:
        window = sites[0].rope.original_context
    return window, f"the config of {snapshot.name}"
