"""Declare options that several commands share and options made from a class's fields.

Their help is in groups. --help shows the options that nine of ten users need, --help-all every one.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from ropext.base import guard
from ropext.base.errors import NothingKept
from ropext.base.inputs import from_home
from ropext.base.lengths import parse_length
from ropext.base.narration import heard_by
from ropext.cli.output import Out
from ropext.options.fields import Options, Panel, Role, flag, option_role, shown_default, value_kind


class Heading(str):
    """The group of an option in a command's help; typer hands it from the option to the help."""

    basic: bool  # shown by --help, not by --help-all alone

    def __new__(cls, panel: Panel, *, basic: bool) -> Self:
        """Make the heading that --help prints above a group of a command's options."""
        heading = super().__new__(cls, panel)
        heading.basic = basic
        return heading


BASIC_DATA = Heading(Panel.DATA, basic=True)
BASIC_COMPARED = Heading(Panel.COMPARED, basic=True)
BASIC_FOLLOWS = Heading(Panel.FOLLOWS, basic=True)
BASIC_OUTPUT = Heading(Panel.OUTPUT, basic=True)
FURTHER_OUTPUT = Heading(Panel.OUTPUT, basic=False)
FURTHER_LOADING = Heading(Panel.LOADING, basic=False)


ModelArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a local directory, a .gguf file, ollama:NAME[:TAG], or a Hugging Face hub id",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        help="branch, tag or commit of a hub model",
        rich_help_panel=FURTHER_LOADING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="run Python code that comes with the model (off)",
        rich_help_panel=FURTHER_LOADING,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="DATA",
        help="txt, jsonl, parquet, a folder, or a datasets id",
        rich_help_panel=BASIC_DATA,
    ),
]


def output_option(metavar: str, help_text: str, panel: Heading | None = BASIC_OUTPUT) -> Any:
    """Return typer's declaration of a command's `--output`; a `~` in its path is replaced by the
    home directory."""
    return typer.Option(
        "--output",
        "-o",
        parser=from_home,
        metavar=metavar,
        help=help_text,
        rich_help_panel=panel,
    )


Output = Annotated[Path | None, output_option("OUT", "directory to write")]
OutputOrFile = Annotated[Path | None, output_option("OUT", "directory or .gguf file to write")]
BeginAnew = Annotated[
    bool,
    typer.Option(
        "--force",
        help="replace OUT, and what another run left unfinished",
        rich_help_panel=BASIC_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="print the result as one JSON document", rich_help_panel=BASIC_OUTPUT
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="no narration on stderr", rich_help_panel=BASIC_OUTPUT),
]
LogTimes = Annotated[
    bool,
    typer.Option(
        "--log-times",
        help="put the time (UTC) in front of each line on stderr",
        rich_help_panel=FURTHER_OUTPUT,
    ),
]
Format = Annotated[
    Literal["csv", "latex", "markdown"] | None,
    typer.Option(
        "--format",
        help="print the main table in this format, and its notes on stderr",
        rich_help_panel=BASIC_OUTPUT,
    ),
]


def check_plot(plot: Path | None, read: guard.Named) -> None:
    """Raise if the command line of `ropext plan` or `inspect` has a --plot whose file would
    replace, enclose or be inside an input, or replace a file that is no picture."""
    if plot is not None:
        guard.check(read, {"--plot": plot})
        guard.check_file(plot, "--plot", guard.PICTURE)


Command = Callable[..., None]
Given = dict[str, Any]  # options that were given, by the names of their fields


