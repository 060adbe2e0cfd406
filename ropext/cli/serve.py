"""`ropext serve MODEL`."""

from contextlib import closing
from typing import Annotated, Any

import typer

from ropext.cli import options
from ropext.cli.output import Out
from ropext.errors import UsageError
from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import KNOBS, Extension

HOW = ("factor", "target", "method", "context", "attention_factor", "temperature")
OF_METHODS = tuple(name for name in KNOBS if name != "short_pair_factors")
LOADING = ("dtype", "device", "device_map", "attn_implementation")

Adapter = Annotated[
    str | None, typer.Option("--adapter", metavar="DIR", help="a LoRA (peft) on top of the model")
]
Host = Annotated[str, typer.Option("--host", help="address to listen on")]
PortNumber = Annotated[int, typer.Option("--port", min=0, max=65535, help="port; 0 = a free one")]


@options.takes("given", Extension, only=(*HOW, *OF_METHODS))
@options.takes("reading", DocumentOptions, only=LOADING)
def command(
    out: Out,
    model: options.ModelArg,
    given: dict[str, Any],
    reading: dict[str, Any],
    adapter: Adapter = None,
    host: Host = "127.0.0.1",
    port: PortNumber = 8000,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Answer OpenAI's API from a model in memory. By any method, Self-Extend too."""
    from ropext.dequantising import directory_of
    from ropext.inputs import read_text
    from ropext.options.extend import parse_extend
    from ropext.ports.server import KEY
    from ropext.serving.stock import check_parts

    if given and "method" not in given:
        raise UsageError("say by which method to extend in memory: --method self-extend, or yarn")
    wish = parse_extend(given, read_text) if given else None
    how = DocumentOptions(**reading)
    check_parts()
    from ropext.serving import app, served

    with closing(app.reserve(host, port)) as taken, directory_of(model, out.say) as directory:
        asked = served.ServeOptions(directory, model, wish, adapter, revision, trust_remote_code)
        ready = served.load(asked, how, out.say)
        local = app.is_local(host)
        if not local:
            out.say(
                f"warning: [open-port] {host} is reached from other machines; whoever reaches it "
                f"can ask this model{'' if app.has_key() else f', and no key is set ({KEY})'}"
            )
        taken.listen()
        bound = taken.getsockname()[1]
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1"
        out.result(
            f"{address} answers as {model}, {ready.limit:,} tokens (Ctrl-C ends it)",
            {"url": address, "model": model, "max_model_len": ready.limit},
        )
        app.run(app.ModelPort(ready, out.say, only_local=local), taken)
    out.say("the port is closed")
