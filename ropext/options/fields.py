"""Define an option: a field that is a flag of a command and a key of a recipe."""

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticKnownError

from ropext.base.errors import UsageError, class_name, did_you_mean
from ropext.base.inputs import TRUSTED_KERNEL
from ropext.base.jsontext import untagged_float
from ropext.base.lengths import parse_length, parse_lengths

# Positions are 32-bit integers in most engines.
LONGEST_TARGET = 2**31 - 1
# Bound of a count that costs nothing by itself; products of two still fit into 64 bits.
LARGEST = 10**9
LARGEST_SEED = 2**63 - 1  # what every generator of random numbers takes

EXTEND = "extend"
FIT = "fit"
FINETUNE = "finetune"
EVALUATE = "evaluate"  # sections
YAML = "yaml"  # context of a validation in which every value is still a text

_SPELLED = {"for_loaders": "for", "evaluate": "eval"}


def recipe_key(name: str) -> str:
    """Return the key of an option in a recipe."""
    return _SPELLED.get(name, name)


def flag(name: str) -> str:
    """Return the flag of an option: `--beta-fast` for `beta_fast`."""
    return "--" + recipe_key(name).replace("_", "-")


# What an option decides. The key of finished work holds only the options that decide it.
NUMBERS = "numbers"  # the default, if the field's type names none
FILES = "files"  # files alone, written or on the way, and no number
CONTENT = "content"  # numbers, by the content of the file or model that it names
NEUTRAL = "neutral"  # neither
DECISIONS = (NUMBERS, FILES, CONTENT, NEUTRAL)
T = TypeVar("T")
Files = Annotated[T, FILES]
Content = Annotated[T, CONTENT]
Neutral = Annotated[T, NEUTRAL]


class Trait(Enum):
    """Another property of an option, which the type of its field marks."""

    STORED = "how the documents that a user names are stored"
    SERVED = "an evaluation of a running server heeds it too"


Stored = Annotated[T, Trait.STORED]
Served = Annotated[T, Trait.SERVED]


class Panel(StrEnum):
    """The groups of a command's help, in their order."""

    LISTENING = "Where it listens"
    HOW_FAR = "How far"
    METHOD = "Which method"
    KNOBS = "Knobs of a method"
    DATA = "Data"
    TRAINING = "Training"
    COMPARED = "What it is compared with"
    PORT = "A running server"
    FOLLOWS = "What follows"
    OUTPUT = "Output"
    LOADING = "Loading"


class Role(Enum):
    """The kind of thing that the value of an option names, beyond its type."""

    TOKENS = "a count of tokens, which may be written as 4k or 1m"
    DOCUMENTS = "documents that are read: a file, a folder, or a datasets id"
    METHOD = "a method, by its name, or from Python a function"
    TASKS = "retrieval tasks: names, files of questions, or from Python functions"
    MODEL = "a model that is read: a directory, a file, or a hub id"
    PATH = "a local file or folder that is read"
    OUTPUT = "a local folder that is written"


READ_ROLES = (Role.DOCUMENTS, Role.MODEL, Role.PATH, Role.TASKS)
LOCAL_ROLES = (Role.PATH, Role.OUTPUT)
PLACE_ROLES = (*READ_ROLES, Role.OUTPUT)


def wanted(
    default: Any,
    help_text: str,
    metavar: str | None = None,
    *,
    panel: Panel = Panel.OUTPUT,
    basic: bool = False,
) -> Any:
    """Declare one option: its default, help, placeholder for the value (metavar) and group in the
    help. If it is `basic`, `--help` shows it, else only `--help-all`."""
    extra: dict[str, JsonValue] = {"metavar": metavar, "panel": panel, "basic": basic}
    return Field(default, description=help_text, json_schema_extra=extra)


# Readers: each converts a value from a command line, a recipe or Python for the field's type.
# A reader returns an unknown value unchanged, and then the type refuses it.


def _yaml_number(value: object) -> object:
    """Read a number of an option as YAML writes it: 4, 1_000, 2e3."""
    if not isinstance(value, str) or len(value) > 400 or not _NUMBER.fullmatch(value):
        return value
    digits = value.replace("_", "")
    if digits.lstrip("+-").isdecimal():
        return int(digits)  # not by way of float, which holds no more than sixteen digits
    return float(digits)


_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d{1,3})?")


