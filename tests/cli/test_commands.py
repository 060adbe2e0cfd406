"""The commands as a user runs them, on a real tiny checkpoint."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import transcriptions

from ropext.scaling import METHODS
from ropext.version import __version__


def tree(directory):
    """Return every file under a directory with its hash."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_version_names_ropext_torch_and_transformers(ropext):
    code, out, _ = ropext("--version")
    assert code == 0
    assert out.splitlines()[0] == f"ropext {__version__}"
    assert [line.split()[0] for line in out.splitlines()] == ["ropext", "torch", "transformers"]


def test_inspect_prints_the_models_facts(ropext, llama):
    code, out, err = ropext("inspect", llama, "--target", 512)
    assert (code, err) == (0, "")
    assert "16 of 16 channels (8 rotary pairs, split in halves)" in out
    assert "theta        50,000" in out
    assert out.endswith(f"\nnext: ropext plan {llama} --target 512\n")
    listed = ropext("inspect", llama, "--target", 512, "--pairs")[1]
    slow = sum("the largest angle of training" in line for line in listed.splitlines())
    assert f"at 512       {slow} of 8 pairs reach angles that training never showed" in out
    assert "wavelength" in listed
    assert "wavelength" not in out
    data = json.loads(ropext("inspect", llama, "--json")[1])
    assert data["context"] == 128
    assert data["target"] == 256
    assert data["limits"]["tokenizer"] == 128
    # 2 layers, one key/value head of 16 channels, keys and values, 2 bytes each.
    assert data["kv_bytes_per_token"] == 2 * 2 * 16 * 2


