"""Read a recipe: sections of options, from YAML in which every key has its line.

ropext refuses tags (which name code), anchors and aliases (which multiply), and several documents.
The field decides how a value is read, never YAML: `no` is a text if the field wants a text, and
2e-4 is a number.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import (
    ConfigDict,
    JsonValue,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from ropext import scaling
from ropext.base.errors import InputError, RopextError, UsageError, did_you_mean
from ropext.base.inputs import as_text, is_path, read_bytes, read_text
from ropext.options.evaluate import Evaluate, Measuring
from ropext.options.extend import (
    AUTO,
    KNOBS,
    Choosing,
    Extend,
    Extension,
    Reach,
    Writing,
    with_pair_factors,
)
from ropext.options.fields import (
    DOCUMENTS,
    EVALUATE,
    EXTEND,
    FINETUNE,
    FIT,
    LOCAL_ROLES,
    PLACE_ROLES,
    TABLES,
    YAML,
    Content,
    DocumentsPlace,
    ModelPlace,
    Neutral,
    Options,
    OutputPlace,
    Role,
    Seed,
    Words,
    flag,
    option_role,
    wanted,
    wrong_value_message,
)
from ropext.options.training import Finetune, Fit, FitSettings
from ropext.tasks.own import with_place

PLAN = "plan"
REPORT = "report"
STAGES = (PLAN, EXTEND, FIT, FINETUNE, EVALUATE, REPORT)
CHOSEN = "--method auto"  # the place of a value that a choice set
SIZE_LIMIT = 1 << 16  # bytes; a recipe has a few dozen lines
_NULL = ("", "~", "null")
DEPTH_LIMIT = 5  # the recipe, its sections, a key's list
_DATA = "documents: txt, jsonl, parquet, a folder, or a datasets id"


class ExtendSection(Writing, Choosing, Extension):
    """How far and how, and how it is written."""

    @field_validator("method")
    @classmethod
    def _refuse_function(cls, method: str | None) -> str | None:
        """Refuse a method that is a function: recipes come from strangers, and ropext would import
        it."""
        if method and scaling.is_function(method):
            raise UsageError(
                f"--method {method} is for `ropext extend` without later steps: a recipe names no "
                "code; extend first, then fit, fine-tune or evaluate the result"
            )
        return method

    @model_validator(mode="after")
    def _check_auto(self) -> Self:
        """Refuse the options of `method: auto` in a recipe without it; with it, refuse a missing
        `data` and options that it cannot take."""
        given = [name for name in Choosing.model_fields if getattr(self, name) is not None]
        knobs = [name for name in KNOBS if getattr(self, name) is not None]
        if self.method != AUTO:
            if given:
                raise UsageError(f"{flag(given[0])} goes with --method auto")
        elif self.data is None:
            raise UsageError("--method auto chooses by measuring on documents: give --data TEXTS")
        elif self.no_verify:
            raise UsageError(
                "--method auto verifies the method that it chose; leave --no-verify out"
            )
        elif knobs:
            raise UsageError(f"{flag(knobs[0])} is a knob of one method; --method auto tries all")
        return self


class FitSection(FitSettings):
    """A search for the pair factors, after the extension."""

    data: Content[DocumentsPlace | None] = wanted(None, _DATA)


class FinetuneSection(Finetune):
    """A short LoRA, after the extension."""

    data: Content[DocumentsPlace] = wanted(..., _DATA)


class EvaluateSection(Measuring):
    """Base, untouched, and every checkpoint of the run, on the same tokens."""

    fail_if: Neutral[Words] = wanted((), 'gates such as "short_tax > 0.02" (exit code 3)')


Loc = tuple[str, ...]  # the path of a section, or of a key in it


@dataclass(frozen=True)
class Entry:
    """A value as it was written, its place, and the folder from which a path counts."""

    value: Any
    where: str
    folder: Path = Path()


@dataclass(frozen=True)
class RecipeSource:
    """The values, text and file that a recipe is made from."""

    name: str  # names the recipe in messages: a file's name, or "the command line"
    entries: Mapping[Loc, Entry] = field(default_factory=dict)
    text: str | None = None  # the file, verbatim
    file: Path | None = None
    choice: Mapping[str, Any] | None = None  # the outcome of `--method auto`

    def where(self, loc: Loc) -> str:
        """Return the line of the recipe, or the word of the command line, that gave a section or
        key."""
        inside = (entry.where for at, entry in self.entries.items() if at[: len(loc)] == loc)
        return next(inside, self.name)

    @contextmanager
    def naming(self, section: str) -> Iterator[None]:
        """Add the section and its place in the recipe to an error that is raised inside."""
        try:
            yield
        except RopextError as error:
            raise type(error)(_section_message(self, section, error)) from None


class Recipe(Options):
    """One run."""

    model_config = ConfigDict(alias_generator=None)

    model: ModelPlace = wanted(..., "a directory, a hub id, or ropext://demo")
    revision: str | None = wanted(None, "branch, tag or commit of a hub model")
    seed: Seed | None = wanted(None, "seed of every section that names none of its own [0]")
    output: OutputPlace | None = wanted(None, "directory to write; -o on the command line wins")
    extend: ExtendSection
    fit: FitSection | None = None
    finetune: FinetuneSection | None = None
    evaluate: EvaluateSection | None = None
    _source: RecipeSource = PrivateAttr()

    @property
    def source(self) -> RecipeSource:
        """Return the values, text and file that the recipe was made from."""
        return self._source

    @property
    def is_auto(self) -> bool:
        """Return whether the recipe has `method: auto`, so that a measurement still has to
        choose."""
        return self.extend.method == AUTO

    @property
    def trains(self) -> bool:
        """Return whether the recipe certainly trains after the extension. With `auto`, only the
        measurement shows whether a fit follows."""
        if self.finetune is not None:
            return True
        return self.fit is not None and not self.is_auto

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages of the recipe's run, in their order."""
        return tuple(name for name in STAGES if getattr(self, name, name) is not None)

    def options(self, section: str, kind: type[Options] | None = None) -> dict[str, Any]:
        """Return the given keys of a recipe's section by option; with `kind`, only the options of
        that class."""
        options = getattr(self, section) or Options()
        names = (kind or type(options)).model_fields
        return {name: getattr(options, name) for name in names if name in options.model_fields_set}

    def extend_options(self) -> Extend:
        """Return the options of the extension, from the recipe's section extend; with `auto`, the
        options that every method gets."""
        given = self.options(EXTEND, Extension)
        if self.is_auto:
            del given["method"]
        data = self.source.entries.get((FINETUNE, "data"))
        if data is not None:
            given["finetune"] = data.value  # some methods suit it better
        return Extend(**given)

    def fit_options(self) -> Fit:
        """Return the options of the fit, from the recipe's section fit; the section extend sets how
        far, from where, and for whom."""
        given: dict[str, JsonValue] = {"link": self.extend.link}
        if self.extend.method:
            given["start"] = self.extend.method
        given |= self.options(EXTEND, Reach)
        return Fit(**given | self.options(FIT, FitSettings))

    def finetune_options(self) -> Finetune:
        """Return the options of the fine-tuning, from the recipe's section finetune."""
        # The run's own checkpoint, in the run's own folder: nobody else edits it.
        return Finetune(**{"link": "hard"} | self.options(FINETUNE, Finetune))

    def evaluate_options(self, unless_given: Mapping[str, Any] = {}) -> Evaluate:
        """Return the options of the evaluation, from the recipe's section evaluate; `unless_given`
        holds values that the recipe overrides."""
        return Evaluate(**dict(unless_given) | self.options(EVALUATE, Measuring))

    def resolved(self) -> dict[str, Any]:
        """Return all keys of the recipe, also the defaults, with places as they were written."""
        out = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for loc, entry in self.source.entries.items():
            is_place = key_role(loc) in PLACE_ROLES and isinstance(entry.value, str)
            if not is_place and key_role(loc) is not Role.TASKS:
                continue
            section = out[loc[0]] if loc[1:] else out
            section[loc[-1]] = entry.value
        for name in (EXTEND, FIT, FINETUNE, EVALUATE):
            if name in out:
                out[name] = {key: value for key, value in out[name].items() if value != []}
        return out

    def chosen(self, choice: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with the chosen method in place of `auto`; a value of None removes its
        key."""
        chosen = dict.fromkeys((f"{EXTEND}.{name}" for name in Choosing.model_fields), None)
        chosen |= choice["recipe"]
        entries = dict(self.source.entries) | {
            tuple(key.split(".")): Entry(value, CHOSEN) for key, value in chosen.items()
        }
        if not choice["fits"]:
            entries = {loc: entry for loc, entry in entries.items() if loc[0] != FIT}
        return recipe_from_source(replace(self.source, entries=entries, choice=choice))

    def check(self) -> None:
        """Refuse a conflict between sections of a recipe, which no section can see alone."""
        if self.fit and self.is_auto and self.fit.data is not None:
            raise UsageError("--method auto fits on the documents of --data; leave fit.data out")
        if self.fit and not self.is_auto and self.fit.data is None:
            raise UsageError(f"{self.source.where((FIT,))}: fit needs data")
        if self.evaluate:
            chosen_by = {"data": self.extend.data} if self.is_auto else {}
            with self.source.naming(EVALUATE):
                self.evaluate_options(chosen_by)


SECTIONS: dict[str, type[Options]] = {
    EXTEND: ExtendSection,
    FIT: FitSection,
    FINETUNE: FinetuneSection,
    EVALUATE: EvaluateSection,
}
_LEVELS = SECTIONS | {"": Recipe}


def options_by_key(section: str) -> dict[str, str]:
    """Return the keys that a recipe of `run` may have in a section, or at its top level if
    `section` is empty, each with the name of its option."""
    kind = _LEVELS.get(section, Options)
    return {info.alias or name: name for name, info in kind.model_fields.items()}


def key_role(loc: Loc) -> Role | None:
    """Return the role of a value in a YAML recipe of `run` by its section and key; None also if no
    option has that key."""
    section = "".join(loc[:-1])
    name = options_by_key(section).get(loc[-1])
    return None if name is None else option_role(_LEVELS[section].model_fields[name])


class _Schema(GenerateJsonSchema):
    """A schema without titles, which would repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: no key of the recipe's schema gets a title."""
        return False


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe, for editors."""

    def plain(node: Any) -> Any:
        """Return a part of the recipe's schema with JSON Schema's names of bounds. Leave out
        defaults of None and the marks that only a command's help needs."""
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        noise = {"metavar", "panel", "basic"} | (
            {"default"} if node.get("default", 0) is None else set()
        )
        named = {"ge": "minimum", "le": "maximum"}  # pydantic's own names, if a field has a reader
        return {named.get(k, k): plain(v) for k, v in node.items() if k not in noise}

    made: dict[str, Any] = plain(Recipe.model_json_schema(schema_generator=_Schema))
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": "ropext recipe"}
    return head | {key: value for key, value in made.items() if key != "title"}


# From a text to entries.


class _Loader(yaml.BaseLoader):
    """PyYAML's loader, in which every value is a text, without the features that a stranger could
    abuse."""

    depth = 0
    name = ""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one node of a recipe; refuse anchors, aliases, tags and deep nesting."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"{self.name}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(
                f"{where}: anchors and aliases (& and *) are not read; repeat the value"
            )
        if getattr(event, "tag", None):
            raise InputError(f"{where}: tags (!{str(event.tag).lstrip('!')[:40]}) are not read")
        self.depth += 1
        if self.depth > DEPTH_LIMIT and isinstance(event, yaml.CollectionStartEvent):
            raise InputError(f"{where}: nested deeper than anything in a recipe")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_recipe(data: bytes | str, name: str, folder: Path = Path()) -> dict[Loc, Entry]:
    """Parse the YAML text of a recipe, whose top level must be a mapping, into entries."""
    try:
        loader = _Loader(data)
        loader.name = name
        top = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        if isinstance(error, yaml.composer.ComposerError):
            raise InputError(f"{name}{at}: a recipe is one document; drop the ---") from None
        raise InputError(f"{name}{at}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: not valid YAML: {first}") from None
    if not isinstance(top, yaml.MappingNode):
        raise InputError(f"{name} is no recipe: it has no keys such as model and extend")
    entries = dict[Loc, Entry]()
    for key, where, node in _yaml_items(top, name):
        is_section = isinstance(node, yaml.MappingNode) and key in SECTIONS
        entries[key,] = Entry({} if is_section else _yaml_value(node, name), where, folder)
        for inner, at, value in _yaml_items(node, name) if is_section else ():
            entries[key, inner] = Entry(_yaml_value(value, name), at, folder)
    return entries


def _yaml_items(node: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each key of a mapping in a recipe with its line and its value."""
    lines = dict[str, int]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{name}, line {line}: a key is a word")
        if key.value in lines:
            first = lines[key.value]
            raise InputError(f"{name}, line {line}: {key.value} is given twice (line {first})")
        lines[key.value] = line
        yield key.value, f"{name}, line {line}", value


def _yaml_value(node: Any, name: str) -> Any:
    """Return a value in a recipe as a text, a list, or keys with their values; None if it was left
    empty."""
    if isinstance(node, yaml.MappingNode):
        return {key: _yaml_value(value, name) for key, _, value in _yaml_items(node, name)}
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(item, name) for item in node.value]
    return None if node.style is None and node.value in _NULL else node.value


def override_key(entries: dict[Loc, Entry], word: str) -> None:
    """Apply one `key=value` of the command line to a recipe; paths count from the working
    directory."""
    dotted, equals, text = word.partition("=")
    if not equals:
        raise UsageError(f"{word!r} is no KEY=VALUE, such as finetune.steps=60")
    section, _, key = dotted.strip().rpartition(".")
    loc = (section, key) if section else (key,)
    value = text.strip()
    if value.startswith("["):
        try:
            value = parse_recipe(f"value: {value}", word)["value",].value
        except InputError as error:
            raise UsageError(str(error)) from None
    for inside in [at for at in entries if at[: len(loc)] == loc]:
        del entries[inside]
    if value not in _NULL or key not in options_by_key(section):
        entries[loc] = Entry(value, word)


# From entries to a recipe.


def read_recipe(
    recipe: str | Path | Mapping[str, Any], words: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Read a recipe from a file, or from nested mappings, and apply `key=value` words. Relative
    paths of a file count from its folder, or from `folder`."""
    if isinstance(recipe, Mapping):
        try:
            text = json.dumps(recipe, indent=1)  # JSON is YAML: one reader checks both
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"a recipe takes only texts, numbers, lists and mappings ({error}); name a method "
                "of yours as module:function"
            ) from None
        source = RecipeSource("the recipe", parse_recipe(text, "the recipe"))
    else:
        path = Path(recipe)
        if path.is_file() and path.stat().st_size > SIZE_LIMIT:
            limit = SIZE_LIMIT // 1024
            raise InputError(f"{path} has more than the {limit} KiB that a recipe may have")
        data = read_bytes(path, SIZE_LIMIT)
        entries = parse_recipe(data, path.name, path.parent if folder is None else folder)
        source = RecipeSource(path.name, entries, as_text(data), path)
    return recipe_from_source(source, words)


def recipe_from_source(source: RecipeSource, words: Sequence[str] = ()) -> Recipe:
    """Return the recipe from its entries, checked as far as possible without the model; an error
    names its line."""
    entries = dict(source.entries)
    for word in words:
        override_key(entries, word)
    source = replace(source, entries=entries)
    try:
        recipe = Recipe.model_validate(
            _section_values(source), strict=False, by_alias=True, by_name=False, context=YAML
        )
    except ValidationError as error:
        raise _recipe_error(source, error) from None
    recipe._source = source
    recipe.check()
    return recipe


def _section_values(source: RecipeSource) -> dict[str, Any]:
    """Return the values of a recipe in their sections, with places as seen from here. A value of
    None was not given."""
    tree = dict[str, Any]()
    for loc, entry in source.entries.items():
        section = tree.setdefault(loc[0], {}) if loc[1:] else tree
        is_unknown = loc[-1] not in options_by_key("".join(loc[:-1]))
        if isinstance(section, dict) and (is_unknown or entry.value is not None):
            section[loc[-1]] = _placed_value(loc, entry)
    for name in (FIT, FINETUNE, EVALUATE):
        if "seed" in tree and isinstance(tree.get(name), dict):
            tree[name].setdefault("seed", tree["seed"])
    if isinstance(tree.get(EXTEND), dict):
        with source.naming(EXTEND):
            tree[EXTEND] = with_pair_factors(tree[EXTEND], read_text)
    return tree


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Names that are or end in one of these words: HF_TOKEN, but not TOKENIZER_DIR or TOKEN_COUNTS.
_SECRET = re.compile(r"(.*_)?(token|(api)?key|secret|password|passwd)", re.IGNORECASE)


def _placed_value(loc: Loc, entry: Entry) -> Any:
    """Return a value of a recipe; if it is a place, as seen from here. Hub ids, `ropext://` names
    and absolute paths stay as they are; a relative path counts from the recipe's folder."""
    value = entry.value
    if key_role(loc) is Role.TASKS and isinstance(value, str):
        value = value.split(",")
    if key_role(loc) is Role.TASKS and isinstance(value, list):
        placed = partial(_recipe_place, loc, entry)
        return [with_place(w.strip(), placed) if isinstance(w, str) else w for w in value]
    if key_role(loc) not in PLACE_ROLES or not isinstance(value, str):
        return dict(value) if isinstance(value, dict) else value
    return _recipe_place(loc, entry, value)


def _recipe_place(loc: Loc, entry: Entry, value: str) -> str:
    """Return a place that a recipe names, as seen from here."""
    if not value.strip():
        dotted = ".".join(loc)
        raise InputError(f"{entry.where}: {dotted} is empty; name a place, or leave the key out")
    text = _VARIABLE.sub(lambda match: _environment_variable(match[1], entry.where), value)
    if "$" in text:
        raise InputError(
            f"{entry.where}: {value!r} holds a $ that names no variable; write ${{NAME}}"
        )
    text = os.path.expanduser(text)
    if "://" in text or entry.folder == Path():
        return text
    looks_local = is_path(text) or Path(text).suffix in (*DOCUMENTS, *TABLES)
    if key_role(loc) in LOCAL_ROLES or looks_local or (entry.folder / text).exists():
        return str(entry.folder / text)
    return text


def _environment_variable(name: str, where: str) -> str:
    """Return the environment variable that a recipe names as `${NAME}`; refuse a secret."""
    if _SECRET.fullmatch(name):
        raise InputError(
            f"{where}: ${{{name}}} looks like a secret, which has no place in a recipe"
        )
    if name not in os.environ:
        raise InputError(f"{where}: the environment variable {name} is not set")
    return os.environ[name]


# Errors.


def _recipe_error(source: RecipeSource, error: ValidationError) -> UsageError:
    """Return the first mistake in a recipe as an error. Unknown keys come first, since a misspelt
    key is why another is missing."""
    rank = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(include_url=False), key=lambda detail: rank.get(detail["type"], 1))
    loc = tuple(map(str, first["loc"][:2]))
    where = source.where(loc)
    dotted = ".".join(loc)
    match first["type"]:
        case "missing" if loc == ("model",):
            said = f"{source.name} names no model; add model: (a directory or a hub id)"
        case "missing" if loc == (EXTEND,):
            said = f"{source.name} has no section extend, with method and factor or target"
        case "missing":
            said = f"{source.where(loc[:1])}: {loc[0]} needs {loc[1]}"
        case "extra_forbidden":
            said = f"{where}: {_unknown_key_message(loc)}"
        case "model_type":
            said = f"{where}: {dotted} is a section, with keys such as "
            said += f"{next(iter(options_by_key(dotted)))} below it"
        case "value_error" if loc[1:]:
            said = f"{where} ({dotted}): {first['ctx']['error']}"
        case "value_error":
            said = _section_message(source, dotted, first["ctx"]["error"])
        case _:
            said = f"{where}: {dotted} {wrong_value_message(first)}"
    return UsageError(said)


def _section_message(source: RecipeSource, section: str, error: Exception) -> str:
    """Return the message of an error in a recipe's section, with its place and the command line's
    words for it."""
    words = [
        entry.where
        for loc, entry in source.entries.items()
        if loc[0] == section and entry.where.startswith(f"{'.'.join(loc)}=")
    ]
    return f"{source.where((section,))} ({', with '.join([section, *words])}): {error}"


def _unknown_key_message(loc: Loc) -> str:
    """Say that a recipe has an unknown key, and name its nearest neighbours."""
    section = loc[0] if len(loc) > 1 else ""
    key = loc[-1]
    if key == "trust_remote_code":
        return (
            "no recipe allows a model's own code to run; where you trust the model, give "
            "--trust-remote-code on the command line"
        )
    said = f"{section or 'a recipe'} has no key {key!r}; "
    known = options_by_key(section)
    owners = [name for name in SECTIONS if key in options_by_key(name)]
    if owners and not difflib.get_close_matches(key, known, 1, 0.8):
        return f"{said}it is a key of {' and of '.join(owners)}"
    return said + did_you_mean(key, known, f"known are {', '.join(known)}")