def _word_list(value: object) -> object:
    """Read an option that takes a list, or one text with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        return value
    parts = [part.strip() if isinstance(part, str) else part for part in value]
    return tuple(part for part in parts if part != "")


def _number_list(value: object, info: ValidationInfo) -> object:
    """Read an option that takes a list of numbers, one number, or one text with commas."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    words = _word_list(value)
    if not isinstance(value, str) or not isinstance(words, tuple):
        return words
    name = flag(str(info.field_name))
    if not words:
        raise UsageError(f"{name} is empty; write e.g. 2,4,8, or leave it out")
    try:
        return tuple(map(float, words))
    except ValueError:
        raise UsageError(
            f"{name} {value[:60]!r} is not a list of numbers; write e.g. 2,4,8"
        ) from None


def _length_list(value: object) -> object:
    """Read an option that takes an ascending list of lengths, such as 4k,8k."""
    parts = _word_list(value)
    if not isinstance(parts, tuple):
        return value
    return parse_lengths(",".join(str(_yaml_number(part)) for part in parts))


def _length_option(value: object, info: ValidationInfo) -> object:
    """Read an option that takes a length, such as 4096 or 4k."""
    if info.context == YAML:
        value = _yaml_number(value)
    if isinstance(value, str):
        return parse_length(value, flag(str(info.field_name)))
    return value


def _whole_number(value: object, info: ValidationInfo) -> object:
    """Read an option that takes a whole number; JSON of other programs may write it as 8192.0."""
    if info.context == YAML:
        value = _yaml_number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _place_option(value: object) -> object:
    """Read an option that takes a place, which Python may give as a Path."""
    if isinstance(value, Path):
        return str(value)
    return value


def _method_option(value: object) -> object:
    """Read the option --method, which Python may give as a function."""
    if not callable(value) or isinstance(value, type):
        return value
    from ropext.scaling import given  # late: few bring a function of their own

    return given.name_of(value)


def _method_list(value: object) -> object:
    """Read an option that takes methods, each of which Python may give as a function."""
    if isinstance(value, list | tuple):
        names = list(map(_method_option, value))
        for name in names:
            if names.count(name) > 1 and name not in value:
                raise UsageError(f"two functions are called {name}; give each its own name")
        return names
    if callable(value):
        return [_method_option(value)]
    return value


class Texts(str):
    """Documents that Python holds. The string itself is the name that messages give them."""

    rows: Iterable[str | Mapping[str, Any]]


# Types of documents in a Python call: a place, texts, one row, or the rows of a table (a
# datasets.Dataset, a pandas DataFrame).
TextsOrPlace = str | PathLike[str] | Iterable[str | Mapping[str, Any]]


def documents_as_place(given: TextsOrPlace) -> str:
    """Check the value that Python gives to an option such as --data, and return it as one string: a
    place, or a `Texts` that holds the documents."""
    if isinstance(given, str):
        return given
    if isinstance(given, PathLike):
        return str(given)
    if not _holds_documents(given):
        raise UsageError(f"documents are a place or their texts, not {class_name(given)}")
    texts = Texts("texts")
    texts.rows = _document_rows(given)
    return texts


def _holds_documents(given: object) -> bool:
    """Return whether the value of an option such as --data holds documents itself."""
    return isinstance(given, Iterable) or hasattr(given, "to_pylist")


def _document_rows(given: Any) -> Iterable[str | Mapping[str, Any]]:
    """Convert the Python value of an option such as --data to documents. These are the rows of
    another library's table, one mapping as one row, or the iterable itself."""
    rows: Iterable[str | Mapping[str, Any]] = given
    if isinstance(given, Mapping):
        if any(hasattr(part, "column_names") for part in given.values()):
            raise UsageError(
                f"documents are one split of {class_name(given)}, which has "
                f'{", ".join(map(str, given))}: give one of them, as data["{next(iter(given))}"]'
            )
        rows = [given]
    elif hasattr(given, "to_dicts"):  # polars
        rows = given.to_dicts()
    elif hasattr(given, "to_pylist"):  # pyarrow
        rows = given.to_pylist()
    elif hasattr(given, "iterrows"):  # pandas
        rows = given.to_dict("records")
    return rows


def _documents_option(value: Any, check: Callable[[object], str], info: ValidationInfo) -> str:
    """Read an option that takes documents: their place, or outside of recipes the documents
    themselves."""
    if info.context == YAML:
        return check(value)
    is_text = isinstance(value, str | bytes) and not isinstance(value, Texts)
    if is_text or not (isinstance(value, PathLike) or _holds_documents(value)):
        return check(value)
    return documents_as_place(value)


def list_schema(item: str, or_item: str | None = None) -> WithJsonSchema:
    """Return the JSON schema of an option that takes a list or one text with commas."""
    if or_item is None:
        return WithJsonSchema({"type": ["array", item, "string"], "items": {"type": item}})
    kinds = [item, or_item]
    return WithJsonSchema({"type": ["array", *kinds, "string"], "items": {"type": kinds}})


