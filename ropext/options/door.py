"""Show the public functions with every option in signature and help; report a mistake in a call as
one sentence."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature
from os import PathLike
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from pydantic.fields import FieldInfo

from ropext.base.errors import RopextError, UsageError, did_you_mean
from ropext.options.extend import Reach, Writing
from ropext.options.fields import (
    PLACE_ROLES,
    Options,
    Role,
    TextsOrPlace,
    option_role,
    recipe_key,
    value_kind,
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Argument:
    """An argument of public functions that is not a field of options."""

    line: str
    wish: str = ""  # expected kind, for the error; empty if the function itself checks the value
    fits: Callable[[object], bool] = lambda value: True


def _is_text(value: object) -> bool:
    """Return whether the value of a public function's argument is a text."""
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    """Return whether the value of a public function's argument is a path."""
    return isinstance(value, str | PathLike)


def _is_flag(value: object) -> bool:
    """Return whether the value of a public function's argument is True or False."""
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Return whether the value of a public function's argument is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    """Return whether the value of a public function's argument is a list of texts."""
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _are_paths(value: object) -> bool:
    """Return whether the value of a public function's argument is a list of paths."""
    return isinstance(value, list | tuple) and all(map(_is_path, value))


def _are_labels(value: object) -> bool:
    """Return whether the argument `labels` of `compare` maps names to names."""
    return isinstance(value, Mapping) and all(map(_is_text, list(value) + list(value.values())))


def _is_plain_server(value: object) -> bool:
    """Return whether the argument `beside` of `verify` is a PlainServer."""
    return hasattr(value, "answers")


def _is_tokenizer(value: object) -> bool:
    """Return whether the argument `tokenizer` is a tokenizer of transformers."""
    return callable(value) and hasattr(value, "get_vocab")


def _text_argument(line: str) -> Argument:
    """Return an argument of public functions that takes a text, with its line of help."""
    return Argument(line, "a text", _is_text)


def _flag_argument(line: str) -> Argument:
    """Return an argument of public functions that takes True or False, with its line of help."""
    return Argument(line, "true or false", _is_flag)


def _function_argument(line: str) -> Argument:
    """Return an argument of public functions that takes a function, with its line of help."""
    return Argument(line, "a function", callable)


def _list_argument(line: str) -> Argument:
    """Return an argument of public functions that takes a list of texts, with its line of help."""
    return Argument(line, "a list of texts", _are_texts)


def _path_argument(line: str) -> Argument:
    """Return an argument of public functions that takes a path, with its line of help."""
    return Argument(line, "a path", _is_path)


MAPPED = 'a dict of texts, such as {"yarn-4x": "YaRN"}'

ARGUMENTS = {
    "against": _path_argument("base, or saved plan, that it is held against"),
    "base_model": _text_argument("hub id that the card names as the base"),
    "bars": _flag_argument("show the bars of huggingface_hub"),
    "begin": _text_argument("first stage to do"),
    "beside": Argument(
        "server of the plain model, or a file with its answers", "a PlainServer", _is_plain_server
    ),
    "data": Argument("documents: a place, a list of texts, or the rows of a dataset"),
    "deep": _flag_argument("compare every byte of the weights"),
    "directory": Argument("directory of a checkpoint"),
    "dry_run": _flag_argument("only say what would be done"),
    "endpoint": _text_argument("URL of a running server, which is asked too"),
    "force": _flag_argument("replace what ropext wrote"),
    "gates": Argument('conditions that the report shows, such as "gain@8k < 0"'),
    "keep_previous": _flag_argument("keep the output that is replaced, as OUTPUT.previous"),
    "labels": Argument("own names for models, by the names that they have", MAPPED, _are_labels),
    "license": _text_argument("license that the card names"),
    "losses": _path_argument("parquet file for the loss of every token"),
    "model": Argument(
        "directory, file or hub id of a model; some functions also take a model in memory"
    ),
    "only": _text_argument("the one stage to do"),
    "output": Argument("path for the result"),
    "overrides": _list_argument("recipe keys with other values: key=value"),
    "public": _flag_argument("make the repository a public one"),
    "recipe": Argument("recipe: a file, the name of a bundled one, or a mapping"),
    "record": _flag_argument("write what `deep` compares with into the record"),
    "repository": _text_argument("OWNER/NAME on the hub"),
    "results": Argument("runs of an evaluation, or RUN:VARIANT", "a list of paths", _are_paths),
    "revision": _text_argument("branch, tag or commit of a hub id"),
    "run": _path_argument("folder that a command left"),
    "runs": Argument("runs of an evaluation, RUN:VARIANT, or results of functions"),
    "say": _function_argument("hears each sentence of the narration, e.g. print"),
    "show": _function_argument("hears what is done, of how much, and what it is"),
    "stop": _function_argument("asked after each unit of work whether to end"),
    "tokenizer": Argument(
        "tokenizer of a model in memory",
        "a tokenizer of transformers",
        _is_tokenizer,
    ),
    "tolerance": Argument("how far the server may be off, in nats", "a number", _is_number),
    "trust_remote_code": _flag_argument("run the model's own code"),
}


