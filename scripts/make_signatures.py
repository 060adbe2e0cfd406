"""Write ropext/__init__.pyi: the public functions as editors and mypy see them, with all options.

    python scripts/make_signatures.py

What stands in a function's own source is taken as it is; the options of its **options follow from
their class. One line holds one function. A test checks that the file is what this writes.
"""

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.fields import FieldInfo

# The tree in which this script lies, whichever ropext is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

import ropext
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Choosing, Extend, Writing
from ropext.options.fields import PLACE_ROLES, Role, item_of, role_of
from ropext.options.training import Finetune, Fit

PATH = Path(ropext.__file__).with_suffix(".pyi")
HEAD = """\
\"\"\"The public functions with all their options; written by scripts/make_signatures.py.\"\"\"
# fmt: off
# ruff: noqa
"""
OPTIONS = {
    "evaluate": (Evaluate,), "extend": (Extend, Writing, Choosing), "finetune": (Finetune,),
    "fit": (Fit,), "patch": (Extend,), "plan": (Extend,),
}  # fmt: skip
ALWAYS = {
    "Literal": "from typing import Literal",
    "Sequence": "from collections.abc import Sequence",
    "TextsOrPlace": "from ropext.options.fields import TextsOrPlace",
    "Gate": "from ropext.results.gates import Gate",
}


def imports_of(module: ModuleType, tree: ast.Module) -> dict[str, str]:
    """Name -> the import that gives it, those of TYPE_CHECKING too, and what the module defines."""
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


def of_python(name: str, info: FieldInfo) -> str:
    """One option, as what a caller may give."""
    item, is_list, choices = item_of(info)
    role = role_of(info)
    kind = f"Literal{list(choices)}" if choices else item.__name__
    if is_list:
        kind = f"str | Sequence[{'int | str' if name == 'lengths' else kind}]"
    elif role is Role.DOCUMENTS:
        kind = "TextsOrPlace"
    elif role in PLACE_ROLES:
        kind = "str | Path"
    none = " | None" if info.default is None else ""
    return f"{name}: {kind}{none}={info.default!r}"


def definition(own: Any) -> tuple[ModuleType, ast.Module, ast.FunctionDef]:
    module = import_module(own.__module__)
    tree = ast.parse(inspect.getsource(module))
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return module, tree, next(node for node in nodes if node.name == own.__name__)


def arguments_of(name: str, node: ast.FunctionDef) -> str:
    """As they stand, the options spelled out."""
    if name not in OPTIONS:
        return ast.unparse(node.args)
    node.args.kwarg = None
    parts = [ast.unparse(node.args), *([] if node.args.kwonlyargs else ["*"])]
    stated = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    fields = {key: info for kind in OPTIONS[name] for key, info in kind.model_fields.items()}
    return ", ".join([*parts, *(of_python(k, v) for k, v in fields.items() if k not in stated)])


def function(name: str) -> tuple[str, set[str]]:
    """One function, and the imports it takes."""
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
    """The whole file."""
    made = [function(name) for name in ropext.__all__ if name != "__version__"]
    imports = sorted({line for _, lines in made for line in lines})
    return "\n".join([HEAD, *imports, "", "__version__: str", "", *(text for text, _ in made), ""])


def main() -> None:
    PATH.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
