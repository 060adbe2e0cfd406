"""The recorded commands, letter by letter: the ten that a user sees first.

They share one folder and one order: later lines use the output of earlier ones. Other commands and
options are tested elsewhere by exit code and numbers, so that a better word touches one transcript
or two.
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
_TRAIN = "--data ropext://tuning --batch-tokens 1024 --steps 2"
_READ = "--max-docs 2 --lengths 256,512"


@dataclass(frozen=True)
class Case:
    """One command line, and the folder that it writes.

    Only one transcript prints each of its files; others name it.
    """

    name: str
    line: str
    output: str | None = None
    after: str | None = None  # the case whose output it reads
    shown: tuple[str, ...] = ()  # files of the output whose content is recorded
    learned: bool = False  # it writes or reads numbers that were learned here

    @property
    def words(self) -> list[str]:
        return self.line.split()


CASES = (
    Case("inspect", "inspect ropext://demo --factor 4"),
    Case("plan", "plan ropext://demo --factor 4"),
    Case("plan-measure", "plan ropext://demo --factor 2 --measure ropext://held-out --max-docs 2"),
    Case(
        "extend",
        "extend ropext://demo --factor 2 --method yarn -o long",
        output="long",
        shown=(
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "ropext.json",
            "tokenizer_config.json",
        ),
    ),
    Case("verify", "verify long --against ropext://demo --deep", after="extend"),
    Case(
        "fit",
        f"fit ropext://demo --factor 2 {_TRAIN} --held-out 8 --retrieval-items 2 --start yarn "
        "-o fitted",
        output="fitted",
        shown=("config.json", "fit/losses.json", "fit/numbers.json", "pair-factors.json"),
    ),
    Case(
        "finetune",
        f"finetune long {_TRAIN} --eval-documents 2 --control -o tuned",
        output="tuned",
        after="extend",
        shown=(
            "adapter/README.md",
            "adapter/adapter_config.json",
            "model.safetensors",
            "training/losses.json",
            "training/numbers.json",
            "training/settings.json",
        ),
    ),
    Case(
        "eval",
        f"eval tuned --data ropext://held-out {_READ} --tasks passkey,mkey --items 2 -o measured",
        output="measured",
        after="finetune",
        shown=("documents.json", "items.jsonl", "report.md", "results.json"),
        learned=True,
    ),
    Case("compare", "compare measured:base measured:untouched measured:tuned", after="eval"),
    Case("run", "run recipe.yaml -o ran", output="ran", shown=("README.md",)),
)


def needed(names: list[str]) -> list[Case]:
    """Return the named cases and the cases whose output they read, in their order; all cases if no
    name is given."""
    by_name = {case.name: case for case in CASES}
    wanted = set()
    for name in names or by_name:
        link: str | None = name
        while link is not None:
            wanted.add(link)
            link = by_name[link].after
    return [case for case in CASES if case.name in wanted]


def write_inputs(folder: Path) -> None:
    """Write the files that the lines name."""
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
