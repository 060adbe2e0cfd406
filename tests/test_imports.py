"""How many of the package's files one command imports: what its reader has to know.

A number grows only on purpose, by an edit here.
"""

import json
import re
import subprocess
import sys

import pytest
from command_line import environment

COUNT = """
import json, os, sys
slow = json.loads(sys.argv[2])

def apart():
    # The proof's own process takes seconds; made here, it leaves none of its files to be counted.
    from ropext.families import stock
    def child(*job):
        before = {*sys.modules}
        from proving import here
        answers = here(*job)
        for name in {name for name in sys.modules if name.startswith("ropext")} - before:
            module, (parent, _, leaf) = sys.modules.pop(name), name.rpartition(".")
            vars(sys.modules.get(parent, module)).pop(leaf, None)
        return answers
    stock.ask_child = child

if slow:  # what takes seconds and is none of the package's files
    import peft, torch, transformers
    from transformers import Trainer
    from transformers.models.llama import modeling_llama
for line in json.loads(sys.argv[1]):
    if os.fork():
        assert not os.wait()[1], line
        continue
    if slow and not line.startswith("eval"):
        apart()
    from ropext.cli.app import main
    sys.argv = ["ropext", *line.split()]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    files = set()
    for name, module in sys.modules.items():
        package, _, rest = name.partition(".")
        # One more method or task is one more file everywhere, on purpose.
        if package == "ropext" and not rest.startswith(("scaling.", "tasks.")):
            files.add(module.__file__)
    print("files", len(files), file=sys.stderr, flush=True)
    os._exit(0)
"""
_TRAIN = "ropext://demo --factor 2 --data ropext://tuning --batch-tokens 1024 --steps 1"
QUICK = {
    "inspect ropext://demo": 69,
    "plan ropext://demo --factor 4": 75,
    "extend ropext://demo --factor 4 --no-verify -o quick": 84,
}
SLOW = {
    "extend ropext://demo --factor 4 -o out": 84,
    "verify out": 87,
    "eval ropext://demo --data ropext://held-out --max-docs 1 --lengths 256": 137,
    "finetune out --data ropext://tuning --batch-tokens 2048 --steps 1 -o tuned": 164,
    f"fit {_TRAIN} --held-out 8 --retrieval-items 2 -o fitted": 166,
    "run recipe.yaml -o ran": 158,
}
RECIPE = """\
model: ropext://demo
extend: {factor: 2}
evaluate: {data: ropext://held-out, max_docs: 1, lengths: "256"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imports")
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
    return folder


def imported(folder, lines, slow=False):
    """Return the number of files that each command line imports."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, json.dumps(lines), json.dumps(slow)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(count) for count in re.findall(r"^files (\d+)$", done.stderr, re.MULTILINE)]


@pytest.mark.parametrize("line", QUICK)
def test_a_quick_command_imports_few_files(folder, line):
    assert imported(folder, [line])[0] <= QUICK[line]


@pytest.mark.slow
def test_a_long_command_imports_few_files(folder):
    # One folder, in this order: later lines read what earlier ones wrote.
    counts = dict(zip(SLOW, imported(folder, list(SLOW), slow=True), strict=True))
    assert not {line: count for line, count in counts.items() if count > SLOW[line]}
