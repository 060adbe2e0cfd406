"""The keys and tensors of a GGUF file that a plan changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ropext.base.errors import NotExpressible
from ropext.base.jsontext import Json, JsonObject
from ropext.families.loaders import LoaderReading, Serving
from ropext.families.loaders.gguf import (
    STORED,
    GgufRope,
    architecture,
    candidates,
    is_given_scaling,
    keys_of,
    older_names,
)
from ropext.files.gguf.file import GgufFile
from ropext.files.gguf.geometry import FREQS, LONG, SHORT, known_key, part_with
from ropext.files.gguf.header import FLOAT32, STRING, UINT32
from ropext.planning.carrier import PlannedExtension, Programs, UnextendedModel
from ropext.planning.gguf_carrier import GgufCarrier
from ropext.scaling.rope import ABSENT, Edit, RopeSite

# Ollama's issue 5245, open; its pull of such a repository answers "does not support this yet".
NO_PARTS = (
    "it imports no split file; join the parts first (llama-gguf-split --merge FIRST OUT.gguf) and"
    " extend that"
)
# `lms import` copies one file (lms, src/subcommands/importCmd.ts). LM Studio loads a split model by
# its first part, if all are in one folder (lmstudio-js, issue 22).
ONE_FILE = (
    "lm-studio: `lms import` copies one file; copy all parts into one folder USER/MODEL of its "
    "models folder, or join them first (llama-gguf-split --merge FIRST OUT.gguf)"
)
METADATA = "metadata"  # the file name in an edit of a key or a tensor

Values = Mapping[str, tuple[int, Json]]  # key -> (kind, value)
KINDS = {int: UINT32, float: FLOAT32, str: STRING}
ALWAYS = (".context_length", ".freq_base", ".yarn_beta_fast", ".yarn_beta_slow")


def changes(
    model: GgufFile, site: RopeSite, target: int
) -> tuple[Values, Mapping[str, tuple[float, ...]]]:
    """Return the keys and the tensors of divisors that make llama.cpp compute a planned site's
    spectrum from this file."""
    name = model.architecture
    rope = next(candidates(name, site.rope, site.wanted, site.params), None)
    if rope is None:  # never for a plan's own spectrum: the plan ran the same check
        raise NotExpressible(f"a {name} GGUF does not carry this spectrum exactly")
    row = architecture(name)
    prefix = f"{name}.rope"
    present = set(model.head.entries)
    theta_alone = rope.scaling == "none" and not rope.divisors
    # the temperature counts from the original length
    if known_key(model.head, row, "attention.temperature_scale"):
        theta_alone = False
    defaults: set[str | float] = {"none", 1.0}
    if theta_alone:
        defaults.add(rope.original)
    if is_given_scaling(name):
        present |= {f"{prefix}.scaling.type", f"{prefix}.scaling.factor"}
    keys = dict[str, tuple[int, Json]]()
    for key, stated in keys_of(row.name, rope, target).items():
        if key in present or stated not in defaults or key.endswith(ALWAYS):
            keys[key] = (KINDS[type(stated)], stated)
    local = f"{prefix}.freq_base_swa"
    if site.rope.nested and rope.freq_base != site.rope.theta and not row.local:
        keys[local] = (FLOAT32, model.head.decimal(local) or site.rope.theta)
    old = f"{prefix}.scale_linear"  # llama.cpp reads it if scaling.factor is absent
    if old in model.head.entries:
        keys[old] = (FLOAT32, rope.factor)
    for name in older_names(row.name):
        value = known_key(model.head, row, name)
        if value is not None and f"{row.name}.{name}" not in present:
            keys.setdefault(f"{row.name}.{name}", (FLOAT32, value))
    return keys, _in_the_head(model, _tensors(model, rope))


def _tensors(model: GgufFile, rope: GgufRope) -> dict[str, tuple[float, ...]]:
    """Build the tensors of divisors that a GGUF file gets for this spectrum. Tensors of another
    spectrum in the file become ones."""
    out = dict[str, tuple[float, ...]]()
    for name in (FREQS, LONG, SHORT):
        part = part_with(model.parts, name)
        if part is not None:
            out[name] = (1.0,) * len(part.floats(name))
    if rope.short:
        return out | {LONG: rope.divisors, SHORT: rope.short}
    # a Step's row is as long as its windowed layers need, although these use none
    if rope.divisors:
        out[FREQS] = rope.divisors
        if architecture(model.architecture).halves:
            out[FREQS] += (1.0,) * len(rope.divisors)
    return out


def _in_the_head(
    model: GgufFile, tensors: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    """Return the tensors to write into the first part. Raise NotExpressible if a tensor in another
    part would have to change, because ropext copies the other parts unchanged."""
    written = dict(tensors)
    for name, values in tensors.items():
        part = part_with(model.parts, name)
        if part is None or part is model.head:
            continue
        if not close(part.floats(name), list(values)):
            raise NotExpressible(
                f"{model.name}: {name} has to change and lies in {part.path.name}, while only the "
                "first part is written anew; join the parts (llama-gguf-split --merge FIRST "
                "OUT.gguf) and extend that"
            )
        del written[name]
    return written


@dataclass(frozen=True)
class FileCarrier(GgufCarrier):
    """The carrier of a GGUF file on the disk: its keys and tensors."""

    file: GgufFile = field(kw_only=True)

    @property
    def is_split(self) -> bool:
        """Return whether the opened GGUF consists of several files."""
        return len(self.file.parts) > 1

    def readings(self, site: RopeSite, target: int) -> tuple[LoaderReading, ...]:
        """Return how each engine reads the keys of a GGUF that was opened from one file or several
        on the disk. Ollama does not load a split file."""
        readings = super().readings(site, target)
        if not self.is_split:
            return readings
        return tuple(
            replace(reading, verdict="error", why=NO_PARTS)
            if reading.loader == "ollama"
            else reading
            for reading in readings
        )

    def serving(self, plan: PlannedExtension, place: str) -> tuple[Serving, ...]:
        """Return the commands that serve the extended copy of the GGUF that was opened from the
        disk. If it is split, LM Studio gets a note. Its command would copy only the first part."""
        return self._of_parts(super().serving(plan, place))

    def read_unextended(self, unextended: UnextendedModel) -> Programs:
        """Return how engines read the GGUF that was opened from the disk, as it is, and the
        commands that serve it. If it is split, LM Studio gets a note in place of a command."""
        readings, serving = super().read_unextended(unextended)
        return readings, self._of_parts(serving)

    def _of_parts(self, lines: tuple[Serving, ...]) -> tuple[Serving, ...]:
        """Replace LM Studio's command by a note if the GGUF on the disk is split. The command would
        copy only the first part."""
        if not self.is_split:
            return lines
        return tuple(
            Serving(line.loader, "", ONE_FILE)
            if line.loader == "lm-studio" and line.command
            else line
            for line in lines
        )

    def misread(self, name: str, site: RopeSite) -> str:
        """Return why Ollama cannot load the opened GGUF: its parts are several files on the disk.
        Return an empty text for one file, and for other programs."""
        return f"ollama: {NO_PARTS}" if self.is_split and name.startswith("ollama") else ""

    def copy_name(self, name: str) -> str:
        """Return the file name on the disk of the GGUF that was opened, which its copy in a
        directory keeps."""
        return self.file.file_name

    def place_of(self, name: str) -> str:
        """Return the folder on the disk from which the GGUF file was opened."""
        return str(self.file.directory)

    def edits(
        self, site: RopeSite, target: int, before: JsonObject, after: JsonObject
    ) -> tuple[Edit, ...]:
        """Return the edits of keys and tensors in the opened GGUF file, for one rotary
        embedding."""
        head = self.file.head
        keys, tensors = changes(self.file, site, target)
        values: list[tuple[str, Json, Json]] = []  # of a key or a tensor, before and after
        for key, (_, value) in keys.items():
            entry = head.entries.get(key)
            values.append((key, ABSENT if entry is None else entry.value, value))
        for name, divisors in tensors.items():
            values.append((name, list(head.floats(name)) or ABSENT, list(divisors)))
        return tuple(
            Edit(key, before, after, METADATA) for key, before, after in values if before != after
        )


def close(a: tuple[float, ...], b: list[float]) -> bool:
    """Return whether a row of numbers read from a GGUF file equals another within the rounding of
    float32. They are rope factors to write, or norms for --like."""
    if len(a) != len(b):
        return False
    return all(abs(x - y) <= STORED * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))