Whole = Annotated[int, BeforeValidator(_whole_number)]
Count = Annotated[Whole, Field(ge=1, le=LARGEST)]
CountOrNone = Annotated[Whole, Field(ge=0, le=LARGEST)]
Seed = Annotated[Whole, Field(ge=0, le=LARGEST_SEED)]
Length = Annotated[
    Whole,
    BeforeValidator(_length_option),
    WithJsonSchema({"type": ["integer", "string"]}),  # 4096 or 4k
    Role.TOKENS,
]
Tokens = Annotated[Length, Field(ge=1, le=LONGEST_TARGET)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Place = Annotated[str, BeforeValidator(_place_option)]
# Kinds of place, each with its role.
DocumentsPlace = Annotated[Place, Role.DOCUMENTS]
ModelPlace = Annotated[Place, Role.MODEL]
LocalPath = Annotated[Place, Role.PATH]
OutputPlace = Annotated[Place, Role.OUTPUT]
Documents = Annotated[str, WrapValidator(_documents_option), Role.DOCUMENTS]
Words = Annotated[tuple[str, ...], BeforeValidator(_word_list), list_schema("string")]
MethodName = Annotated[str, BeforeValidator(_method_option), Role.METHOD]
MethodNames = Annotated[Words, BeforeValidator(_method_list), Role.METHOD]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_number_list), list_schema("number")]
# Divisors of pairs: infinity, also in transformers' spelling, is a pair that does not rotate.
Divisor = Annotated[float, AllowInfNan(), BeforeValidator(untagged_float)]
Divisors = Annotated[tuple[Divisor, ...], BeforeValidator(_number_list), list_schema("number")]
Lengths = Annotated[
    tuple[int, ...], BeforeValidator(_length_list), list_schema("integer", "string"), Role.TOKENS
]
Link = Literal["copy", "hard", "symlink"]
# Common names of the types of weights, and torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DtypeName = AfterValidator(lambda name: DTYPES.get(name, name))
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"], DtypeName
]
LargestDocument = Annotated[Whole, Field(ge=1, le=2**20)]
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?|mps")
DEVICES = "auto, cpu, cuda, cuda:N, mps"


def _device_name(name: str) -> str:
    """Check the option --device of a model that is read, not trained."""
    if not DEVICE_NAME.fullmatch(name):
        raise PydanticKnownError("literal_error", {"expected": DEVICES})
    return name


Device = Annotated[str, AfterValidator(_device_name)]
LARGEST_DOCUMENT = wanted(
    64,
    "largest document that is read, in MiB; a file may unpack to 1,024 times as much",
    "MIB",
    panel=Panel.DATA,
)

# Examples for help texts; transformers has the full list.
ATTENTIONS = "eager, sdpa, flash_attention_2 ..."


def _trusted_attention(name: str) -> str:
    """Check the option --attn-implementation: refuse a kernel of a stranger on the hub."""
    if "/" in name and not TRUSTED_KERNEL.match(name):
        raise UsageError(
            f"--attn-implementation {name[:80]!r} names a kernel on the hub, which transformers "
            "would fetch and run; give a built-in one, such as sdpa"
        )
    return name


Attention = Annotated[str, AfterValidator(_trusted_attention)]


class Options(BaseModel):
    """Options that have been checked; None means that the user did not give the option."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,
        alias_generator=recipe_key,
        validate_by_name=True,
    )
    # A part of the key of finished work. Raise it if the same key would give another result: if a
    # default changes (no key holds defaults), or if ropext uses a value differently.
    key_schema: ClassVar[int] = 1

    if not TYPE_CHECKING:

        def __init__(self, **values: object) -> None:
            """Check the given options; raise UsageError with one sentence about the first
            mistake."""
            given = dict[str, object]()
            for name, value in values.items():
                if hasattr(value, "dtype") and hasattr(value, "tolist"):
                    value = value.tolist()  # numbers and arrays of numpy and pandas
                if value is not None:
                    given[name] = value
            try:
                super().__init__(**given)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                if first["type"] == "value_error":
                    raise first["ctx"]["error"] from None
                name = str(first["loc"][0])
                if first["type"] == "extra_forbidden":
                    names = type(self).model_fields
                    hint = did_you_mean(name, names, f"known are {', '.join(names)}")
                    raise UsageError(f"unknown option {name!r}; {hint}") from None
                raise UsageError(f"{flag(name)} {wrong_value_message(first)}") from None

        # With this, pydantic checks nested options as a part, and errors name their place in the
        # whole.
        __init__.__pydantic_base_init__ = True

    def deciding(self, *decisions: str, **dumping: Any) -> dict[str, Any]:
        """Return the options with these decisions that are not the default, as `model_dump` writes
        them. So a new option leaves the keys of finished work unchanged. If a default changes,
        raise the `key_schema`."""
        names = set[str]()
        for name, info in type(self).model_fields.items():
            if option_decision(info) in decisions:
                names.add(name)
        return self.model_dump(include=names, exclude_defaults=True, **dumping)

    @classmethod
    def unstored(cls) -> dict[str, JsonValue]:
        """Return the options on how documents are stored, each at its default. ropext uses these to
        read documents that it wrote itself."""
        values = dict[str, JsonValue]()
        for name, info in cls.model_fields.items():
            if Trait.STORED in info.metadata:
                values[name] = info.default
        return values

    def changed(self, **values: Any) -> Self:
        """Return the same options with other values, checked again. An option that the user did not
        give stays so: its default may be empty, and a user may not give an empty value."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(given | values))


