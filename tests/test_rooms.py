"""The house: a room imports only from rooms listed above it, and the heavy libraries come late."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest

import ropext

PACKAGE = Path(ropext.__file__).parent
REPOSITORY = PACKAGE.parent

ABOVE_THE_LINE = (
    "version",
    "base.errors",
    "base.narration",
    "base.systems",
    "base.inputs",
    "base.atomic",
    "base.jsontext",
    "base.locks",
    "base.guard",
    "base.staging",
    "base.workdir",
    "base.jobs",
    "base.lengths",
    "base.table",
    "base.bundled",
    "scaling.rope",
    "scaling.forms",
    "scaling",
    "families",
    "families.stock",
    "families.loaders",
    "tasks",
    "options",
    "planning",
    "files.checkpoint",
    "files.gguf",
    "files.schemes",
    "files.inspecting",
    "results",
    "results.report",
    "endpoint",
)
BELOW_THE_LINE = (
    "models",
    "models.patching",
    "models.dequantising",
    "verifying.proof",
    "verifying",
    "evaluation.corpus",
    "evaluation",
    "serving",
    "training",
    "pipeline",
    "pipeline.demo",
    "cli",
    "__init__",
    "__main__",
)
ROOMS = (*ABOVE_THE_LINE, *BELOW_THE_LINE)
# Two lines each: they only import names, for readers who know the old address.
ADDRESSES = ("bundled", "errors", "rope", "patching")
MOST_PACKAGES = 16

HEAVY = frozenset(("torch", "transformers", "accelerate", "peft", "datasets"))
# Rows of a position table are arrays, when they are made and when they are written.
NUMPY_ROOMS = (
    *("scaling", "files.checkpoint", "files.schemes"),
    *("results", "results.report", "endpoint"),
)
PUBLIC_FUNCTIONS = (
    *("inspect", "plan", "extend", "verify", "patch", "save"),
    *("evaluate", "finetune", "fit", "run"),
)
FORBIDDEN_AT_START = (*sorted(HEAVY), "numpy", "huggingface_hub", "matplotlib")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_named(dotted: str) -> str:
    """Return the room of a module: the longest of ROOMS that its name begins with."""
    parts = dotted.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in ROOMS), names[-1])


def room_of(path: Path) -> str:
    return room_named(module_of(path).removeprefix("ropext.").replace("ropext", "__init__"))


def module_of(path: Path) -> str:
    parts = ("ropext", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, late: bool = True, types: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import.

    With `late` the imports in functions count too, with `types` the imports for type annotations
    alone.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif is_for_types(node) and not types:
            yield from imports(ast.Module(node.orelse, []), late=late, types=False)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, late=late, types=types)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def test_every_package_has_a_place_in_the_order() -> None:
    rooms = {room_of(path) for path in sources()}
    empty = {path.parent.name for path in sources() if is_front(path)}
    unknown = rooms - {*ROOMS, *ADDRESSES, *empty}
    assert not unknown, f"give {sorted(unknown)} a place in the order of rooms"


def is_front(path: Path) -> bool:
    """Return whether a file is the __init__ of a package that only holds rooms."""
    return path.name == "__init__.py" and len(parsed(path).body) <= 1


def test_the_parts_of_a_package_follow_one_another() -> None:
    """So the packages have an order too, and no circle."""
    packages = [room.partition(".")[0] for room in ROOMS]
    assert len([name for name, _ in groupby(packages)]) == len(set(packages))


def test_the_top_level_has_few_packages() -> None:
    named = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()}
    counted = named - {"__init__", "__main__", "version", *ADDRESSES}
    assert len(counted) <= MOST_PACKAGES, sorted(counted)


def test_an_address_only_imports() -> None:
    for name in ADDRESSES:
        path = next(p for p in sources() if module_of(p) == f"ropext.{name}")
        docstring, *statements = parsed(path).body
        assert isinstance(docstring, ast.Expr)
        assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in statements), name


def rooms_in_words() -> str:
    """Return CONTRIBUTING.md's list of rooms, each with its docstring's first sentence."""
    lines = []
    for room in ROOMS:
        front = next((p for p in sources() if module_of(p) == f"ropext.{room}"), None)
        said = ast.get_docstring(parsed(front)) if front else None
        sentence = re.split(r"(?<=\.)\s", " ".join((said or "").split()))[0].rstrip(".")
        if not room.startswith("__"):
            lines.append(f"- `{room}`: {sentence}" if sentence else f"- `{room}`")
    above = len(ABOVE_THE_LINE)
    below = ["", "Below this line torch may be loaded:", "", *lines[above:]]
    return "\n".join([*lines[:above], *below])


def test_contributing_lists_the_packages() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    assert rooms_in_words() in text, f"CONTRIBUTING.md wants this list:\n\n{rooms_in_words()}"


def test_no_package_imports_from_a_later_one() -> None:
    wrong = []
    for path in sources():
        if room_of(path) not in ROOMS:
            continue  # the test above names it
        here = ROOMS.index(room_of(path))
        for line, name in imports(parsed(path)):
            root, *rest = name.split(".")
            if root != "ropext" or not rest:
                continue
            room = room_named(".".join(rest))
            there = room if room in ROOMS else "__init__"
            if ROOMS.index(there) > here:
                wrong.append(f"{path.relative_to(REPOSITORY)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_two_files_form_a_circle() -> None:
    """In a circle there is no file to read first; imports for types alone count."""
    files = {module_of(path): path for path in sources()}
    needs = {
        module: {
            name if name in files else name.rpartition(".")[0] for _, name in imports(parsed(path))
        }
        & files.keys() - {module}
        for module, path in files.items()
    }

    def reached(module: str) -> set[str]:
        found, left = set[str](), [module]
        while left:
            new = needs[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in files}
    circles = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in files
        if module in reach[module]
    }
    assert not circles, [sorted(circle) for circle in circles]


def test_packages_above_the_line_import_no_torch() -> None:
    wrong = []
    for path in sources():
        if room_of(path) not in ABOVE_THE_LINE:
            continue
        banned = HEAVY if room_of(path) in NUMPY_ROOMS else HEAVY | {"numpy"}
        for line, name in imports(parsed(path), types=False):
            if name.split(".")[0] in banned:
                wrong.append(f"{path.relative_to(REPOSITORY)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def early(path: Path) -> set[str]:
    """Return the names that a module imports as soon as it is imported."""
    return {name for _, name in imports(parsed(path), late=False, types=False)}


def test_heavy_modules_are_imported_inside_functions_only() -> None:
    """A file may be written in torch; then nobody but its like imports it outside a function."""
    modules = {module_of(path): early(path) for path in sources()}
    heavy = {m for m, names in modules.items() if any(n.split(".")[0] in HEAVY for n in names)}
    grown = True
    while grown:
        grown = False
        for module, names in modules.items():
            # `from ropext.room import x` runs ropext.room, and also ropext.room.x if that is a
            # file.
            needed = {name.rsplit(".", 1)[0] for name in names} | names
            if module not in heavy and needed & heavy:
                heavy.add(module)
                grown = True
    fronts = {f"ropext.{room}" for room in ROOMS} | {"ropext"}
    fronts |= {m for m in modules if m.split(".")[1:2] == ["cli"]}
    loads_torch_when_imported = heavy & fronts
    assert not loads_torch_when_imported


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_scripts_import_existing_names(folder: str) -> None:
    """No test runs them all: a name that moved would be noticed by the next who measures."""
    missing = []
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        for _, dotted in imports(parsed(path)):
            module, _, name = dotted.rpartition(".")
            if module.split(".")[0] == "ropext" and not hasattr(import_module(module), name):
                try:
                    import_module(dotted)
                except ModuleNotFoundError:
                    missing.append((path.name, dotted))
    assert not missing


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sources()
        if room_of(path) != "cli"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    ]
    assert not wrong, wrong


def test_no_package_hides_a_public_function() -> None:
    """A module ropext/plan.py would replace the function ropext.plan."""
    hiding = set(PUBLIC_FUNCTIONS) & {room_of(path) for path in sources()}
    assert not hiding


EVERY_FUNCTION = """
import importlib, pkgutil, ropext
for module in pkgutil.walk_packages(ropext.__path__, "ropext."):
    importlib.import_module(module.name)
