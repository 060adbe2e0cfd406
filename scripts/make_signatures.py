"""Write ropext/__init__.pyi: the public functions as editors and mypy see them, with all options.

    python scripts/make_signatures.py

The arguments in a function's own source are copied; the options come from the signature that Python
shows (ropext/options/door.py). One line holds one function. A test checks that the file is up to
date.
"""

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# This script's own tree, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import ropext
from ropext.options.fields import TextsOrPlace

PATH = Path(ropext.__file__).with_suffix(".pyi")
HEAD = """\
\"\"\"The public functions with all their options; written by scripts/make_signatures.py.\"\"\"
# fmt: off
# ruff: noqa
"""
ALWAYS = {
    "Literal": "from typing import Literal",
    "Optional": "from typing import Optional",
    "Sequence": "from collections.abc import Sequence",
    "TextsOrPlace": "from ropext.options.fields import TextsOrPlace",
    "Path": "from pathlib import Path",
    "Gate": "from ropext.results.gates import Gate",
}


def imports_of(module: ModuleType, tree: ast.Module) -> dict[str, str]:
    """Return name -> the import that gives it, with imports of TYPE_CHECKING and the module's own
    definitions."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {own.name: f"import {own.name}" for own in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {own.name: f"from {node.module} import {own.name}" for own in node.names}
    for node in tree.body:
        names = [node.name] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = [node.targets[0].id]
        found |= {name: f"from {module.__name__} import {name}" for name in names}
    return found


def of_python(parameter: inspect.Parameter) -> str:
    """Return one option with the types that a caller may give."""
    kind = inspect.formatannotation(parameter.annotation)
    kind = kind.replace(inspect.formatannotation(TextsOrPlace), "TextsOrPlace")
    kind = kind.replace("collections.abc.", "").replace("pathlib.", "")
    return f"{parameter.name}: {kind}={parameter.default!r}"


def definition(own: Any) -> tuple[ModuleType, ast.Module, ast.FunctionDef]:
    module = import_module(own.__module__)
    tree = ast.parse(inspect.getsource(module))
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return module, tree, next(node for node in nodes if node.name == own.__name__)


def shown_default(
    arg: ast.arg, default: ast.expr | None, shown: inspect.Parameter
) -> ast.expr | None:
    """Return the default of an argument; if Python shows None in place of it, None may be given."""
    if default is None or shown.default is not None or isinstance(default, ast.Constant):
        return default
    arg.annotation = ast.BinOp(arg.annotation, ast.BitOr(), ast.Constant(None))
    return ast.Constant(None)


def arguments_of(name: str, node: ast.FunctionDef) -> str:
    """Return the source's arguments with the options spelled out."""
    shown = inspect.signature(getattr(ropext, name)).parameters
    args = node.args
    args.kwarg = None
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    args.kw_defaults = [shown_default(arg, value, shown[arg.arg]) for arg, value in pairs]
    stated = {arg.arg for arg in (*args.args, *args.kwonlyargs, args.vararg) if arg is not None}
    options = [of_python(one) for one in shown.values() if one.name not in stated]
    star = ["*"] if options and not args.kwonlyargs else []
    return ", ".join([ast.unparse(args), *star, *options])


def function(name: str) -> tuple[str, set[str]]:
    """Return one function, and the imports it takes."""
    module, tree, node = definition(getattr(ropext, name))
    for arg in (*node.args.args, *node.args.kwonlyargs):
        if isinstance(arg.annotation, ast.Constant):  # a name in quotes
            arg.annotation = ast.parse(arg.annotation.value, mode="eval").body
    arguments = arguments_of(name, node)
    returns = ast.unparse(node.returns).strip("'") if node.returns else "None"
    text = f"def {name}({arguments}) -> {returns}: ..."
    used = {own.id for own in ast.walk(ast.parse(text)) if isinstance(own, ast.Name)}
    known = imports_of(module, tree) | ALWAYS
    return text, {known[own] for own in used if own in known}


def stub() -> str:
    """Return the whole file."""
    made = [function(name) for name in ropext.__all__ if name != "__version__"]
    imports = sorted({line for _, lines in made for line in lines})
    modules = [f"from ropext import {name} as {name}" for name in ropext._MODULES]
    return "\n".join(
        [HEAD, *imports, *modules, "", "__version__: str", "", *(text for text, _ in made), ""]
    )


def main() -> None:
    PATH.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
