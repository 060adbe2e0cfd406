"""No code from strangers: what could run or unpickle something, call by call, and by attack."""

import ast
import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import stranger
from command_line import drive
from stranger import write_stranger
from tiny_checkpoint import make_llama

import ropext
from ropext.base.errors import InputError

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
OWN_FILES = ("demo/",)
# From a config and an empty state dict, on the meta device: no file is read.
NO_FILES = {("verifying/proof/tensors.py", "cls.from_pretrained")}


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
        # exec("") runs nothing: it takes back CPython's note of an interrupt (ropext/cli/app.py).
        assert called not in FORBIDDEN_NAMES or ast.unparse(node) == "exec('')", where
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


def test_every_python_that_is_started_keeps_the_working_folder_out():
    """`-m` and `-c` put it on the path, unless -P or -I comes first; in the package also a script,
    whose own folder is then none of its modules."""
    root, seen = PACKAGE.parent, 0
    for place in ("ropext", "scripts", "benchmarks"):
        for path in (root / place).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                words = node.elts if isinstance(node, ast.List) else getattr(node, "args", ())
                for first, second in pairwise(words if isinstance(words, list) else ()):
                    if ast.unparse(first) == "sys.executable" or (
                        ast.unparse(first) == "python" and isinstance(second, ast.Constant)
                    ):
                        seen += 1
                        option = ast.unparse(second).strip("'")
                        own = place != "ropext" and not option.startswith("-")
                        assert own or option in ("-P", "-I"), f"{path}:{node.lineno}: {option}"
    assert seen >= 15


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def test_a_pickled_adapter_is_not_opened(tmp_path):
    from ropext.models.adapter import add_adapter

    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(InputError, match="pickled adapter"):
        add_adapter(None, str(tmp_path))
    assert not (tmp_path / "ran").exists()


LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
# Each either ran code, opened a path, hung, or filled the memory.
HOSTILE_ADAPTERS = {
    "imports a module": {"megatron_config": {"a": 1}, "megatron_core": "evil"},
    "opens a pickle": {"peft_type": "PROMPT_TUNING", "prompt_tuning_init_state_dict_path": "/x"},
    "backtracks": {"target_modules": "(.*a)*(.*a)*(.*a)*b"},
    "backtracks in a list": {"target_modules": ["q_proj", "(x+x+)+y"]},
    "backtracks in a rank": {"rank_pattern": {"(x+x+)+y": 2}},
    "backtracks in a copy": {"modules_to_save": ["(x+x+)+y"]},
    "backtracks in a layer": {"layers_to_transform": [0], "layers_pattern": "(x+x+)+y"},
    "repeats layers": {"layer_replication": [[0, 1]] * 200_000},
    "a rank beyond all": {"r": 10**7},
    "a rank of text": {"r": "2"},
    "a rank beyond its file": {"r": 16_000},
    "copies whole layers": {"modules_to_save": ["layers.0", "layers", "model"]},
    "decomposes weights": {"init_lora_weights": "pissa_niter_1000000000"},
    "names too many": {"target_modules": ["q_proj"] * 20_001},
    "of a later PEFT": {"loads_code_from": "here"},
    "no names at all": {"target_modules": {"q_proj": 1}},
}


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """Write a tiny model and an adapter of it, which PEFT made."""
    import peft
    import transformers

    folder = tmp_path_factory.mktemp("lora")
    make_llama(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    made.save_pretrained(folder / "adapter")
    return folder


@pytest.mark.parametrize("kind", HOSTILE_ADAPTERS)
def test_a_hostile_adapter_is_one_sentence(lora, tmp_path, monkeypatch, kind):
    import transformers

    from ropext.models.adapter import add_adapter

    (tmp_path / "evil.py").write_text(stranger.CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(lora / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HOSTILE_ADAPTERS[kind]))
    model = transformers.AutoModelForCausalLM.from_pretrained(lora / "base")
    with pytest.raises(InputError) as caught:
        add_adapter(model, "adapter")
    said = str(caught.value)
    assert "which is not supported (" in said or "cannot be put on this model: " in said
    assert len(said) < 400
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["adapter", "documents", "run", "inside"])
def test_links_out_of_a_strangers_folder_are_refused(tmp_path, kind):
    """Models and their folders: tests/checkpoint/test_snapshot.py."""
    from ropext.base.workdir import read, write_manifest
    from ropext.evaluation.corpus.sources import Source, read_documents
    from ropext.files.checkpoint.adapter import read_lora

    write_manifest(tmp_path, {"command": "eval", "decides": {}} | LORA)
    (tmp_path / "run.json").rename(tmp_path / "secret.json")
    (tmp_path / "secret.txt").write_text("a private key")
    place = tmp_path / "place"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"")
    if kind == "run":  # the manifest is their own, a record is not
        (place / "run.json").write_bytes((tmp_path / "secret.json").read_bytes())
    name = {"adapter": "adapter_config.json", "run": "stages/plan/run.json"}.get(kind, "a.txt")
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / "own.txt").write_text("a text")
    target = place / "own.txt" if kind == "inside" else tmp_path / f"secret{Path(name).suffix}"
    (place / name).symlink_to(target)
    readers = {"adapter": read_lora, "run": read}
    reader = readers.get(kind, lambda place: list(read_documents(Source(str(place)))))
    if kind == "inside":
        assert [own.content for own in reader(place)] == ["a text", "a text"]
        return
    with pytest.raises(InputError) as caught:
        reader(place)
    assert f"{place / name} is a link to {target}, outside of {place}" in str(caught.value)