def test_plan_json_is_one_document_and_changes_nothing(ropext, llama):
    before = tree(llama)
    code, out, _ = ropext("plan", llama, "--factor", 4, "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["context"], data["target"], data["method"]) == (128, 512, "yarn")
    assert data["config"]["rope_parameters"]["factor"] == 4.0
    assert tree(llama) == before


@pytest.mark.slow
def test_extend_verify_and_plan_again(ropext, llama, tmp_path):
    before = tree(llama)
    out_dir = tmp_path / "out"
    code, out, err = ropext("extend", llama, "--method", "ntk", "--factor", 4, "-o", out_dir)
    assert code == 0, err
    assert "verified with transformers" in out
    assert tree(llama) == before
    config = json.loads((out_dir / "config.json").read_text())
    # theta * 4^(16/14), as the NTK-aware formula has it.
    assert config["rope_theta"] == pytest.approx(50000.0 * 4 ** (16 / 14), rel=1e-12)
    assert config["max_position_embeddings"] == 512
    assert json.loads((out_dir / "tokenizer_config.json").read_text())["model_max_length"] == 512
    assert tree(out_dir)["model.safetensors"] == before["model.safetensors"]

    code, out, err = ropext("verify", out_dir, "--against", llama, "--deep", "--json")
    assert code == 0, err
    assert json.loads(out)["passed"]

    code, out, _ = ropext("plan", out_dir)
    assert code == 0
    assert "extended from 128 by ntk" in out

    config["rope_theta"] *= 1.01
    config["rope_parameters"]["rope_theta"] *= 1.01
    (out_dir / "config.json").write_text(json.dumps(config))
    code, out, err = ropext("verify", out_dir)
    assert code == 3
    assert out.count(" in the plan ") == 1
    assert err.endswith("1 of 6 checks failed\n")


@pytest.mark.slow
def test_a_failed_proof_exits_3_and_leaves_nothing(ropext, llama, tmp_path):
    # A tensor of the wrong shape: stock transformers would refuse the result.
    import numpy
    from safetensors.numpy import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"] = numpy.ones(7, "float32")
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    code, out, err = ropext("extend", llama, "--factor", 2, "-o", tmp_path / "out")
    assert (code, out) == (3, "")
    assert "model.norm.weight" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_extend_without_proof_imports_no_heavy_library(llama, tmp_path):
    code = (
        "import sys; sys.argv = ['ropext', 'extend', *sys.argv[1:]]\n"
        "from ropext.cli.app import main\n"
        "try: main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'peft', 'datasets'}\n"
        "    found = heavy & sys.modules.keys()\n"
        "    assert not found, found\n"
    )
    words = [llama, "--factor", "4", "-o", tmp_path / "out", "--no-verify", "--link", "hard"]
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out/model.safetensors").samefile(llama / "model.safetensors")


# The module that the interpreter is about to import when the signal comes. It comes while `exec`
# runs a text, as it does for a dataclass: then CPython would end `python -m` by the signal.
IMPORTED = {
    "at once": "typer",
    "as checkpoints are imported": "ropext.base.staging",
    "as the proof is imported": "ropext.verifying.proof",
}
STOP = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            exec("os.kill(os.getpid(), signal.SIGINT)")
sys.meta_path.insert(0, Finder())
from ropext.__main__ import main
main()
"""


@pytest.mark.needs("killpg")
@pytest.mark.parametrize("moment", [*IMPORTED, "while it proves", "by a scheduler"])
def test_an_interrupt_is_answered_and_leaves_nothing(llama, tmp_path, tmp_path_factory, moment):
    words = [sys.executable, "-m", "ropext", "extend", str(llama), "--factor", "2", "--json", "-o"]
    if moment in IMPORTED:
        words[2] = "stopping"
        room = tmp_path_factory.mktemp("stopping")
        (room / "stopping.py").write_text(STOP.format(name=IMPORTED[moment]))
        places = [str(room), *sys.path]
    else:
        places = sys.path
    # A session of its own: as on a terminal, the signal reaches the proof's process too.
    run = subprocess.Popen(
        [*words, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )
    if moment == "while it proves":
        assert "verifying" in run.stderr.readline()
        os.killpg(run.pid, signal.SIGINT)
    elif moment == "by a scheduler":
        assert "verifying" in run.stderr.readline()
        os.kill(run.pid, signal.SIGTERM)  # the process alone
    out, said = run.communicate(timeout=60)
    assert said.startswith("error: interrupted")
    assert json.loads(out)["exit_code"] == 130
    assert "Traceback" not in said
    assert run.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_plan_names_forms_as_the_methods_page_does(ropext, llama):
    """`default`, the rope type of a plain theta, says nothing to a reader."""
    text = ropext("plan", llama, "--factor", 4, "--method", "ntk", "--details")[1]
    assert "written as   theta\n" in text
    assert re.search(r"^ntk\* .* theta$", text, re.M)


def test_extend_dry_run_prints_what_plan_prints(ropext, llama, tmp_path):
    wish = ["--method", "pi", "--factor", 2]
    for details in ((), ("--details",)):
        shown = ropext("extend", llama, *wish, "--dry-run", *details)[1]
        assert shown == ropext("plan", llama, *wish, *details)[1]
    assert ropext("extend", llama, *wish, "-o", tmp_path / "out", "--details")[0] == 2


def test_a_dry_run_shows_the_plan_that_is_refused(ropext, tmp_path):
    from tiny_checkpoint import make_llama

    windowed = make_llama(tmp_path / "windowed", model_type="mistral", sliding_window=32)
    words = ["extend", windowed, "--factor", 2]
    refused = ropext(*words, "-o", tmp_path / "out", "--no-verify")
    code, out, err = ropext(*words, "--dry-run")
    assert (code, err) == (refused[0], refused[2]) == (2, err)
    assert "--even-so" in err
    shown = ropext("plan", windowed, "--factor", 2)[1]
    assert (out, refused[1]) == (shown, "")
    assert "extend needs --even-so" in " ".join(shown.split())
    assert ropext(*words, "--dry-run", "--even-so")[0] == 0


def test_an_extension_without_training_gives_the_same_bytes_twice(ropext, llama, tmp_path):
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        words = ["extend", llama, "--factor", 4, "-o", tmp_path / parent / "out", "--no-verify"]
        assert ropext(*words)[0] == 0
    one, two = tree(tmp_path / "one/out"), tree(tmp_path / "two/out")
    record = json.loads((tmp_path / "one/out/ropext.json").read_text())
    assert str(tmp_path / "one/out") in record["command"]  # the one difference: the command itself
    assert one.pop("ropext.json") != two.pop("ropext.json")
    assert one == two


def test_methods_are_listed_and_described(ropext):
    code, out, _ = ropext("methods")
    assert code == 0
    for name in METHODS:
        assert f"\n{name} " in "\n" + out
    assert "--beta-fast" in ropext("methods", "yarn")[1]
    code, _, err = ropext("methods", "yran")
    assert code == 2
    assert "did you mean yarn" in err


def test_every_knob_that_is_listed_is_an_option(ropext):
    names = ("yarn", "longrope", "abf", "llama3", "self-extend")
    page = "".join(ropext("methods", name)[1] for name in names)
    shown = {word for word in page.split() if word.startswith("--") and word != "--measure"}
    assert {"--window", "--group", "--literal"} <= shown
    assert {"--truncate", "--pair-factors", "--theta", "--low-freq-factor"} <= shown
    takes = ropext("plan", "--help-all")[1]
    assert all(flag in takes for flag in shown), shown


def test_the_program_has_one_name_also_as_a_module(llama):
    words = [sys.executable, "-m", "ropext", "--help"]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.stdout.startswith("Usage: ropext ")


def test_the_plan_groups_loaders_by_the_nearest_form_they_read(ropext, tmp_path):
    from tiny_checkpoint import make_llama

    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = make_llama(tmp_path / "scaled", rope_scaling=rope)
    out = ropext("plan", scaled, "--factor", 4, "--details")[1]
    lines = [line.split("  ") for line in out.splitlines() if "--from-original --target" in line]
    groups = {line[1]: line[-1].strip() for line in lines if line[0] == ""}
    # The factor would count from 16 tokens there, so the command names the target.
    assert "llama.cpp" in groups["--from-original --target 512 --method llama3"]
    assert groups["--from-original --target 512 --method ntk"] == "ctranslate2"


def test_extend_serves_in_one_program_or_in_every_one(ropext, llama, tmp_path):
    words = (
        "extend",
        llama,
        "--factor",
        2,
        "--method",
        "yarn",
        "--no-verify",
        "-o",
        tmp_path / "out",
    )

    def loaders(out):
        lines = out.partition("to serve it")[2].partition("\n\n")[0].splitlines()[1:]
        return [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].isalpha()]

    first = ropext(*words)[1]
    assert loaders(first) == ["vllm"]
    named = re.search(r"^files: (.*)$", first, re.M).group(1).split(", ")
    assert named == sorted(tree(tmp_path / "out"))
    every = loaders(ropext(*words, "--force", "--serve")[1])
    assert every == ["transformers", "vllm", "sglang", "llama.cpp", "lm-eval"]
    code, out, err = ropext(*words, "--force", "--serve", "--eval", "docs.txt")
    assert (code, out) == (2, "")
    assert "--serve works only without later steps" in err


def test_an_extended_directory_is_extended_again_from_its_present_state(ropext, llama, tmp_path):
    for source, target in ((llama, "one"), (tmp_path / "one", "two")):
        words = ["extend", source, "--method", "pi", "--factor", 2, "-o", tmp_path / target]
        words += ["--again"] if target == "two" else []
        code, _, err = ropext(*words, "--no-verify")
        assert code == 0, err
    config = json.loads((tmp_path / "two/config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert config["max_position_embeddings"] == 512


def test_an_untrained_extension_is_extended_from_its_original(ropext, llama, tmp_path):
    """The error prints the command, whose frequencies equal an extension of the original by 4."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert ropext("extend", llama, "--factor", 2, "--no-verify", "-o", one)[0] == 0
    code, _, err = ropext("extend", one, "--factor", 2, "--no-verify", "-o", two)
    assert code == 2
    assert not two.exists()
    assert "its record says that nothing was trained since" in err
    line = err.partition("frequencies: ropext ")[2].partition("; --again")[0]
    words = shlex.split(line.replace("-o OUT", f"-o {shlex.quote(str(two))}"))
    assert ropext(*words, "--no-verify")[0] == 0
    inv_freq, attention = transcriptions.yarn(16, 50000.0, 128, 512)
    written = json.loads((two / "ropext.json").read_text())["sites"][0]["spectrum"]
    assert written["inv_freq"] == pytest.approx(inv_freq, rel=1e-12)
    assert written["attention_factor"] == pytest.approx(attention)
    code, out, _ = ropext("plan", one, "--factor", 2)
    assert code == 0
    assert "recommended  --method yarn --from-original --target 512" in out
    assert "with --again: " in out


FIRST = {"ntk": (), "dynamic": (), "abf": ("--theta", "9e5"), "pi": (), "yarn": ()}


@pytest.mark.parametrize("method", FIRST)
def test_from_original_goes_back_along_the_whole_chain_of_records(ropext, llama, tmp_path, method):
    one, two = tmp_path / "one", tmp_path / "two"
    how = ("--factor", 4, *FIRST[method], "--no-verify")
    assert ropext("extend", llama, "--method", method, *how, "-o", one)[0] == 0
    again = ("--method", "pi", "--factor", 2, "--again", "--no-verify")
    code, _, err = ropext("extend", one, *again, "-o", two)
    assert code == 0
    first = f"{method}, 128 to 512 tokens (ropext.json)"
    assert f"warning: [again] this scales the model again, after {first}" in err
    history = json.loads(ropext("inspect", two, "--json")[1])["extended"]
    assert history == f"{method}, 128 to 512 tokens; then pi, 512 to 1,024 tokens (ropext.json)"
    config = json.loads((two / "config.json").read_text()) | {"use_cache": False}
    config.pop("rope_theta")  # as a save by transformers leaves it
    (two / "config.json").write_text(json.dumps(config))
    back = ("--method", "yarn", "--target", 2048, "--from-original", "--json")
    made = json.loads(ropext("plan", two, *back)[1])
    wanted = json.loads(ropext("plan", llama, *back)[1])
    assert (made["context"], made["factor"]) == (128, 16)
    assert made["sites"] == wanted["sites"]
    inv_freq, attention = transcriptions.yarn(16, 50000.0, 128, 2048)
    assert made["sites"][0]["inv_freq"] == pytest.approx(inv_freq, rel=1e-12)
    assert made["sites"][0]["attention_factor"] == pytest.approx(attention)
    assert made["config"] == wanted["config"] | {"use_cache": False}
    assert "the original is" in made["warnings"][0]


def test_a_theta_that_may_have_been_raised_is_noted(ropext, llama, tmp_path):
    out, back = tmp_path / "out", ("--method", "yarn", "--from-original", "--target")
    how = ("--method", "ntk", "--factor", 4, "--no-verify")
    assert ropext("extend", llama, *how, "-o", out)[0] == 0
    assert "scaling      in its theta: ntk, 128 to 512 tokens" in ropext("inspect", out)[1]
    for target, said in ((512, "keeps its length and replaces"), (256, "makes it shorter")):
        assert said in " ".join(ropext("plan", out, *back, target)[1].split())
    (out / "ropext.json").unlink()
    said = " ".join(ropext("plan", out, *back, 1024)[1].split())
    assert "theta 243,803 may have been raised already, and its original is not known" in said
    assert "may have been raised" not in ropext("plan", out, *back[:2], "--factor", 2)[1]


@pytest.mark.slow
def test_fix_writes_the_spellings_that_a_resave_dropped(ropext, llama):
    path = llama / "config.json"
    config = json.loads(path.read_text())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = yarn | {"rope_theta": 50000.0}
    path.write_text(json.dumps(config))
    code, out, err = ropext("verify", llama)
    assert code == 3
    assert "rope_theta" in out
    code, _, err = ropext("verify", llama, "--fix")
    assert code == 0, err
    assert "+ rope_theta: 50000.0" in err
    fixed = json.loads(path.read_text())
    assert fixed["rope_theta"] == 50000.0
    assert fixed["rope_scaling"]["type"] == "yarn"


def test_nothing_is_recommended_that_extend_refuses(ropext, tmp_path):
    """By what extend itself does with each factor."""
    for factor, refused in ((8, False), (64, True)):
        words = ("ropext://demo", "--factor", str(factor))
        out = str(tmp_path / str(factor))
        code, _, err = ropext("extend", *words, "-o", out, "--method", "yarn", "--no-verify")
        assert (code == 2) is refused, err
        made = json.loads(ropext("plan", *words, "--json")[1])
        assert (made["recommendation"]["method"] == "none") is refused
        assert ("--untrained" in made["recommendation"]["reason"]) is refused
    words = ("ropext://demo", "--factor", "64", "--untrained", "--json")
    assert json.loads(ropext("plan", *words)[1])["recommendation"]["method"] == "yarn"


def test_the_suggestion_of_inspect_gets_no_length_warning(ropext):
    _, out, _ = ropext("inspect", "ropext://demo")
    words = out.rstrip().rpartition("next: ropext ")[2].split()
    code, out, err = ropext(*words)
    assert code == 0, err
    assert "[far]" not in out


def test_recipes_without_a_subcommand_lists_the_recipes(ropext):
    assert ropext("recipes") == ropext("recipes", "ls")


def test_the_help_of_extend_speaks_of_gguf_files_too(ropext):
    text = " ".join(ropext("extend", "--help")[1].split())
    assert "directory or .gguf file to write" in text
    assert "an extended checkpoint or GGUF and verify it" in text
