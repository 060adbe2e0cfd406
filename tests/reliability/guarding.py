"""Show that no command loses a user's files.

The cases cover each kind of input in each relation to the output, each kind of a user's files at
the output's name, and kills at each rename. The oracle is the tree itself: the SHA-256 of every
file before and after, by the names that both have. A command that refuses changes nothing. A
command that succeeds changes only the paths that it announced, the output and the folder of its
run, and no file of a user's in them.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from marked import at_work, checkpoint, manifest, mark
from reliability.campaign import Broken, run, tree
from reliability.commands import SMALL_FIT, SMALL_TRAINING, Command
from reliability.layer import Ended, Wish

TWICE = ("--factor", "2")
FEW = ("--lengths", "64", "--max-docs", "1", "--device", "cpu")
TO = ("-o", "{out}", "--force")


@dataclass(frozen=True)
class Kind:
    """One kind of input of one command: in its words `IN` means the input, and `source` is the
    input's path."""

    words: tuple[str, ...]
    source: str
    file: bool = False  # the output is one file
    changes: tuple[str, ...] = ()  # files in its input that it announces to write

    def command(self, given: str, output: str) -> Command:
        words = [w.replace("{in}", given).replace("{out}", output) for w in self.words]
        return Command(" ".join(self.words[:1]), tuple(words))


EXTEND = ("extend", "base", "--method", "yarn", *TWICE, "--no-verify")
KINDS = {
    "extend MODEL": Kind(("extend", "{in}", *TWICE, "--no-verify", *TO), "base"),
    "extend MODEL, by symlink": Kind(
        ("extend", "{in}", *TWICE, "--no-verify", "--link", "symlink", *TO), "base"
    ),
    "extend MODEL.gguf": Kind(("extend", "{in}", *TWICE, *TO), "m.gguf", file=True),
    "extend --like": Kind(("extend", "m.gguf", "--like", "{in}", *TO), "ext"),
    "extend --pair-factors": Kind(
        ("extend", "base", *TWICE, "--method", "longrope", "--pair-factors", "{in}", *TO),
        "pairs.json",
    ),
    "extend --eval": Kind((*EXTEND, "--eval", "{in}", *TO), "eval.jsonl"),
    "extend --fit": Kind((*EXTEND, "--fit", "{in}", *TO), "texts"),
    "extend --finetune": Kind((*EXTEND, "--finetune", "{in}", *TO), "texts"),
    "extend --method auto": Kind(
        ("extend", "base", "--method", "auto", *TWICE, "--data", "{in}", *TO), "texts"
    ),
    "extend --eval MODEL": Kind(
        ("extend", "{in}", *TWICE, "--no-verify", "--eval", "eval.jsonl", *TO), "base"
    ),
    "fit MODEL": Kind(("fit", "{in}", "--data", "texts", *SMALL_FIT, *TO), "base"),
    "fit --data": Kind(("fit", "base", "--data", "{in}", *SMALL_FIT, *TO), "texts"),
    "finetune DIR": Kind(("finetune", "{in}", "--data", "texts", *SMALL_TRAINING, *TO), "ext"),
    "finetune --data": Kind(("finetune", "ext", "--data", "{in}", *SMALL_TRAINING, *TO), "texts"),
    "finetune --eval": Kind(
        ("finetune", "ext", "--data", "texts", "--eval", "{in}", *SMALL_TRAINING, *TO), "texts"
    ),
    "eval MODEL": Kind(("eval", "{in}", "--data", "eval.jsonl", *FEW, *TO), "ext"),
    "eval --data": Kind(("eval", "ext", "--data", "{in}", *FEW, *TO), "texts"),
    "eval --base": Kind(("eval", "ext", "--base", "{in}", "--data", "texts", *FEW, *TO), "base"),
    "eval --passages": Kind(
        ("eval", "ext", "--tasks", "passages", "--passages", "{in}", *FEW, *TO), "eval.jsonl"
    ),
    "eval --tasks": Kind(("eval", "ext", "--tasks", "{in}", *FEW, *TO), "eval.jsonl"),
    "eval --fail-if": Kind(
        ("eval", "ext", "--data", "texts", *FEW, "--fail-if", "tail@64 > vs {in}", *TO), "seen"
    ),
    "run RECIPE": Kind(("run", "{in}", *TO), "recipe.yaml"),
    "run model": Kind(("run", "recipe.yaml", "model={in}", *TO), "base"),
    "run evaluate.data": Kind(("run", "recipe.yaml", "evaluate.data={in}", *TO), "texts"),
    "compare RUN": Kind(("compare", "{in}:base", "{in}:untouched", "-o", "{out}"), "seen"),
    "inspect --plot": Kind(("inspect", "{in}", "--plot", "{out}"), "base", file=True),
    "plan --plot": Kind(("plan", "{in}", *TWICE, "--plot", "{out}"), "base", file=True),
    "verify --fix": Kind(("verify", "{out}", "--fix", "--against", "{in}"), "base"),
    "push DIR": Kind(
        ("push", "{in}", "org/long", "--force"), "ext", changes=("README.md", "ropext.json")
    ),
    "push --dry-run": Kind(("push", "{in}", "org/long", "--dry-run"), "ext"),
    "push --results": Kind(("push", "ext", "org/long", "--results", "{in}", "--dry-run"), "seen"),
}
DEMO = {"demo": Kind(("demo", "-o", "{out}"), "")}
WRITERS = (
    *("fit MODEL", "finetune DIR", "eval MODEL", "run RECIPE", "compare RUN", "inspect --plot"),
    *("extend --eval", "extend --method auto", "extend MODEL.gguf", "extend MODEL", "demo"),
)
PART = (
    *("extend --eval MODEL", "run RECIPE", "fit --data", "extend --like", "compare RUN"),
    *("push DIR", "push --results"),
)
# Kinds of seconds, each of which loses its input without the guard.
QUICK = ("extend MODEL", "extend MODEL, by symlink", "extend --pair-factors", "verify --fix")