def option_parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    """Return the parameter by which typer reads one field from the command line; the field's class
    checks anything that a command line cannot."""
    value = value_kind(info)
    kind: Any = value.kind
    if value.is_list:
        kind = str
    elif value.choices:
        kind = Literal[value.choices]
    names = [flag(name)]
    if name == "method":
        names.append("-m")
    default = None
    if kind is bool and info.default is False:  # a switch
        default = False
    elif kind is bool:
        kind = bool | None
        names[0] += f"/--no-{names[0].removeprefix('--')}"
    else:
        kind = kind | None
    help_text = info.description or ""
    if "[" not in help_text and type(info.default) in (str, int, float):
        help_text += shown_default(info.default)  # unless the help says so already
    extra = cast(dict[str, Any], info.json_schema_extra)
    is_length = option_role(info) is Role.TOKENS and not value.is_list
    declared = typer.Option(
        *names,
        metavar=extra["metavar"] or ("TOKENS" if is_length else None),
        help=help_text,
        parser=_length_parser(names[0]) if is_length else None,
        rich_help_panel=Heading(extra["panel"], basic=extra["basic"]),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, declared],
    )


def _length_parser(flag: str) -> Callable[[str], int]:
    """Return the function by which typer parses the length that a user typed on the command line.
    Its errors name this flag."""

    def parse(text: str) -> int:
        """Read a length such as 32k from the command line, for typer. An error names the flag."""
        return parse_length(text, flag)

    return parse


class OptionsOf:
    """Annotates a parameter of a command that takes the options of some classes. The values that a
    user gave arrive there as one dict."""

    def __init__(self, *kinds: type[Options], only: Sequence[str] = ()) -> None:
        """Keep the classes whose options typer reads for a command, and with `only` the names of
        the fields it takes."""
        self.kinds = kinds
        self.only = only

    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters, declared for typer, by which a command reads these options from
        its command line."""
        fields = dict[str, FieldInfo]()
        for kind in self.kinds:
            fields |= kind.model_fields
        fields.pop("short_pair_factors", None)  # they come in the file of the pair factors
        return [option_parameter(name, fields[name]) for name in self.only or fields]


def command_of(name: str) -> Command:
    """Import the module of a command; return the command as typer shall see it.

    It takes its options, --json and --quiet, of which its parameter `out` is made, and --log-times,
    which `main` reads before anything is printed.
    """
    command: Command = import_module(f"ropext.cli.{name}").command
    taken = dict[str, list[inspect.Parameter]]()
    shown = list[inspect.Parameter]()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        for note in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(note, OptionsOf):
                taken[parameter.name] = note.parameters()
        if parameter.name != "out":
            shown += taken.get(parameter.name, [parameter])

    def with_options(
        as_json: Json = False, quiet: Quiet = False, log_times: LogTimes = False, **values: object
    ) -> None:
        """Run the command with the options of its command line."""
        for into, declared in taken.items():
            given = dict[str, object]()
            for parameter in declared:
                value = values.pop(parameter.name)
                if value is not parameter.default:
                    given[parameter.name] = value
            values[into] = given
        out = Out(as_json, quiet)
        try:
            with heard_by(out.say):
                command(out=out, **values)
        except KeyboardInterrupt as interrupt:  # typer would keep only its number
            raise NothingKept(*interrupt.args) from None

    shown += list(inspect.signature(with_options, eval_str=True).parameters.values())[:-1]
    shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    with_options.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    with_options.__annotations__ = {own.name: own.annotation for own in shown}
    with_options.__doc__ = command.__doc__
    return with_options


class Grouped(TyperCommand):
    """A command whose help is in groups."""

    everything: ClassVar[bool] = False

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of a command: arguments, then the panels of options in their order."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for panel in Panel:
            sections[panel] = []
        left_out = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            is_help = "--help" in parameter.opts
            if is_help and record is not None:
                # the other name, --help-all, is listed under "More"
                record = ("-h, --help", record[1])
            heading = getattr(parameter, "rich_help_panel", None)
            if not isinstance(heading, Heading):
                heading = FURTHER_OUTPUT
            if not (is_argument or is_help or heading.basic or self.everything):
                left_out += 1
                continue
            if record is not None:
                title = "Arguments" if is_argument else heading
                sections[title].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if left_out:
            with formatter.section("More"):
                formatter.write_dl([("--help-all", f"show {left_out} more options")])