def public(
    *kinds: type[Options], without: Sequence[str] = (), model: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a public function of ropext that takes the options of these classes as
    `**options`, but not the options in `without`.

    It puts the fields into the signature and the help, and refuses unknown names and unfit
    arguments. `model` is the help of the argument of that name, if it takes another kind than most.
    """

    def with_options(function: Callable[P, R]) -> Callable[P, R]:
        """Give a public function the options in its signature and help."""
        shown = _signature_with_options(function, kinds, without)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Call the public function, if its arguments and options fit its signature."""
            _check_names(function.__name__, shown, kwargs)
            given: dict[str, object] = {}
            for name, value in kwargs.items():
                if value is not None:  # None means "not given"
                    given[name] = value
            _check_arguments(function.__name__, shown, args, given)
            return function(*args, **given)  # type: ignore[arg-type]

        call.__signature__ = shown  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{_help_lines(shown, kinds, model)}\n"
        return call

    return with_options


def option_fields(kinds: Iterable[type[Options]]) -> dict[str, FieldInfo]:
    """Return the fields of all these classes of options."""
    fields = dict[str, FieldInfo]()
    for kind in kinds:
        fields |= kind.model_fields
    return fields


def _signature_with_options(
    function: Callable[..., object], kinds: Sequence[type[Options]], without: Sequence[str]
) -> Signature:
    """Return a public function's signature with each option in the place of `**options`. A function
    as a default becomes None, since its text would be an address."""
    stated = inspect.signature(function)
    parameters = dict[str, Parameter]()
    for name, parameter in stated.parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            continue
        if callable(parameter.default) and parameter.default is not Parameter.empty:
            annotation = parameter.annotation | None
            parameter = parameter.replace(default=None, annotation=annotation)
        parameters[name] = parameter
    for name, info in option_fields(kinds).items():
        if name not in parameters and name not in without:
            kind = Parameter.KEYWORD_ONLY
            annotation = argument_type(info)
            parameters[name] = Parameter(name, kind, default=info.default, annotation=annotation)
    return stated.replace(parameters=list(parameters.values()))


def argument_type(info: FieldInfo) -> object:
    """Return the type that a caller in Python may give for an option of a public function."""
    item, is_list, choices = value_kind(info)
    role = option_role(info)
    kind: object = item
    if choices:
        kind = Literal[choices]
    elif role is Role.TOKENS:
        kind = int | str  # 4k
    elif role is Role.DOCUMENTS:
        kind = TextsOrPlace
    elif role is Role.METHOD:
        kind = str | Callable[..., object]
    elif role in PLACE_ROLES and not is_list:
        kind = str | Path
    if is_list and role in (Role.METHOD, Role.TASKS):
        kind = str | Callable[..., object] | Sequence[str | Callable[..., object]]
    elif is_list:
        kind = str | Sequence[kind]  # type: ignore[valid-type]
        if item is float:
            kind = float | kind
    if info.default is None:
        kind = kind | None  # type: ignore[operator]
    return kind


def _help_lines(shown: Signature, kinds: Sequence[type[Options]], model: str) -> str:
    """Return the section "Arguments:" of a public function's help, with one line for each argument
    and option."""
    fields = option_fields((Reach, Writing, *kinds))
    lines = ["Arguments:"]
    for name in shown.parameters:
        if name == "model" and model:
            line = model
        elif name in ARGUMENTS and name not in option_fields(kinds):
            line = ARGUMENTS[name].line
        else:
            line = help_for_python(str(fields[name].description))
        lines.append(f"    {name}: {line}")
    return "\n".join(lines)


def help_for_python(text: str) -> str:
    """Write the flags in an option's help as Python spells them: `max_docs` for `--max-docs`."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: _argument_name(match[1]), text)


def worded_for_python(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors and narration name the options as Python's arguments,
    not as flags."""
    parameters = inspect.signature(function).parameters

    def sentence_for_python(sentence: str) -> str:
        """Write a sentence of the public function with arguments in place of flags."""
        return message_for_python(sentence, parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call a public function; its narration and errors name the options as arguments, not as
        flags."""
        say = kwargs.get("say")
        if callable(say):
            kwargs["say"] = lambda sentence: say(sentence_for_python(sentence))
        try:
            return function(*args, **kwargs)
        except RopextError as error:
            error.reword(sentence_for_python)
            raise

    return call


# Commands in a message; they keep their flags.
_COMMAND = re.compile(
    r"(`[^`]*`|\bropext (?:compare|demo|eval|extend|finetune|fit|inspect|methods|plan|push|recipes"
    r"|run|serve|verify)\b[^;)]*)"
)
# A flag, and its value if a placeholder, a number or the last word of a clause follows.
_WORD = r"[a-z][\w./-]*"
_VALUE = rf"[A-Z][A-Z_]*\b|\d(?:[\w.,]*\w)?|{_WORD}(?:,{_WORD})*(?=[,;)]|: |:?$| --)"
_FLAG = rf"(--[a-z][a-z-]*|-o)\b(?: ({_VALUE}))?"
_FLAGS = re.compile(rf"(?<![\w-]){_FLAG}(?: {_FLAG})*")


def message_for_python(text: str, parameters: Mapping[str, Parameter]) -> str:
    """Write the flags in a message as arguments of a public function with these parameters."""

    def flags_as_arguments(match: re.Match[str]) -> str:
        """Write the flags in a part of a message as arguments of a public function, with commas
        between them."""
        given = list[str]()
        for flag, value in re.findall(_FLAG, match[0]):
            given.append(_flag_as_argument(flag, value, parameters))
        return ", ".join(given)

    parts = _COMMAND.split(text)  # every second one is a command
    for place in range(0, len(parts), 2):
        parts[place] = _FLAGS.sub(flags_as_arguments, parts[place])
    return "".join(parts)


def _flag_as_argument(flag: str, value: str, parameters: Mapping[str, Parameter]) -> str:
    """Write one flag as an argument of a public function, with its value if it has one; a flag that
    the function does not have stays a flag."""
    name = _argument_name(flag.lstrip("-"))
    if name not in parameters:
        return f"{flag} {value}".rstrip()
    if isinstance(parameters[name].default, bool):
        return f"{name}=True {value}".rstrip()
    if not value:
        return name
    is_literal = value.isupper() or re.fullmatch(r"\d+(\.\d+)?", value)
    return f"{name}={value}" if is_literal else f'{name}="{value}"'


# Arguments whose flags have another name.
_RENAMED = {"fail_if": "gates", "from": "begin", "o": "output"}


def _argument_name(word: str) -> str:
    """Return the name in Python of a flag without its dashes: `for_loaders` for `for`."""
    name = word.replace("-", "_")
    name = _RENAMED.get(name, name)
    for option in ("for_loaders", "evaluate"):
        if recipe_key(option) == name:
            return option
    return name


def _check_names(name: str, shown: Signature, given: Iterable[str]) -> None:
    """Refuse an option that the public function does not have; name the one that may be meant."""
    for word in given:
        if word not in shown.parameters:
            names = list(shown.parameters)
            meant = _argument_name(word)
            hint = f"did you mean {meant}?"
            if meant not in names:
                hint = did_you_mean(word, names, f"known are {', '.join(names)}")
            raise UsageError(f"ropext.{name}: unknown option {word!r}; {hint}")


def _check_arguments(
    name: str, shown: Signature, args: Sequence[object], given: Mapping[str, object]
) -> None:
    """Refuse a call that does not fit the signature of a public function, and an argument of
    another kind than expected."""
    try:
        bound = shown.bind(*args, **given)
    except TypeError as error:
        raise UsageError(f"ropext.{name}: {error}") from None
    for word, value in bound.arguments.items():
        argument = ARGUMENTS.get(word)
        if argument is not None and value is not None and not argument.fits(value):
            given_value = " ".join(repr(value).split())[:60]
            raise UsageError(f"ropext.{name}: {word} must be {argument.wish}, was {given_value}")