for name in ropext.__all__:
    if name == "__version__":
        continue
    try:
        getattr(ropext, name)()
    except (TypeError, ropext.errors.RopextError) as error:
        print(name, type(error).__name__)
"""


def test_every_function_answers_after_every_module_was_imported() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_FUNCTION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answered = {line.split()[0] for line in done.stdout.splitlines()}
    assert answered == {*ropext.__all__} - {"__version__"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ropext.bundled", "MODELS"),
        ("ropext.bundled", "DATA"),
        ("ropext.errors", "RopextError"),
        ("ropext.errors", "UsageError"),
        ("ropext.patching", "unpatch"),
        ("ropext.rope", "Rope"),
        ("ropext.scaling", "yarn"),
        ("ropext.scaling.method", "Method"),
        ("ropext.training", "launch"),
        ("ropext.training.loss", "use_sliced_loss"),
        ("ropext.results.values", "Value"),
    ],
)
def test_a_public_address_stays(module: str, name: str) -> None:
    owner = import_module(module)
    assert hasattr(owner, name) or import_module(f"{module}.{name}")


def test_public_files_keep_their_addresses() -> None:
    assert (PACKAGE / "demo/checkpoint/config.json").is_file()
    for name in ("table.json", "gguf.json"):
        assert json.loads((PACKAGE / "loaders" / name).read_text("utf-8"))


def test_no_class_name_occurs_twice() -> None:
    """A reader who searches for a class finds one."""
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_of(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


PROBE = """
import contextlib, io, json, os, sys
commands = json.loads(os.environ["COMMANDS"])
for command in commands:
    sys.argv = ["ropext", *command]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            import runpy
            runpy.run_module("ropext", run_name="__main__")
        except SystemExit as end:
            assert not end.code, (command, end.code)
    assert out.getvalue().strip(), command
