"""`plan DIR --for LOADERS` and `verify DIR --for LOADERS`: exit codes 0, 3 and 6."""

import json

import configs
import pytest
from command_line import run
from gguf_files import making
from json_schema import check

from ropext.base.bundled import MODELS
from ropext.base.errors import GateFailed, NotMeasured, UsageError
from ropext.families.loaders.table import readers
from ropext.files import inspecting
from ropext.verifying import verification

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def extended(tmp_path):
    """Write anybody's directory, of which ropext has no record."""
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA | {"rope_scaling": YARN}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        ("vllm", 0, ""),
        ("vllm,llama.cpp", 0, ""),
        ("exllamav2", 3, "exllamav2 0.3.2: different (takes the full length for the original one"),
        ("transformers==4.40", 3, "transformers 4.36-4.42: error"),
        ("transformers==4.57,exllamav2", 3, "exllamav2 0.3.2: different"),
        ("nobody", 2, "no such loader"),
        ("vllm==0.99", 6, "this version was not measured; measured are"),
        ("vllm==newest", 2, "a version is in numbers; measured are"),
        ("vllm==", 2, "'vllm==': a version is in numbers; measured are"),
        ("llama.cpp,lm-studio==", 2, "'lm-studio==': a version is in numbers; measured are"),
        ("vllm==0.8==1", 2, "'vllm==0.8==1': a version is in numbers; measured are"),
        ("vllm== 0.8", 2, "'vllm== 0.8': a version is in numbers; measured are"),
    ],
)
def test_a_plan_of_a_scaled_directory_gates_its_config(extended, names, code, said, capsys):
    done, shown = run("plan", extended, "--for", names, capsys=capsys)
    assert done == code
    assert said in shown.err
    assert ("is not read as its config means" in shown.err) is (code == 3)
    # One screen if all is well, and the reason if it is not.
    assert ("what each engine computes" in shown.out) is (code == 3)
    assert ("exact in  " in shown.out) is (code == 0)
    passed = f"--for {names}: read as its config means"
    assert (shown.out.splitlines()[1:2] == [passed]) is (code == 0)


def test_the_command_to_run_it_names_a_reachable_place():
    served = inspecting.read_unchanged(inspecting.open_model("ropext://demo"))
    for line in served.serving:
        assert "ropext://" not in line.command
        assert str(MODELS["ropext://demo"]) in line.command


def test_an_unmeasured_gate_has_its_own_exit_code(tmp_path, capsys):
    known = configs.LLAMA | {"model_type": "olmoe", "rope_scaling": YARN}
    (tmp_path / "config.json").write_text(json.dumps(known))
    code, shown = run("plan", str(tmp_path), "--for", "sglang", "--json", capsys=capsys)
    told = json.loads(shown.out)
    assert (code, told["target"]) == (6, 4096)
    check(told, "plan")
    assert (told["gate"]["loaders"], told["gate"]["passed"]) == (["sglang"], None)
    assert shown.err == f"error: {told['gate']['sentence']}\n"
    assert "how it is read was not measured" in shown.err
    assert "sglang 0.5.23: not measured (olmoe was not run in it)" in shown.err
    # A failure comes before an unknown.
    served = inspecting.read_unchanged(inspecting.open_model(str(tmp_path)))
    with pytest.raises(NotMeasured):
        inspecting.gate(served, ("sglang", "transformers")).raise_if_failed()
    judged = inspecting.gate(served, ("transformers",))
    assert judged.passed
    assert judged.raise_if_failed() is None


def test_the_gate_on_engines_works_for_an_unextended_directory(tmp_path):
    """A config as transformers 5 saves it, which MLX-LM reads with a theta of its own."""
    saved = {k: v for k, v in configs.LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    saved |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    served = inspecting.read_unchanged(inspecting.open_model(str(tmp_path)))
    assert inspecting.gate(served, ("vllm", "transformers==5")).passed
    with pytest.raises(GateFailed, match=r"mlx MLX-LM 0\.32\.2: different"):
        inspecting.gate(served, ("vllm", "mlx")).raise_if_failed()


def test_the_gate_on_engines_works_for_an_unextended_gguf(tmp_path):
    scaled = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    path = making.write(tmp_path / "m.gguf", "llama", making.LLAMA | scaled)
    served = inspecting.read_unchanged(inspecting.open_model(str(path)))
    assert inspecting.gate(served, ("llama.cpp", "lm-studio")).passed
    with pytest.raises(GateFailed, match=r"mistral\.rs .*: error"):
        inspecting.gate(served, ("mistral.rs",)).raise_if_failed()
    with pytest.raises(
        UsageError, match=r"was not measured with GGUF files; these were: llama\.cpp"
    ):
        inspecting.gate(served, ("vllm",))
    assert {reading.loader for reading in served.readings} == {
        reader.loader for reader in readers("gguf_readers")
    }


@pytest.mark.parametrize(("names", "code"), [("vllm", 0), ("exllamav2", 3), ("mlx,trt-llm", 0)])
def test_a_verification_has_the_gate_and_its_own_checks(extended, monkeypatch, names, code, capsys):
    served = inspecting.read_unchanged(inspecting.open_model(extended))
    right = verification.Verification(extended, (verification.Check("spectrum", True, ""),), served)
    monkeypatch.setattr(verification, "check_directory", lambda *args, **how: right)
    done, shown = run("verify", extended, "--for", names, capsys=capsys)
    assert done == code
    assert "verified (1 checks passed)" in shown.out
    assert (f"--for {names}: read as its config means" in shown.out) is (code == 0)
    _, shown = run("verify", extended, "--for", names, "--json", capsys=capsys)
    told = json.loads(shown.out)
    assert told["passed"]  # the directory passed
    assert told["gate"]["passed"] is (code == 0)
    # A name that means nothing here is a mistake alone, with no result.
    done, shown = run("verify", extended, "--for", "ollama", "--json", capsys=capsys)
    assert (done, json.loads(shown.out)["option"]) == (2, "--for")
