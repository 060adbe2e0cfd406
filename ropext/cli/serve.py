"""Define `ropext serve MODEL`."""

from contextlib import closing
from typing import Annotated

import typer

from ropext.base.errors import UsageError
from ropext.cli import options
from ropext.cli.output import Out
from ropext.options.evaluate import DocumentOptions, SelfExtend
from ropext.options.extend import KNOBS, ServedExtension
from ropext.options.fields import Panel, flag
from ropext.scaling.self_extend import NAME

REACH = ("factor", "target", "method", "context", "attention_factor", "temperature")
OF_METHODS = tuple(name for name in KNOBS if name != "short_pair_factors")
LOADING = ("dtype", "device", "device_map", "attn_implementation")

LISTENING = options.Heading(Panel.LISTENING, basic=True)

Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="a LoRA (peft) on top of the model",
        rich_help_panel=options.Heading(Panel.LOADING, basic=True),
    ),
]
Host = Annotated[
    str, typer.Option("--host", help="address to listen on", rich_help_panel=LISTENING)
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests, instead of MODEL; repeat it for several names",
        rich_help_panel=LISTENING,
    ),
]
PortNumber = Annotated[
    int,
    typer.Option(
        "--port", min=0, max=65535, help="port; 0 = a free one", rich_help_panel=LISTENING
    ),
]


def command(
    out: Out,
    model: options.ModelArg,
    given: Annotated[options.Given, options.OptionsOf(ServedExtension, only=REACH + OF_METHODS)],
    folding: Annotated[options.Given, options.OptionsOf(SelfExtend)],
    reading: Annotated[options.Given, options.OptionsOf(DocumentOptions, only=LOADING)],
    port: PortNumber = 8000,
    host: Host = "127.0.0.1",
    adapter: Adapter = None,
    served_model_name: ServedNames = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Serve a model in memory through an OpenAI-compatible API. It can use any method."""
    from ropext.base.inputs import read_text
    from ropext.endpoint.server import KEY
    from ropext.models.dequantising import dequantised_directory
    from ropext.options.extend import parse_extend
    from ropext.serving.stock import check_transformers_parts

    wish = None
    if given:
        if "method" not in given:
            raise UsageError(
                "give the method to extend with in memory: --method self-extend, or yarn"
            )
        wish = parse_extend(given, read_text)
    fold = None
    if folding:
        fold = SelfExtend(**folding).fold
        if given.get("method") != NAME:
            raise UsageError(f"{flag(next(iter(folding)))} belongs to --method {NAME}")
    names = _served_names(served_model_name or [])
    loading = DocumentOptions(**reading)
    check_transformers_parts()
    from ropext.serving import app, served

    with (
        closing(app.reserve_address(host, port)) as taken,
        dequantised_directory(model, out.say) as directory,
    ):
        asked = served.ServeOptions(
            directory, model, wish, adapter, revision, trust_remote_code, fold, names
        )
        ready = served.load_served_model(asked, loading, out.say)
        is_local = app.is_local_address(host)
        answering = app.ModelServer(ready, out.say, only_local=is_local)
        answering.worker.check()
        if not is_local:
            warning = f"warning: [open-port] other machines can reach {host} and use this model"
            if not app.requires_key():
                warning += f", and no key is set ({KEY})"
            out.say(warning)
        taken.listen()
        shown_host = f"[{host}]" if ":" in host else host  # IPv6
        address = f"http://{shown_host}:{taken.getsockname()[1]}"
        shown_model = f"{model} as {', '.join(names)}" if names else model
        limit = ready.limit
        out.result(
            f"{address}/v1 serves {shown_model}, up to {limit:,} tokens (Ctrl-C stops it)\n"
            f"{address}/ is a page to talk to it",
            {
                "url": f"{address}/v1",
                "page": f"{address}/",
                "model": model,
                "names": ready.names,
                "max_model_len": limit,
            },
        )
        app.run_server(answering, taken)
    out.say("the server has stopped")


def _served_names(given: list[str]) -> tuple[str, ...]:
    """Read --served-model-name from the command line, each name once. Raise UsageError if a client
    could not send one."""
    if not "".join(given).isprintable():
        raise UsageError("--served-model-name takes a name of printable characters")
    return tuple(dict.fromkeys(given))