def prepare(room: Path, inputs: Path, runs: Path) -> None:
    """Fill the folder in which one command runs with its inputs, by the names in `KINDS`."""
    for name in ("base", "ext", "eval.jsonl"):
        _copy(inputs / name, room / name)
    _copy(runs / "seen", room / "seen")
    _copy(runs / "m.gguf", room / "m.gguf")
    (room / "texts").mkdir()
    _copy(inputs / "train.jsonl", room / "texts/stories.jsonl")
    (room / "pairs.json").write_text("[1, 1, 2, 2]")
    (room / "recipe.yaml").write_text(
        "model: base\nextend: {method: yarn, factor: 2, no_verify: true}\n"
        "evaluate: {data: eval.jsonl, lengths: '64', max_docs: 1}\n"
    )
    (room / "demo.yaml").write_text(
        "model: ropext://demo\nextend: {method: yarn, factor: 4, no_verify: true}\n"
        "evaluate: {data: ropext://held-out, lengths: '256,1024', tasks: passkey, items: 1,"
        " max_docs: 1}\n"
    )


def _copy(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


def make_runs(folder: Path, inputs: Path) -> Path:
    """Make a finished evaluation and a GGUF file once, and return their folder."""
    from gguf_files import making

    folder.mkdir()
    words = ("eval", str(inputs / "ext"), "--data", str(inputs / "eval.jsonl"), *FEW, "-o", "seen")
    ended = run(Command("eval", words), folder)
    assert ended.code == 0, ended.said
    making.write(folder / "m.gguf")
    return folder


# --- how an input and an output are related ------------------------------------------------------

Placed = tuple[str, str]  # the input and the output, as the command line names them


def is_(room: Path, kind: Kind) -> Placed:
    """Use the input itself as the output, marked as ropext's as far as possible."""
    source = room / kind.source
    if source.is_dir():
        if not (source / "ropext.json").exists():
            _copy(room / "ext/ropext.json", source / "ropext.json")
        mark(source)
    return kind.source, kind.source


def lies_in(room: Path, kind: Kind) -> Placed:
    (room / "out").mkdir()
    os.rename(room / kind.source, room / "out" / kind.source)
    mark(room / "out")
    return f"out/{kind.source}", "out"


def lies_in_run(room: Path, kind: Kind) -> Placed:
    """Move the input into the run's folder, next to the output."""
    manifest(room / "out.run", "run")
    os.rename(room / kind.source, room / "out.run" / kind.source)
    return f"out.run/{kind.source}", "out"


def holds(room: Path, kind: Kind) -> Placed:
    if (room / kind.source).is_dir():
        checkpoint(room / kind.source / "out")
        return kind.source, f"{kind.source}/out"
    return lies_in(room, kind)


def links_into(room: Path, kind: Kind) -> Placed:
    """Replace each file of the input by a symbolic link into the output."""
    lies_in(room, kind)
    source, hidden = room / kind.source, room / "out" / kind.source
    if hidden.is_dir():
        for file in [own for own in hidden.rglob("*") if own.is_file()]:
            link = source / file.relative_to(hidden)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    else:
        source.symlink_to(hidden)
    return kind.source, "out"


def linked(room: Path, kind: Kind) -> Placed:
    """Make the output a symbolic link to the input."""
    (room / "out").symlink_to(room / kind.source)
    return kind.source, "out"


def hard(room: Path, kind: Kind) -> Placed:
    """Make the output hard links to the input's files, or to the input if it is one file."""
    if (room / kind.source).is_dir():
        shutil.copytree(room / kind.source, room / "out", copy_function=os.link)
        mark(room / "out")
    else:
        os.link(room / kind.source, room / "out")
    return kind.source, "out"


def read_only(room: Path, kind: Kind) -> Placed:
    """Make the input read-only; it is apart from the output."""
    for path in (room / kind.source, *(room / kind.source).rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return kind.source, "out"


READ_ONLY = "is read-only, apart from"
HARD = "is hard-linked by"  # the output's own names may go: the input keeps its other ones
RELATIONS: dict[str, Callable[[Path, Kind], Placed]] = {
    "is": is_,
    "lies in": lies_in,
    "lies in OUT.run": lies_in_run,
    "holds": holds,
    "links into": links_into,
    "is linked by": linked,
    HARD: hard,
    READ_ONLY: read_only,
}
SECOND = {"is": is_, "lies in": lies_in, "holds": holds}  # under a second name of the room


@contextmanager
def second_name(room: Path, mounted: bool) -> Iterator[None]:
    """Make `there` another name of `here`: by a bind mount, or else by a changed answer of
    `os.stat`."""
    here, there = room / "here", room / "there"
    if mounted:
        there.mkdir()
        subprocess.run(["mount", "--bind", str(here), str(there)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", str(there)], check=True)
        return
    real = os.stat
    shutil.copytree(here, there, symlinks=True)

    def stat(path: object, *words: object, **how: object) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and how.get("follow_symlinks", True):
            text = os.path.abspath(os.fspath(path))
            if text == str(there) or text.startswith(f"{there}{os.sep}"):
                other = str(here) + text[len(str(there)) :]
                path = other if os.path.lexists(other) else path  # a new file has one name
        return real(path, *words, **how)  # type: ignore[arg-type]

    with mock.patch.object(os, "stat", stat):
        yield


@contextmanager
def mounted_read_only(place: Path, mounted: bool) -> Iterator[None]:
    """Mount the place read-only, if this machine lets us mount."""
    if not mounted:
        yield
        return
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def may_mount(folder: Path) -> bool:
    """Return whether this machine lets us mount a folder a second time."""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
    words = [str(folder / "one"), str(folder / "two")]
    with suppress(OSError):
        if subprocess.run(["mount", "--bind", *words], capture_output=True).returncode == 0:
            subprocess.run(["umount", words[1]], check=True)
            return True
    return False


# --- a user's files at the output's name ------------------------------------------------


def foreign(room: Path) -> None:
    """Make a folder with everything that a checkpoint has, except ropext's mark."""
    (room / "out").mkdir()
    for name in ("config.json", "notes.md", "a.gguf", "report.md", "ropext.txt", "documents-1"):
        (room / "out" / name).write_text("{}")


def added(room: Path) -> None:
    """Make an output of ropext's to which a user added files."""
    checkpoint(room / "out")
    for name in ("notes.md", "sub/a.png", "plots/mine"):
        (room / "out" / name).parent.mkdir(exist_ok=True)
        (room / "out" / name).write_text("mine")


USERS = ("documents-2024/a", "report.docx", "plots/mine")
LIKE_OURS = (  # names that a pattern would take for ropext's
    *("variants/my.json", "variants/base-0/mine.npy", "tuned/checkpoint-6-keep/optimizer.pt"),
    *("best/checkpoint-6/complete", "tuned/checkpoint-5-notes/notes.txt"),
)


def added_to_run(room: Path) -> None:
    """Make another run of the same command, to which a user added files."""
    for folder, commands in (("out", ("eval",)), ("out.run", ("fit", "finetune", "run"))):
        for command in commands:
            manifest(room / folder, command, {"seed": 9})
        for name in (*USERS, *LIKE_OURS):
            (room / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (room / folder / name).write_text("mine")


def foreign_run(room: Path) -> None:
    (room / "out.run").mkdir()
    (room / "out.run/manifest.json").write_text('{"settings": 1, "resolved": 2}')
    (room / "out.run/data.bin").write_text("mine")


def neighbours(room: Path) -> None:
    """Make paths with names that ropext once used for its own files, or that resemble today's."""
    for name in (".out.tmp-2024", ".out.old", ".out.tmp-7", ".out.run.old", ".out.ropext-old"):
        (room / name).mkdir()
        (room / name / "a").write_text("mine")
    for name in (".out.lock", ".out.run.lock", ".out.png.5.tmp"):
        (room / name).write_text("mine")


def a_file(room: Path) -> None:
    (room / "out").write_text("mine")


def a_link(room: Path) -> None:
    (room / "elsewhere").mkdir()
    (room / "elsewhere/a").write_text("mine")
    (room / "out").symlink_to(room / "elsewhere")


def a_dangling_link(room: Path) -> None:
    (room / "out").symlink_to(room / "nowhere")


def linked_run(room: Path) -> None:
    (room / "elsewhere").mkdir()
    (room / "out.run").symlink_to(room / "elsewhere")


def an_old_copy(room: Path) -> None:
    """Leave the files of a `--force` that was killed between its renames, under a name that another
    command took."""
    work = at_work(room / "out")
    checkpoint(work / "old", "the only copy")
    checkpoint(work / "new", "whole")
    manifest(room / "out", "demo")
    (room / "out" / "results.json").write_text("{}")


ANOTHERS = "an old copy, and another's OUT"
ADDED = "a user's files in a run"  # eval --force starts a new run there, and keeps them
STANDING: dict[str, Callable[[Path], None]] = {
    "a user's folder": foreign,
    "a user's files in OUT": added,
    ADDED: added_to_run,
    "a user's OUT.run": foreign_run,
    "names like ropext's": neighbours,
    "a file": a_file,
    "a link": a_link,
    "a dangling link": a_dangling_link,
    "OUT.run as a link": linked_run,
    ANOTHERS: an_old_copy,
}


def new_file(room: Path) -> None:
    (room / "out/model-f16.gguf").write_text("mine")


def new_folder(room: Path) -> None:
    """Act like a user who wants to keep the old output."""
    os.rename(room / "out", room / "kept")
    (room / "out").mkdir()
    (room / "out/work.txt").write_text("mine")


def new_link(room: Path) -> None:
    os.rename(room / "out", room / "kept")
    (room / "out").symlink_to("kept")


def new_edit(room: Path) -> None:
    (room / "out/config.json").write_text("mine")


MEANWHILE: dict[str, Callable[[Path], None]] = {
    "a file is added to OUT": new_file,
    "OUT is moved away, and made anew": new_folder,
    "OUT becomes a link": new_link,
    "OUT is edited": new_edit,
}
REPLACERS = ("extend MODEL", "extend MODEL, by symlink", "fit MODEL", "finetune DIR")


COMPARED = re.compile("is the input itself|is inside|is a link, and")  # messages of the guard


def announced(kind: Kind, relation: str, given: str) -> tuple[str, ...]:
    """Return the paths that may change: files that the command writes into its input, and the
    output's files if they are hard links to the input's."""
    inside = tuple(f"{given}/{name}" for name in kind.changes)
    return (*inside, "out/") if relation == HARD else inside


# --- the cases -----------------------------------------------------------------------------------


@dataclass
class Guarding:
    """The rooms, and what came of the cases."""

    folder: Path
    inputs: Path
    runs: Path
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    number: int = 0
    mounted: bool = False  # whether this machine lets us mount

    def __post_init__(self) -> None:
        self.mounted = may_mount(self.room())

    def room(self) -> Path:
        self.number += 1
        room = self.folder / f"guard {self.number}"
        room.mkdir()
        return room

    def relation(self, name: str, relation: str) -> Ended | None:
        """Run a command on one kind of input in one relation; return None if the two exclude each
        other."""
        kind, room = KINDS[name], self.room()
        prepare(room, self.inputs, self.runs)
        given, output = RELATIONS[relation](room, kind)
        command = kind.command(given, output)
        with mounted_read_only(room / given, relation == READ_ONLY and self.mounted):
            return self._judged(name, relation, room, command, announced(kind, relation, given))

    def second(self, name: str, relation: str, mounted: bool) -> Ended:
        """Do the same with the output given under a second name of its folder."""
        kind, room = KINDS[name], self.room()
        (room / "here").mkdir()
        prepare(room / "here", self.inputs, self.runs)
        given, output = SECOND[relation](room / "here", kind)
        words = kind.command(f"here/{given}", f"there/{output}")
        plain = ("base", "m.gguf", "ext", "texts", "recipe.yaml", "eval.jsonl")
        moved = [f"here/{word}" if word in plain else word for word in words.words]
        how = "mounted twice" if mounted else "by os.stat"
        with second_name(room, mounted):
            writes = kind.words[0] not in ("push", "verify")  # else one file of it at most
            changes = (
                *announced(kind, relation, f"here/{given}"),
                *announced(kind, relation, f"there/{given}"),
            )
            told = Command(name, tuple(moved))
            return self._judged(name, f"{relation}, {how}", room, told, changes, writes)

    def standing(self, name: str, what: str) -> Ended:
        """Run a command whose output's name holds a user's files."""
        kind, room = (KINDS | DEMO)[name], self.room()
        prepare(room, self.inputs, self.runs)
        STANDING[what](room)
        # eval starts a new run there, and the demo resumes: each replaces its own manifest
        changes = ("out/run.json",) if what in (ADDED, ANOTHERS) else ()
        return self._judged(name, what, room, kind.command(kind.source, "out"), changes)

    def meanwhile(self, name: str, what: str) -> Ended:
        """Check that OUT keeps every change that a user makes while `--force` builds a new one, and
        that the command's result exists too."""
        kind, room, before = KINDS[name], self.room(), dict[str, str]()
        prepare(room, self.inputs, self.runs)
        checkpoint(room / "out", "old")
        expected = shutil.copytree(room, room.with_name(f"{room.name}, as a user leaves it"))
        MEANWHILE[what](expected)
        before = tree(expected)
        ended = run(kind.command(kind.source, "out"), room, meanwhile=MEANWHILE[what])
        after = tree(room)
        lost = [own for own in before if after.get(own) != before[own]]
        made = room / "out.new/model.safetensors"
        if ended.code != 2 or lost or not os.path.lexists(made) or "out.new" not in ended.said:
            said = ended.said[-300:]
            self.broken.append(f"{name}, {what}: it lost {lost[:3]}, exit {ended.code}: {said}")
        self.counts[f"{what}, meanwhile", "refused"] += 1
        shutil.rmtree(room, ignore_errors=True)
        shutil.rmtree(expected, ignore_errors=True)
        return ended

    def _judged(
        self,
        name: str,
        what: str,
        room: Path,
        command: Command,
        announced: tuple[str, ...],
        refused: bool = False,
    ) -> Ended:
        """Run the command, and check that the tree is unchanged except for the `announced` paths.
        With `refused`, the guard must refuse, and nothing else."""
        before = tree(room)
        ended = run(command, room)
        after = tree(room)
        try:
            if ended.code not in (0, 2) or "Traceback" in ended.said:
                raise Broken(f"exit {ended.code}: {ended.said[-800:]}")
            if refused and not COMPARED.search(ended.said):
                raise Broken(f"it was done, or refused otherwise: {ended.said[-200:]}")
            lost = [own for own in before if after.get(own) != before[own]]
            new = sorted(after.keys() - before.keys())
            if ended.code and (lost or new):
                raise Broken(f"it refused, and changed {lost[:3]}, made {new[:3]}: {ended.said}")
            if users := [own for own in lost if not own.startswith(announced)]:
                raise Broken(f"it lost {users[:3]}")
            self.counts[what, "refused" if ended.code else "done, nothing lost"] += 1
        except Broken as error:
            self.broken.append(f"{name}, {what}: {error}")
        shutil.rmtree(room, ignore_errors=True)
        return ended


# --- kills at each rename ------------------------------------------------------------------------

FORCED = (*EXTEND, "-o", "out", "--force")
THEN = {
    "eval -o": ("eval", "ext", "--data", "eval.jsonl", *FEW, "-o", "out"),
    "extend": (*EXTEND, "-o", "out"),
    "extend --force": FORCED,
    "compare": ("compare", "seen:base", "seen:untouched", "-o", "out"),
}


def renames(guarding: Guarding) -> Iterator[tuple[int, ...]]:
    """Yield each rename of `extend --force` over an output, and each pair of them."""
    room = guarding.room()
    prepare(room, guarding.inputs, guarding.runs)
    checkpoint(room / "out", "old")
    steps = run(Command("extend", FORCED), room).steps
    at = [number for number, kind in enumerate(steps) if kind in ("name", "remove")]
    yield from ((one,) for one in at)
    yield from ((one, two) for one in at for two in at)


def killed(guarding: Guarding, steps: tuple[int, ...], then: str) -> None:
    """Kill `extend --force` at these steps in turn, then run another command on the same OUT: the
    old output or the new one is whole, and is still so when the other command refused."""
    room = guarding.room()
    prepare(room, guarding.inputs, guarding.runs)
    checkpoint(room / "out", "old")
    old = tree(room / "out")
    said = f"killed at {steps}, then {then}"
    try:
        for step in steps:
            run(Command("extend", FORCED), room, Wish(step, "before"))
            _either(room, old)
        ended = run(Command(then, THEN[then]), room)
        if ended.code not in (0, 2) or "Traceback" in ended.said:
            raise Broken(f"exit {ended.code}: {ended.said[-800:]}")
        _either(room, old)
        key = "refused" if ended.code else "done, nothing lost"
        guarding.counts[f"killed {'twice' if len(steps) > 1 else 'once'}, then {then}", key] += 1
    except Broken as error:
        guarding.broken.append(f"{said}: {error}")
    shutil.rmtree(room, ignore_errors=True)


def _either(room: Path, old: dict[str, str]) -> None:
    """Check that the old output, or the output of the run before, is whole under its name or
    aside."""
    for place in (room / "out", *room.glob(".out.ropext-*/old")):
        found, record = tree(place), place / "ropext.json"
        if found == old:
            return
        whole = "model.safetensors" in found and found.pop("ropext.json")
        if whole and found == json.loads(record.read_text())["files"]:
            return
    raise Broken(f"neither is there: {sorted(os.listdir(room))}")


def show(guarding: Guarding) -> None:
    """Print the table of the counts, as Markdown, and every broken promise."""
    print("| what stands in what relation | refused | done, nothing lost |\n|---|---|---|")
    for what in dict.fromkeys(what for what, _ in guarding.counts):
        done = guarding.counts[what, "done, nothing lost"]
        print(f"| {what} | {guarding.counts[what, 'refused']} | {done} |")
    for line in guarding.broken:
        print(f"BROKEN {line}")
    print(f"\n{sum(guarding.counts.values())} cases, {len(guarding.broken)} promises broken")


def relations(guarding: Guarding, names: Iterable[str]) -> None:
    """Run each kind of input in each relation to the output."""
    for name in names:
        for relation in RELATIONS:
            guarding.relation(name, relation)
        for relation in SECOND:
            for how in (False, True) if guarding.mounted else (False,):
                guarding.second(name, relation, how)


def inputs(guarding: Guarding) -> None:
    """Run every kind of input in every relation."""
    relations(guarding, KINDS)


def outputs(guarding: Guarding) -> None:
    """Put every kind of a user's files at the output's name, for every command that writes
    there."""
    for name in WRITERS:
        for what in STANDING:
            guarding.standing(name, what)


def races(guarding: Guarding) -> None:
    """Make every change of a user's to OUT while a command that replaces it is at work."""
    for name in REPLACERS:
        for what in MEANWHILE:
            guarding.meanwhile(name, what)


def kills(guarding: Guarding) -> None:
    """Kill at each rename, then run each other command; kill at each pair of renames, then run
    these in turn."""
    for number, steps in enumerate(renames(guarding)):
        then = [*THEN][number % len(THEN)]
        for own in THEN if len(steps) == 1 else (then,):
            killed(guarding, steps, own)


def a_part(guarding: Guarding) -> None:
    """Run the suite's share: one case of each sort."""
    relations(guarding, PART)
    for number, what in enumerate(STANDING):
        for name in (WRITERS[number % len(WRITERS)], "extend MODEL", "eval MODEL"):
            guarding.standing(name, what)
    meanwhile(guarding)
    for steps in [own for own in renames(guarding) if len(own) == 1]:
        killed(guarding, steps, "extend")


# What shows that the judge sees a guard that is off: each fault in the cases that it lets through.


def meanwhile(guarding: Guarding) -> None:
    """Make every change of a user's to OUT while the quickest command is at work."""
    for what in MEANWHILE:
        guarding.meanwhile("extend MODEL", what)


def quick(guarding: Guarding) -> None:
    """Run a few kinds without training, in every relation."""
    relations(guarding, QUICK)


def renamed(guarding: Guarding) -> None:
    """Run the same kinds with the output given under a second name."""
    for name in QUICK:
        for relation in SECOND:
            guarding.second(name, relation, False)


PARTS = {"part": a_part, "inputs": inputs, "outputs": outputs, "kills": kills, "races": races}
PARTS |= {"quick": quick, "meanwhile": meanwhile, "renamed": renamed}
