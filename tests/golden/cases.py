"""What is recorded of every command: a name, the words, and the output whose files belong to it.

One folder, one order: later lines use what earlier ones wrote.
"""

from dataclasses import dataclass
from pathlib import Path

RECIPE = """\
model: ropext://demo
seed: 3
extend: {method: yarn, factor: 2}
finetune: {data: ropext://tuning, steps: 2, batch_tokens: 1024, eval_documents: 2}
evaluate: {data: ropext://held-out, max_docs: 2, lengths: "256,512", tasks: [passkey], items: 2}
"""
BAD_RECIPES = {
    "no-model": "extend: {factor: 2}\n",
    "no-extend": "model: ropext://demo\n",
    "unknown-section": "model: ropext://demo\n\nextnd: {factor: 2}\n",
    "unknown-key": "model: ropext://demo\nextend:\n  factor: 2\n  metod: yarn\n",
    "wrong-type": "model: ropext://demo\nextend:\n  factor: four\n",
    "boolean-number": "model: ropext://demo\nextend:\n  target: true\n",
    "out-of-range": "model: ropext://demo\nextend: {factor: 2}\nfit: {data: d.txt, steps: 0}\n",
    "two-say-one-thing": "model: ropext://demo\nextend: {factor: 2, target: 512}\n",
    "twice": "model: ropext://demo\nextend: {factor: 2}\nextend: {factor: 4}\n",
    "no-data": "model: ropext://demo\nextend: {factor: 2}\nfinetune: {steps: 3}\n",
    "missing-data": "model: ropext://demo\nextend: {factor: 2}\nfinetune:\n  data: ./gone.txt\n",
    "said-elsewhere": "model: ropext://demo\nextend: {factor: 2}\nfit: {data: d, factor: 4}\n",
    "foreign-knob": "model: ropext://demo\nextend: {factor: 2, method: pi, beta_fast: 3}\n",
    "bad-gate": "model: ropext://demo\nextend: {factor: 2}\nevaluate: {data: d, fail_if: [tail]}\n",
    "a-grid": "model: ropext://demo\nextend: {factor: [2, 4]}\n",
    "bad-choice": "model: ropext://demo\nextend: {factor: 2}\nfinetune: {data: d, link: soft}\n",
    "not-yaml": "model: [ropext://demo\n",
    "a-list": "- model\n",
}


@dataclass(frozen=True)
class Case:
    """One command line, and the folder that it writes."""

    name: str
    words: tuple[str, ...]
    output: str | None = None
    processes: int = 1
    trained: bool = False  # it writes or reads numbers that were learned here


def _case(
    name: str, line: str, output: str | None = None, processes: int = 1, trained: bool = False
) -> Case:
    return Case(name, tuple(line.split()), output, processes, trained)


_TRAIN = "--data ropext://tuning --batch-tokens 1024"
_FIT = f"fit ropext://demo --factor 2 {_TRAIN} --steps 2 --held-out 8 --retrieval-items 2"
_TUNE = f"finetune long {_TRAIN} --steps 2 --eval-documents 2"
_EVAL = "--data ropext://held-out --max-docs 2 --lengths 256,512"

CASES = (
    _case("methods", "methods --json"),
    _case("method", "methods yarn"),
    _case("recipes", "recipes ls"),
    _case("schema", "schema"),
    _case("inspect", "inspect ropext://demo"),
    _case("inspect-json", "inspect ropext://demo --factor 4 --json"),
    _case("plan", "plan ropext://demo --factor 4"),
    _case("plan-json", "plan ropext://demo --factor 4 --method llama3 --json"),
    _case(
        "plan-measure", f"plan ropext://demo --factor 2 --measure {_EVAL.split()[1]} --max-docs 2"
    ),
    *(
        _case(
            f"extend-{method}",
            f"extend ropext://demo --factor 3 --method {method} --no-verify -o by-{method}",
            f"by-{method}",
        )
        for method in ("pi", "ntk", "dynamic", "by-parts", "llama3")
    ),
    _case("extend-abf", "extend ropext://demo --factor 3 --method abf --theta 1e6 -o abf", "abf"),
    _case("extend", "extend ropext://demo --factor 2 --method yarn --json -o long", "long"),
    _case("extend-dry", "extend ropext://demo --factor 2 --dry-run"),
    _case("extended-again", "extend long --factor 2 -o longer", "longer"),
    _case("inspect-extended", "inspect long"),
    _case("plan-extended", "plan long"),
    _case("verify", "verify long"),
    _case("verify-json", "verify long --against ropext://demo --deep --json"),
    _case("fit-dry", f"{_FIT} --dry-run"),
    _case("fit", f"{_FIT} --start yarn -o fitted", "fitted"),
    _case("fit-yarn", f"{_FIT} --within yarn -o fitted-yarn --json", "fitted-yarn"),
    _case("finetune-dry", f"{_TUNE} --dry-run --json"),
    _case("finetune", f"{_TUNE} --control -o tuned", "tuned"),
    _case("finetune-pose", f"{_TUNE} --strategy pose --window 128 -o posed", "posed"),
    _case("finetune-glued", f"{_TUNE} --packing glued -o glued --json", "glued"),
    _case("finetune-questions", f"{_TUNE} --retrieval-share 0.5 -o asked", "asked"),
    _case("eval-dry", f"eval long {_EVAL} --dry-run"),
    _case(
        "eval",
        f"eval tuned {_EVAL} --tasks passkey,mkey --items 2 -o measured",
        "measured",
        trained=True,
    ),
    _case(
        "eval-methods", f"eval ropext://demo --method pi,yarn --factor 2 {_EVAL} -o grid", "grid"
    ),
    _case("eval-gate", f"eval long {_EVAL} --fail-if short_tax.value>-1"),
    _case("compare", "compare measured grid"),
    _case("run-dry", "run recipe.yaml -o ran --dry-run"),
    _case("run", "run recipe.yaml -o ran", "ran"),
    *(_case(f"recipe-{name}", f"run {name}.yaml -o gone") for name in BAD_RECIPES),
    _case("finetune-two", f"{_TUNE} -o shared", "shared", processes=2),
    _case("eval-two", f"eval long {_EVAL} -o measured-two", "measured-two", processes=2),
)


def write_inputs(folder: Path) -> None:
    """The files that the lines name."""
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
    for name, text in BAD_RECIPES.items():
        (folder / f"{name}.yaml").write_text(text, "utf-8")