def test_an_adapter_that_peft_wrote_reads_as_peft_reads_it(lora, tmp_path):
    """The results are equal bit for bit, for every option of a LoRA, and also if bfloat16 would
    round."""
    import peft
    import torch
    import transformers

    from ropext.models.adapter import add_adapter

    def fresh():
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(lora / "base", dtype=torch.bfloat16)

    more = {"modules_to_save": ["norm"], "rank_pattern": {"layers.0.self_attn.q_proj": 3}}
    config = peft.LoraConfig(**(LORA | more | {"use_dora": True, "exclude_modules": ["k_proj"]}))
    made = peft.get_peft_model(fresh(), config)
    torch.manual_seed(0)
    for weight in made.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    made.save_pretrained(tmp_path)
    tokens = torch.arange(20)[None]
    stock = peft.PeftModel.from_pretrained(fresh(), tmp_path).eval()
    assert torch.equal(add_adapter(fresh(), str(tmp_path))(tokens).logits, stock(tokens).logits)
    assert not torch.equal(fresh()(tokens).logits, stock(tokens).logits)


@pytest.mark.slow
def test_a_pickle_next_to_safetensors_is_not_opened(tmp_path):
    """Stock would take pytorch_model.bin if no file is called model.safetensors."""
    from ropext.files.checkpoint import open_snapshot
    from ropext.models.load import load_model, loading_of
    from ropext.options.evaluate import Evaluate

    base = make_llama(tmp_path / "base")
    (base / "model.safetensors").rename(base / "other.safetensors")
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    options = Evaluate(tasks=("passkey",), device="cpu")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(open_snapshot(str(base), weights=True), loading_of(options))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_remote_code_runs_only_on_request(tmp_path):
    """So the code that no command runs unasked is code that would run: as the model is read, and in
    the proof. tests/cli/test_every_command.py runs every command on such a model."""
    ran = tmp_path / "ran"
    write_stranger(tmp_path / "base", ran)
    recipe = (
        'model: base\nextend: {factor: 2}\nevaluate: {data: "ropext://held-out", max_docs: 1}\n'
    )
    (tmp_path / "r.yaml").write_text(recipe)
    (tmp_path / "asks.yaml").write_text("trust_remote_code: true\n" + recipe)
    asks = ("--trust-remote-code",)
    runs = [
        ("run", "asks.yaml", "-o", "never"),
        ("run", "r.yaml", "-o", "out", *asks),
        ("eval", "base", "--data", "ropext://held-out", "--max-docs", "1", *asks),
    ]
    (refused, _, err), *_ = drive(tmp_path, runs)
    assert refused == 2
    assert "asks.yaml, line 1: no recipe allows" in err
    told = ran.read_text()
    assert "ropext eval\n" in told
    assert "/proof/child.py " in told
