"""Define `ropext demo`."""

from pathlib import Path
from typing import Annotated

import typer

from ropext.cli.options import output_option
from ropext.cli.output import Bar, Out

Output = Annotated[
    Path | None,
    output_option(
        "DIR",
        "directory for everything that the demo writes [ropext-demo; with --full ropext-demo-full]",
        panel=None,
    ),
]
Full = Annotated[
    bool,
    typer.Option(
        "--full", help="also PI, NTK, fitted RoPE frequencies, a longer LoRA and its control"
    ),
]


def command(out: Out, output: Output = None, full: Full = False) -> None:
    """Run all steps on a small bundled model. Extend, verify, fine-tune, evaluate; no network."""
    from ropext.pipeline import demo
    from ropext.results import rundir

    folder = output or Path("ropext-demo-full" if full else "ropext-demo")
    shown = demo.run(folder, full, out.say, Bar(out).show)
    out.result(shown.to_text(), shown)
    rundir.raise_if_gates_failed(shown.gates)
