"""Write the report of a running server's answers: Markdown, pictures, one HTML file."""

import json
from dataclasses import replace
from importlib.util import find_spec

from ropext.endpoint.tables import endpoint_of, port_lines, port_tables
from ropext.results.measurement import Measurement
from ropext.results.report import html
from ropext.results.report.evaluation import Drawn, heat_pictures, write_pictures
from ropext.results.report.html import Page


def write_port_report(run: Measurement) -> None:
    """Write report.md, report.html and plots/*.png of a server's evaluation into its folder."""
    assert run.path is not None  # it was kept
    endpoint = endpoint_of(run)
    asked = f"questions in words to {endpoint['url']}, answered greedily"
    page = Page(
        title=f"ropext eval --endpoint: {endpoint['model']}",
        subtitle=f"{asked}; {endpoint['counted_by']} counts",
        verdicts=port_lines(run),
        warnings=run.facts.warnings,
        tables=port_tables(run),
        details=json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )
    html.write_page(run.path, page, write_pictures(run.path, _depth_pictures(run)))


def _depth_pictures(run: Measurement) -> Drawn:
    """Return pictures of depth by length over the questions that the server read; none if
    matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return {}
    models = {
        label: replace(model, items=tuple(item for item in model.items if item.is_read))
        for label, model in run.models.items()
    }
    return heat_pictures([replace(run, models=models)])