roots = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(roots)))
"""


def loaded_by(commands: list[list[str]]) -> set[str]:
    """Return the top-level packages in memory after running commands in one fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        env=os.environ | {"COMMANDS": json.dumps(commands), "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def subcommands() -> list[str]:
    from ropext.cli.app import COMMANDS

    return sorted(COMMANDS)


def test_help_loads_nothing_heavy() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in subcommands())]
    loaded = loaded_by(commands) & set(FORBIDDEN_AT_START)
    assert not loaded


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_inspect_and_plan_load_nothing_heavy(tmp_path: Path, json_too: list[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "rope_theta": 50_000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    model = str(tmp_path)
    commands = [
        ["inspect", model, *json_too],
        ["plan", model, "--factor", "4", *json_too],
        ["extend", "ropext://demo", "--factor", "4", "--dry-run", "-o", f"{model}-out", *json_too],
        ["methods"],
    ]
    loaded = loaded_by(commands) & set(FORBIDDEN_AT_START)
    assert not loaded


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, ropext; print(*sys.modules)"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    loaded = set(done.stdout.split()) & {*FORBIDDEN_AT_START, "typer"}
    assert not loaded


def tracked_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout: the files that belong to the repository are not known")
    return [REPOSITORY / name for name in done.stdout.split("\0") if name]


def test_no_file_names_the_folders_of_its_authors_machine() -> None:
    """Paths of the workshop, and the folder next to the repository there, must not occur."""
    place = re.compile(r"(?<![\w.:/])/" + r"work/\w|\.\./" + r"shared|\bshared/" + "reference")
    wrong = []
    for path in tracked_files():
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # weights; or a file that is being removed
        wrong += [
            f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if len(line) < 10_000 and place.search(line)
        ]
    assert not wrong, "\n".join(wrong)
