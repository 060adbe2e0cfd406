"""Count how hard the package is to read, by counts that a formatter or a squeeze does not change.

python scripts/house.py prints each count, its ceiling (in tests/test_house.py, which fails above
it) and its goal. Never lower a count by worse code: if the table and a reader disagree, the reader
is right.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ropext"
# What the counts are to come down to: what codebases of the field that are easy to change have.
GOALS = {
    "nodes a statement": 7.6,
    "comprehensions": 40.0,
    "conditional expressions": 25.0,
    "starred": 8.0,
    "packed assignments": 3.0,
    "Any": 20.0,
    "functions of more than six parameters": 12.0,
    "files that import more than twenty-five others": 0.0,
    "species tests": 6.0,
}
PER_THOUSAND = (
    "comprehensions",
    "conditional expressions",
    "starred",
    "packed assignments",
    "Any",
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_PARAMETERS = 6
MOST_IMPORTS = 25
# Questions of which kind a model or its carrier is. In these files alone they are the subject.
SPECIES = ("container", "growth", "is_gguf")
KINDS = ("GgufFile", "GgufCarrier", "Carrier")
OF_CARRIERS = (
    "planning/carrier.py",
    "planning/gguf_carrier.py",
    "files/gguf/",
    "families/loaders/gguf.py",
)


@dataclass
class Counts:
    """What was counted in the files so far."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    statements: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    starred: int = 0
    packed: int = 0
    anys: int = 0
    wide: int = 0
    far: int = 0
    species: int = 0

    def add_file(self, text: str, *, knows_species: bool = False) -> None:
        """Count one file; one of a carrier `knows_species`."""
        self.files += 1
        self.lines += text.count("\n")
        imported = set[str]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Load | ast.Store):
                continue
            self.nodes += 1
            self.add_node(node)
            if not knows_species and asks_species(node):
                self.species += 1
            if isinstance(node, ast.ImportFrom):
                imported |= modules_of(node)
        if len(imported) > MOST_IMPORTS:
            self.far += 1

    def add_node(self, node: ast.AST) -> None:
        """Count one node of a syntax tree."""
        if isinstance(node, ast.stmt):
            self.statements += 1
        if isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
        elif isinstance(node, ast.IfExp):
            self.conditionals += 1
        elif isinstance(node, ast.Starred):
            self.starred += 1
        elif isinstance(node, ast.Assign) and is_packed(node):
            self.packed += 1
        elif isinstance(node, ast.Name) and node.id == "Any":
            self.anys += 1
        elif isinstance(node, ast.FunctionDef) and parameters_of(node) > MOST_PARAMETERS:
            self.wide += 1

    def table(self) -> dict[str, float]:
        """Return each count by its name in GOALS; most are per 1,000 statements."""
        per_thousand = (
            self.comprehensions,
            self.conditionals,
            self.starred,
            self.packed,
            self.anys,
        )
        counts = {"nodes a statement": self.nodes / self.statements}
        for name, count in zip(PER_THOUSAND, per_thousand, strict=True):
            counts[name] = 1000 * count / self.statements
        counts["functions of more than six parameters"] = float(self.wide)
        counts["files that import more than twenty-five others"] = float(self.far)
        counts["species tests"] = float(self.species)
        return counts


def modules_of(node: ast.ImportFrom) -> set[str]:
    """Return the modules of the package that one import names."""
    module = node.module or ""
    if module == "ropext":
        return {f"ropext.{alias.name}" for alias in node.names}
    if module.startswith("ropext."):
        return {module}
    return set()


def is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment is of the kind `a, b = x, y`."""
    has_tuple_target = any(isinstance(target, ast.Tuple) for target in node.targets)
    return isinstance(node.value, ast.Tuple) and has_tuple_target


def asks_species(node: ast.AST) -> bool:
    """Return whether a node asks, or passes on, of which kind a model is: GGUF or directory, rotary
    or not."""
    if isinstance(node, ast.Attribute):
        return node.attr in SPECIES
    if isinstance(node, ast.arg | ast.keyword):
        return node.arg == SPECIES[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "isinstance" and ast.unparse(node.args[-1]) in KINDS
    return False


def parameters_of(node: ast.FunctionDef) -> int:
    """Return how many arguments a caller may give."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def count(package: Path = PACKAGE) -> Counts:
    """Count all files of a package."""
    counts = Counts()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        text = path.read_text(encoding="utf-8")
        counts.add_file(text, knows_species=place.startswith(OF_CARRIERS))
    return counts


def main() -> None:
    counts = count()
    print(f"{counts.files} files, {counts.lines} lines, {counts.statements} statements")
    print(f"{counts.nodes} nodes of syntax")
    for name, value in counts.table().items():
        print(f"{name:45} {value:7.1f}   goal {GOALS[name]:g}")


if __name__ == "__main__":
    main()
