"""The report of a running server's answers: Markdown, pictures, one HTML file."""

import json
from dataclasses import replace
from importlib.util import find_spec

from ropext.ports.tables import port_lines, port_tables
from ropext.report import html
from ropext.report.evaluation import Pictures, heat_pictures, write_pictures
from ropext.results.measurement import Measurement


def write_port_report(run: Measurement) -> None:
    """Write report.md, report.html and plots/*.png of a finished run into its folder."""
    results = run.results
    assert run.path is not None  # it was kept
    told = results["endpoint"]
    html.write(
        run.path,
        f"ropext eval --endpoint: {told['model']}",
        f"questions in words to {told['url']}, answered greedily; {told['counted_by']} counts",
        port_lines(results),
        results["warnings"],
        port_tables(run),
        write_pictures(run.path, _pictures(run)),
        json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )


def _pictures(run: Measurement) -> Pictures:
    """Depth by length, of the questions that were read; none where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return {}
    models = {
        label: replace(model, items=tuple(item for item in model.items if item.is_read))
        for label, model in run.models.items()
    }
    return heat_pictures(replace(run, models=models))