def option_decision(info: FieldInfo) -> str:
    """Return the decision of an option, one of DECISIONS."""
    for mark in info.metadata:
        if isinstance(mark, str) and mark in DECISIONS:
            return mark
    return NUMBERS


_NAMED = {"int": "a whole number", "float": "a number", "bool": "true or false", "tuple": "a list"}
_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "finite and above",
    "less_than_equal": "at most",
    "less_than": "below",
    "finite_number": "finite",
}


def wrong_value_message(error: ErrorDetails) -> str:
    """Return the message about a wrong value of an option: the expected and the given one."""
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if kind == "literal_error":
        choices = context["expected"].replace(" or ", ", ").replace("'", "")
        return f"is one of {choices}, was {repr(value)[:60]}"
    if kind in _BOUNDS:
        expected = _BOUNDS[kind]
        if context:  # the bound
            expected += f" {_short_value(next(iter(context.values())))}"
        return f"must be {expected}, was {_short_value(value)}"
    expected = _NAMED.get(kind.partition("_")[0], "a text")
    return f"must be {expected}, was {_short_value(repr(value))}"


def shown_default(value: object) -> str:
    """Write the default of an option as its help shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return " [yes]" if value else " [no]"
    if isinstance(value, float):
        return f" [{value:g}]"
    return f" [{value}]"


def _short_value(value: object) -> str:
    """Return a short form of a value or bound of an option for an error."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)[:60]


# Suffixes of document files. Tables are not documents: if they were read as one long text, their
# syntax would be measured.
DOCUMENTS = (".txt", ".md", ".jsonl", ".parquet")
# A JSON file is read only if the user names it: in a folder it may describe the other files.
JSON = ".json"
TABLES = (JSON, ".csv", ".tsv")


def option_role(info: FieldInfo) -> Role | None:
    """Return the role of an option's value, or None if it has none. Its type may hold the role
    inside of `X | None`, and inside of a list."""
    marks = [*info.metadata]
    types: list[Any] = [info.annotation]
    for declared in types:  # grows
        if get_origin(declared) is Annotated:
            marks += declared.__metadata__
        types += get_args(declared)
    return next((mark for mark in marks if isinstance(mark, Role)), None)


def places_read(values: Mapping[str, Any], kind: type[Options]) -> dict[str, list[str]]:
    """Return the places that the options of this class read, by flag, for the guard."""
    named = dict[str, list[str]]()
    for name, value in values.items():
        info = kind.model_fields.get(name)
        if info is not None and option_role(info) in READ_ROLES:
            named[flag(name)] = places_in_option(value)
    return named


def places_in_option(value: object) -> list[str]:
    """Return the places in the value of an option. Texts in memory have none, nor have names of
    tasks."""
    if isinstance(value, Texts):
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, tuple):
        return []
    sources = [getattr(task, "source", None) for task in value]  # of tasks.OwnTask
    return [source for source in sources if isinstance(source, str)]


class ValueKind(NamedTuple):
    """The kind of one value of a field."""

    kind: type  # bool, int, float or str
    is_list: bool  # whether the field takes several
    choices: tuple[str, ...]  # allowed values; empty if any value of its kind is


def value_kind(info: FieldInfo) -> ValueKind:
    """Return the kind of one value of an option."""
    kind = plain_type(info.annotation)
    is_list = get_origin(kind) is tuple
    if is_list:
        kind = plain_type(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ValueKind(str, is_list, get_args(kind))
    return ValueKind(kind, is_list, ())


def plain_type(declared: Any) -> Any:
    """Return the declared type of an option without its None, its bounds and its readers."""
    if get_origin(declared) is Annotated:
        return plain_type(get_args(declared)[0])
    if get_origin(declared) in (Literal, tuple):
        return declared
    for kind in get_args(declared):
        if kind is not NoneType:
            return plain_type(kind)
    return declared
