"""A recipe, checked: from a file or from options, with its overrides, cut into the cells of a grid.

Everything that can be found wrong without opening the model is found here, and told with the line.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropext import bundled, guard, recipefile
from ropext.checkpoint.provenance import scrub
from ropext.corpus.sources import READERS
from ropext.errors import InputError, RopextError, UsageError
from ropext.inspecting import read_text
from ropext.options.evaluate import Evaluate
from ropext.options.extend import AUTO, KNOBS, Choosing, Extend, Reach, parse_extend
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT, READ, Key, flag
from ropext.options.sections import TABLE, Writing
from ropext.options.training import Finetune, Fit
from ropext.recipefile import Given
from ropext.results.gates import Gate, parse_gate, split_spec
from ropext.workdir import beside

PLAN, REPORT = "plan", "report"
STAGES = (PLAN, EXTEND, FIT, FINETUNE, EVALUATE, REPORT)
LATER = (FIT, FINETUNE, EVALUATE)
WRITING = ("link", "no_verify", "hash")
CHOOSING = ("data", "budget", "within")
CHOSEN = "--method auto"  # where a value was given that a choice put in


@dataclass(frozen=True)
class Recipe:
    """One run, as it was asked for."""

    given: Given
    name: str  # of the recipe, for messages: a file's name, or "the command line"
    text: str | None = None  # the file, verbatim
    file: Path | None = None
    choice: Mapping[str, Any] | None = None  # what `--method auto` has come to
    trust_remote_code: bool = False  # given with the call; recipes come from strangers

    @property
    def model(self) -> str:
        return str(self.given.place("model"))

    @property
    def output(self) -> str | None:
        return self.given.place("output")

    def value(self, key: str, default: Any = None) -> Any:
        """One value by its dotted key."""
        entry = self.given.entries.get(key)
        return default if entry is None else entry.value

    def has(self, section: str) -> bool:
        return section in self.given.sections

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of this run, in their order."""
        return tuple(name for name in STAGES if name not in LATER or self.has(name))

    def options(self, section: str) -> dict[str, Any]:
        """A section's values by the fields of its options, places as they lie from here."""
        out: dict[str, Any] = {}
        for key in TABLE[section]:
            dotted = f"{section}.{key.name}"
            if dotted not in self.given.entries:
                continue
            value = self.given.entries[dotted].value
            placed = key.place and isinstance(value, str)
            out[key.field] = self.given.place(dotted) if placed else value
        seed = self.value("seed")
        if seed is not None and any(key.name == "seed" for key in TABLE[section]):
            out.setdefault("seed", seed)
        return out

    @property
    def writing(self) -> Writing:
        """How the extension is written."""
        own = self.options(EXTEND)
        return Writing(**{name: own[name] for name in WRITING if name in own})

    @property
    def is_auto(self) -> bool:
        """Whether the method is still to be chosen, by measurement."""
        return bool(self.value("extend.method") == AUTO)

    @property
    def choosing(self) -> Choosing:
        """By what a method is chosen."""
        own = self.options(EXTEND)
        return Choosing(**{name: own[name] for name in CHOOSING if name in own})

    @property
    def request(self) -> dict[str, Any]:
        """The extension without its method: how far, for whom."""
        own = self.options(EXTEND)
        return {k: v for k, v in own.items() if k not in (*WRITING, *CHOOSING, "method")}

    def chosen(self, choice: Mapping[str, Any]) -> "Recipe":
        """The same run with what was chosen in the place of `auto`; a value of None is none."""
        left = [f"{EXTEND}.{name}" for name in CHOOSING]
        left += [key for key, value in choice["recipe"].items() if value is None]
        out = [name for name in (FIT, FINETUNE) if name in choice.get("left_out", ())]
        entries = {
            key: entry
            for key, entry in self.given.entries.items()
            if key not in left and key.partition(".")[0] not in out
        }
        sections = {k: v for k, v in self.given.sections.items() if k not in out}
        given = Given(entries, sections)
        for key, value in choice["recipe"].items():
            if value is not None:
                given.put(key, tuple(value) if isinstance(value, list) else value, CHOSEN)
        return replace(self, given=given, choice=choice)

    @property
    def gates(self) -> tuple[Gate, ...]:
        return tuple(parse_gate(text) for text in self.value("evaluate.fail_if", ()))

    def cells(self) -> "tuple[Cell, ...]":
        """The grid of methods and factors; one cell where neither is a list."""
        own = {k: v for k, v in self.options(EXTEND).items() if k not in (*WRITING, *CHOOSING)}
        if self.has(FINETUNE):  # some methods suit a training better
            own["finetune"] = self.value("finetune.data")
        methods = own.pop("method", None)
        factors = own.pop("factor", None)
        is_grid = isinstance(methods, tuple) or isinstance(factors, tuple)
        cells = []
        for method in methods if isinstance(methods, tuple) else (methods,):
            for factor in factors if isinstance(factors, tuple) else (factors,):
                far = f"{factor:g}x" if factor is not None else str(own.get("target"))
                request = own | {"method": method, "factor": factor}
                cells.append(
                    Cell((f"{method}-{far}" if method else far) if is_grid else "", request)
                )
        names = [cell.name for cell in cells]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"the grid has {twice} twice")
        return tuple(cells)

    def resolved(self) -> dict[str, Any]:
        """All values, those of the defaults too, in the order of the table; places as written."""
        out: dict[str, Any] = {}
        for section, keys in TABLE.items():
            if section and not self.has(section):
                continue
            own = self.given.section(section)
            values = {key.name: self._value_of(key, own, section) for key in keys}
            values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
            values = {k: v for k, v in values.items() if v not in (None, [])}
            out |= {section: values} if section else values
        return out

    def _value_of(self, key: Key, own: Mapping[str, Any], section: str) -> Any:
        if key.name in own:
            return own[key.name]
        if section and key.name == "seed":
            return self.value("seed", key.default)
        return key.default

    def check(self) -> None:
        """Build every option class once, so that what is wrong is told before anything is done."""
        for key, entry in self.given.entries.items():
            if isinstance(entry.value, str) and scrub(entry.value) != entry.value:
                raise UsageError(
                    f"{entry.where}: {key} holds what looks like a secret, which would stand in "
                    "the run's records; set HF_TOKEN, or log in with `hf auth login`"
                )
        if not self.value("model"):
            raise UsageError(f"{self.name} names no model; add model: (a directory or a hub id)")
        if not self.has(EXTEND):
            raise UsageError(f"{self.name} has no section extend, with method and factor or target")
        with self.told(EXTEND):
            self._check_choosing()
            _ = self.writing
            for cell in self.cells() if not self.is_auto else ():
                cell.extend()
        if self.is_auto:
            self._check_auto()
            return
        for section in (FIT, FINETUNE):
            if self.has(section) and self.value(f"{section}.data") is None:
                raise UsageError(f"{self._where(section)}: {section} needs data")
        if self.has(FIT):
            with self.told(FIT):
                for cell in self.cells():
                    Fit(**self.fitting(cell))
        if self.has(FINETUNE):
            with self.told(FINETUNE):
                Finetune(**self.finetuning())
        if self.has(EVALUATE):
            with self.told(EVALUATE):
                Evaluate(**self.evaluation())
                _ = self.gates

    def _check_choosing(self) -> None:
        """What is asked for by --method auto belongs to it alone."""
        methods = self.value("extend.method")
        if isinstance(methods, tuple) and AUTO in methods:
            raise UsageError("a grid has no method auto, which is chosen among all of them")
        given = [name for name in CHOOSING if self.value(f"{EXTEND}.{name}") is not None]
        if given and not self.is_auto:
            raise UsageError(f"{flag(given[0])} goes with --method auto")
        if not self.is_auto:
            return
        if isinstance(self.value("extend.factor"), tuple):
            raise UsageError("--method auto takes one factor")
        if self.choosing.data is None:
            raise UsageError("--method auto chooses by measuring on documents: give --data TEXTS")
        if self.value("fit.data") is not None:
            raise UsageError("--method auto fits on what it chooses by; leave the data of fit out")
        if self.writing.no_verify:
            raise UsageError(
                "--no-verify and --method auto exclude each other: a choice is a claim"
            )
        asked = [name for name in KNOBS if name in self.request]
        if asked:
            raise UsageError(f"{flag(asked[0])} is a knob of one method; --method auto tries all")
        parse_extend(self.request, read_text)

    def _check_auto(self) -> None:
        """The later stages, as far as their options do not hang on what will be chosen."""
        reach = {k: v for k, v in self.request.items() if k in Reach.model_fields}
        with self.told(FIT):
            Fit(**reach | {k: v for k, v in self.options(FIT).items() if k != "data"})
        if self.has(FINETUNE):
            if self.value("finetune.data") is None:
                raise UsageError(f"{self._where(FINETUNE)}: {FINETUNE} needs data")
            with self.told(FINETUNE):
                Finetune(**self.finetuning())
        with self.told(EVALUATE):
            Evaluate(**{"data": str(self.choosing.data)} | self.evaluation())
            _ = self.gates

    def fitting(self, cell: "Cell") -> dict[str, Any]:
        """The options of the fit: how far and for whom is said by extend, and where from too."""
        own = self.options(FIT)
        own.pop("data", None)
        said = {name: cell.request.get(name) for name in Reach.model_fields}
        start = {"start": cell.request.get("method"), "link": self.writing.link}
        return {k: v for k, v in (start | said | own).items() if v is not None}

    def check_places(self, output: Path) -> None:
        """Refuse to write over, into or around what is read: OUT.run is no input of its own run."""
        read: dict[str, Any] = {"the recipe": self.file}
        for dotted, entry in self.given.entries.items():
            section, _, name = dotted.rpartition(".")
            if entry.where == CHOSEN:  # the run's own files
                continue
            if name in ("model", "eval", *READ) and isinstance(entry.value, str):
                spelled = flag(section if name == "data" and section in LATER else name)
                read[dotted if self.file or not section else spelled] = self.given.place(dotted)
        runs = [(gate.run, self.given.entries["evaluate.fail_if"].folder) for gate in self.gates]
        read["--fail-if"] = [folder / split_spec(run)[0] for run, folder in runs if run]
        guard.check(read, {"--output": output, "where the run works": beside(output)})

    def check_data(self) -> None:
        """Documents that should be here and are not are told before hours of other work."""
        for dotted, entry in self.given.entries.items():
            if dotted.rpartition(".")[2] not in ("data", "eval"):
                continue
            place = str(self.given.place(dotted))
            is_local = place.startswith((".", "~", "/")) or Path(place).suffix in READERS
            if "://" not in place and is_local and not Path(place).exists():
                raise InputError(
                    f"{entry.where}: {dotted} is {place}, and there is no such file or folder"
                )

    def finetuning(self) -> dict[str, Any]:
        """The options of the fine-tuning."""
        own = self.options(FINETUNE)
        own.pop("data", None)
        # The run's own checkpoint, in the run's own folder: nobody else edits it.
        return {"link": "hard"} | own

    def evaluation(self) -> dict[str, Any]:
        """The options of the evaluation."""
        return {key: value for key, value in self.options(EVALUATE).items() if key != "fail_if"}

    def _where(self, section: str) -> str:
        return self.given.sections.get(section, self.name)

    @contextmanager
    def told(self, section: str) -> Iterator[None]:
        """A complaint of an option class, with the section, where it stands, and what the command
        line put into it."""
        try:
            yield
        except RopextError as error:
            words = [
                own.where
                for key, own in self.given.entries.items()
                if key.startswith(f"{section}.") and own.where.startswith(f"{key}=")
            ]
            about = ", with ".join([section, *words])
            raise type(error)(f"{self._where(section)} ({about}): {error}") from None


