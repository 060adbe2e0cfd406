"""No code from strangers: what could run or unpickle something, call by call, and by attack."""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
from test_every_command import drive
from tiny_checkpoint import make_llama

import ropext
from ropext.bundled import MODELS
from ropext.errors import InputError

PACKAGE = Path(ropext.__file__).parent
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "tarfile",
    "zipfile",
}
# What was made here: by `benchmarks/demo_checkpoint.py`, and random weights just written.
OWN_FILES = ("demo/", "conformance/")
# From a config and an empty state dict, on the meta device: no file is read.
NO_FILES = {("proof/child.py", "cls.from_pretrained")}


def calls():
    for path in sorted(PACKAGE.rglob("*.py")):
        name, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield name, ast.unparse(node.func), node


def keywords(node):
    return {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_models_are_loaded_without_code_and_without_pickles():
    """Every from_pretrained says both; `**keywords` comes from a dict in that file which does."""
    seen = 0
    for name, called, node in calls():
        if not called.endswith(".from_pretrained") or (name, called) in NO_FILES:
            continue
        seen += 1
        given = keywords(node)
        if None in given:  # **keywords
            source = (PACKAGE / name).read_text()
            given |= {
                k: "True" for k in ("trust_remote_code", "use_safetensors") if f'"{k}"' in source
            }
        if called.startswith("PeftModel") or called.endswith("PeftModel.from_pretrained"):
            continue  # takes neither; see test_pickled_adapters
        if not name.startswith(OWN_FILES):
            assert given.get("trust_remote_code"), f"{name}:{node.lineno}"
        if "Tokenizer" not in called and "Config" not in called and not name.startswith(OWN_FILES):
            assert given.get("use_safetensors") == "True", f"{name}:{node.lineno}"
    assert seen >= 8


def test_nothing_is_unpickled_or_evaluated():
    for name, called, node in calls():
        where, given = f"{name}:{node.lineno}", keywords(node)
        assert called not in FORBIDDEN_NAMES, where
        if called == "torch.load":
            assert given.get("weights_only") == "True", where
        if called == "np.load":
            assert given.get("allow_pickle", "False") == "False", where
        if called == "yaml.load":
            assert "yaml.BaseLoader" in ast.unparse(node) or "SafeLoader" in ast.unparse(node), (
                where
            )
        assert given.get("shell", "False") == "False", where
        assert given.get("trust_remote_code") != "True", where
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not FORBIDDEN_MODULES.intersection(n.partition(".")[0] for n in names), path


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def test_a_pickled_adapter_is_not_opened(tmp_path):
    from ropext.evaluation.loading import add_adapter

    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(InputError, match="pickled adapter"):
        add_adapter(None, str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_pickle_beside_other_safetensors_is_not_opened(tmp_path):
    """Stock would take pytorch_model.bin where no file is called model.safetensors."""
    from ropext.checkpoint import open_snapshot
    from ropext.evaluation.loading import load_model
    from ropext.options.evaluate import Evaluate

    base = make_llama(tmp_path / "base")
    (base / "model.safetensors").rename(base / "other.safetensors")
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    options = Evaluate(tasks=("passkey",), device="cpu")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(open_snapshot(str(base), weights=True), options, False)
    assert not (tmp_path / "ran").exists()


EVIL_CODE = "import pathlib\npathlib.Path({ran!r}).touch()\nclass C: pass\n"
# Code of its own for everything that transformers would load.
AUTO_MAPS = {
    "config.json": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"},
    "tokenizer_config.json": {"AutoTokenizer": ["evil.C", "evil.C"]},
}


@pytest.mark.slow
def test_no_command_runs_the_models_code(tmp_path):
    """Every command that reads a model; what tokens do is in tests/reliability/test_secrets.py."""
    base, ran = tmp_path / "base", tmp_path / "ran"
    shutil.copytree(MODELS["ropext://demo"], base)
    for name, classes in AUTO_MAPS.items():
        known = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(known | {"auto_map": classes}))
    (base / "evil.py").write_text(EVIL_CODE.format(ran=str(ran)))
    wish, read = ("--factor", "2"), ("--data", "ropext://held-out", "--max-docs", "1")
    train = ("--data", "ropext://tuning", "--steps", "1", "--batch-tokens", "1024")
    runs = [
        ("inspect", "base", "--json"),
        ("plan", "base", *wish, "--json"),
        ("extend", "base", *wish, "-o", "out"),
        ("extend", "base", *wish, "-o", "out2", "--no-verify", "--link", "symlink"),
        ("verify", "out"),
        ("fit", "base", *wish, *train, "--held-out", "2", "--retrieval-items", "0", "-o", "fit"),
        ("eval", "out", *read, "-o", "eval"),
        ("finetune", "out", *train, "--eval-documents", "0", "-o", "fine"),
    ]
    for words, (code, _, err) in zip(runs, drive(tmp_path, runs), strict=True):
        assert code == 0, (words, err)
    recipe = (
        'model: base\nextend: {factor: 2}\nevaluate: {data: "ropext://held-out", max_docs: 1}\n'
    )
    (tmp_path / "r.yaml").write_text(recipe)
    (tmp_path / "asks.yaml").write_text("trust_remote_code: true\n" + recipe)
    runs = [("run", "asks.yaml", "-o", "never"), ("run", "r.yaml", "-o", "whole")]
    (refused, _, err), (code, *_) = drive(tmp_path, runs)
    assert (refused, code) == (2, 0)
    assert "asks.yaml, line 1: no recipe allows" in err
    assert not ran.exists()
    for words in (("eval", "out", *read), ("run", "r.yaml", "-o", "trusted")):
        drive(tmp_path, [(*words, "--trust-remote-code")])
        assert ran.exists()  # where it is asked for, it would have run
        ran.unlink()