@dataclass(frozen=True)
class Cell:
    """One extension of the grid."""

    name: str  # "" where there is no grid
    request: Mapping[str, Any]

    def extend(self) -> Extend:
        return parse_extend(self.request, read_text)


def from_file(path: str | Path, words: Sequence[str] = ()) -> Recipe:
    """The job of a recipe file, with `key=value` overrides; where there is no such file, of the
    bundled recipe of that name, whose relative paths count from the working directory."""
    file, folder = Path(path), Path(path).parent
    if not file.exists():
        if "/" in str(path):
            raise InputError(f"{path} does not exist; name a recipe file")
        file, folder = bundled.find_recipe(str(path)), Path()
    given, text = recipefile.read(file, TABLE, folder)
    return _checked(Recipe(given, file.name, text, file), words)


def from_mapping(values: Mapping[str, Any], words: Sequence[str] = ()) -> Recipe:
    """The job of a recipe that Python holds: the same sections as nested mappings."""
    import json

    text = json.dumps(values, indent=1)  # JSON is YAML: one reader checks both
    given = recipefile.from_text(text, "the recipe", TABLE, Path())
    return _checked(Recipe(given, "the recipe"), words)


def from_options(
    top: Mapping[str, Any],
    extend: Mapping[str, Any],
    later: Mapping[str, str | None],
    words: Sequence[str] = (),
    where: str = "the command line",
) -> Recipe:
    """The job of a command line or call: what stands above the sections, the fields of extend, and
    the data of each later section; `key=value` words say the rest."""
    given = Given()
    for name, value in top.items():
        if value is not None:
            given.put(name, value, where)
    spelled = {key.field: key.name for key in TABLE[EXTEND]}
    given.sections[EXTEND] = where
    for field, value in extend.items():
        given.put(f"{EXTEND}.{spelled[field]}", value, where)
    for section, data in later.items():
        if data is not None:
            given.put(f"{section}.data", data, where)
    return _checked(Recipe(given, where), words)


def _checked(job: Recipe, words: Sequence[str]) -> Recipe:
    for word in words:
        recipefile.override(job.given, word, TABLE)
    job.check()
    return job
