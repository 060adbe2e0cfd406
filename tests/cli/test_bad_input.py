"""Every mistake gets one clear sentence and exit code 2, and changes nothing on the disk."""

import json
import os
import sys

import pytest
from command_line import drive
from tiny_checkpoint import make_llama

from ropext import evaluate, extend, run
from ropext.base.errors import UsageError


@pytest.fixture
def refused(ropext, tmp_path):
    """Run a command that must be refused; gives its sentence."""

    def run(*words):
        before = sorted(os.walk(tmp_path))
        code, out, err = ropext(*words)
        assert code == 2, (code, out, err)
        assert out == ""
        assert "Traceback" not in err
        assert sorted(os.walk(tmp_path)) == before
        return err

    return run


def edit(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["plan", "nowhere", "--factor", "4"], None),
        (["plan", "ropext://demo", "--factor", "-4"], "--factor"),
        (["plan", "ropext://demo", "--factor=-4", "--method", "pi"], "--factor"),
        (["plan", "ropext://demo", "--factor", "4", "-m", "yran"], "--method"),
        (["fit", "ropext://demo"], "--data"),
        (["plan", "ropext://demo", "--no-such-option"], "--no-such-option"),
        (["extend", "ropext://demo", "--factor", "4"], None),
        (["run", "nowhere.yaml"], None),
    ],
)
def test_a_program_reads_the_mistake_as_json(ropext, tmp_path, monkeypatch, words, option):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, out, err = ropext(*words, "--json")
    told = json.loads(out)
    assert told == {"error": told["error"], "exit_code": 2, "option": option}
    assert err == f"error: {told['error']}\n"
    assert ropext(*words)[1] == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--factor", "abc"], "'--factor': Input should be a valid number, was 'abc'"),
        (["--factor=1e", "--json"], "'--factor': Input should be a valid number, was '1e'"),
        (["--format", "pdf"], "'--format': 'pdf' is not one of 'csv', 'latex', 'markdown'"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_given_value(ropext, words, sentence):
    code, _, err = ropext("plan", "ropext://demo", *words)
    assert (code, err) == (2, f"error: invalid value for {sentence}; see ropext plan --help\n")


def test_a_server_that_does_not_answer_is_distinguished(ropext):
    words = ["eval", "--endpoint", "http://127.0.0.1:1/v1", "--lengths", "1k", "--json"]
    code, out, _ = ropext(*words)
    told = json.loads(out)
    assert (code, told["exit_code"], told["option"]) == (5, 5, "--endpoint")


def test_a_failed_gate_is_in_the_result_alone(ropext, tmp_path):
    words = ["eval", "ropext://demo", "--data", "ropext://held-out", "--max-docs", "1"]
    words += ["--lengths", "64", "--fail-if", "tail@64.value > 0", "--json"]
    code, out, err = ropext(*words)
    assert code == 3
    assert json.loads(out)["gates"][0]["passed"] is False
    assert "error: " in err


def test_an_output_may_be_a_file(refused, llama):
    said = refused("extend", llama, "--factor", 4)
    assert "give -o OUT, the directory or GGUF file to write" in said


def test_plan_refuses_a_path_that_is_no_model_directory(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused("plan", tmp_path / "empty", "--factor", 4)
    assert "does not exist" in refused("plan", tmp_path / "nowhere", "--factor", 4)


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "[1]", '{"a": NaN}', '{"a":1,"a":2}'])
def test_plan_refuses_a_config_that_is_invalid_json(refused, llama, text):
    (llama / "config.json").write_text(text)
    assert "config.json" in refused("plan", llama, "--factor", 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "xglm"}, "fixed sinusoids"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"rope_scaling": {"type": "marvel", "factor": 2.0}}, "marvel"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"quantization_config": 5}, "quantization_config must be an object"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            },
            "factor",
        ),
    ],
)
def test_plan_refuses_configs_that_it_cannot_read(refused, llama, changes, words):
    assert words in refused("plan", edit(llama, **changes), "--factor", 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--factor", "1"], "--factor"),
        (["--factor", "nan"], "--factor"),
        (["--factor", "1e12"], "--factor"),
        (["--factor", "four"], "--factor"),
        (["--target", "100"], "128"),
        (["--factor", "4", "--target", "512"], "give one"),
        ([], "--factor"),
        (["--factor", "4", "--method", "yarm"], "did you mean yarn"),
        (["--factor", "4", "--method", "pi", "--beta-fast", "16"], "--beta-fast"),
        (["--factor", "4", "--beta-fast", "1", "--beta-slow", "2"], "--beta-slow"),
        (["--factor", "4", "--method", "longrope"], "--pair-factors"),
        (["--factor", "4", "--method", "abf"], "--theta"),
        (["--factor", "4", "--method", "abf", "--theta", "10"], "--theta"),
        (["--factor", "4", "--for", "vlm"], "vllm"),
        (["--factor", "4", "--for", ","], "names of loaders"),
        (["--factor", "4", "--method", "longrope", "--pair-factors", "nowhere.csv"], "nowhere.csv"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "extend"])
def test_plan_and_extend_refuse_options_that_contradict(
    refused, llama, tmp_path, command, options, words
):
    where = ["-o", tmp_path / "out"] if command == "extend" else []
    assert words in refused(command, llama, *options, *where)


def test_missing_data_of_a_later_step_is_refused_at_once(refused, llama, tmp_path):
    words = ["extend", llama, "--factor", 4, "-o", tmp_path / "out"]
    said = refused(*words, "--finetune", "books.jsonl", "--eval", "held-out.jsonl")
    assert "finetune.data is books.jsonl, and there is no such file" in said
    assert "evaluate.data is held-out.jsonl" in refused(*words, "--eval", "held-out.jsonl")
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "ropext://demo", "--data", "ropext://held-out", "-o", "out"],
        ["verify", "ropext://demo"],
        ["serve", "ropext://demo"],
        ["fit", "ropext://demo", "--factor", "2", "--data", "ropext://tuning", "-o", "out"],
        ["finetune", "ropext://demo", "--data", "ropext://tuning", "-o", "out"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("option", ["device", "dtype"])
def test_an_unknown_device_or_dtype_is_refused_by_every_command(
    refused, tmp_path, monkeypatch, words, option
):
    monkeypatch.chdir(tmp_path)
    said = refused(*words, f"--{option}", "gpu")
    assert f"--{option}" in said
    assert "gpu" in said
    assert "auto" in said


def test_a_recipe_with_an_unknown_device_is_refused_before_its_first_stage(refused, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    sections = "extend: {factor: 2}\nevaluate: {data: ropext://held-out, device: gpu}\n"
    recipe.write_text(f"model: ropext://demo\n{sections}")
    for words in (["--dry-run"], []):
        said = refused("run", recipe, "-o", tmp_path / "out", *words)
        assert "line 3: evaluate.device is one of auto, cpu, cuda, cuda:N, mps, was 'gpu'" in said


@pytest.mark.parametrize(
    "words",
    [
        ["extend", "ropext://demo", "--factor", "2", "-o", ""],
        ["extend", "ropext://demo", "--factor", "2", "--output="],
        ["fit", "ropext://demo", "--factor", "2", "--data", "ropext://tuning", "-o", ""],
        ["finetune", "somewhere", "--data", "ropext://tuning", "-o", ""],
        ["run", "smoke-test", "-o", ""],
        ["eval", "ropext://demo", "--data", "ropext://held-out", "-o", ""],
        ["compare", "one", "two", "-o", ""],
        ["demo", "-o", ""],
        ["push", "", "ORG/NAME"],
        ["verify", ""],
        ["plan", "ropext://demo", "--factor", "2", "--plot="],
    ],
    ids=lambda words: words[0],
)
def test_an_empty_path_argument_is_refused(refused, tmp_path, monkeypatch, words):
    """As `-o "$OUT"` gives where OUT is not set; as a path it is the working directory."""
    monkeypatch.chdir(tmp_path)
    assert "is empty; give it a value" in refused(*words)


@pytest.mark.parametrize("words", [["plan", "", "--factor", "2"], ["push", "long", ""]])
def test_an_empty_argument_is_not_called_by_the_word_before_it(refused, words):
    said = refused(*words)
    assert f"an argument of {words[0]} is empty; give it a value" in said
    assert "leave it out" not in said


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_plot_that_cannot_be_written_gives_one_sentence(refused, llama, tmp_path, command):
    said = refused(command, llama, "--factor", 4, "--plot", tmp_path / "nowhere" / "x.png")
    assert "--plot" in said
    assert "No such file or directory" in said


@pytest.mark.needs("/dev/full")
def test_a_full_stdout_gives_one_sentence(llama):
    import subprocess
    import sys

    words = [sys.executable, "-m", "ropext", "plan", str(llama), "--factor", "4"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        run = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr == "error: the result cannot be printed: No space left on device\n"


@pytest.mark.needs("/bin/sh")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(llama, closed):
    import subprocess
    import sys

    line = f'"{sys.executable}" -m ropext plan "{llama}" --factor 4 {closed}'
    run = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert (run.stdout == "") == (" >&-" in f" {closed}")


def test_a_reader_that_had_enough_is_no_error(llama):
    import subprocess
    import sys

    words = [sys.executable, "-m", "ropext", "plan", str(llama), "--factor", "4", "--json"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert run.stderr.read() == b""
    assert run.wait() == 0


def test_options_are_not_dropped_on_an_extended_directory(ropext, refused, llama, tmp_path):
    words = [
        "extend",
        llama,
        "--method",
        "yarn",
        "--factor",
        4,
        "-o",
        tmp_path / "out",
        "--no-verify",
    ]
    assert ropext(*words)[0] == 0
    assert "extended from 128 by yarn" in ropext("plan", tmp_path / "out")[1]
    assert "give a length" in refused("plan", tmp_path / "out", "--method", "pi")
    told = refused("plan", "ropext://demo", "--context", 1024)
    assert "--target 1024 what it is to read" in told


def test_a_misspelt_key_of_a_rope_dict_is_named_with_the_right_one(refused, llama, ropext):
    path = llama / "config.json"
    config = json.loads(path.read_text())
    scaled = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0, "a_key_of_ours": 1}
    for wrong in ("original_max_position_embedings", "orignal_max_position_embeddings"):
        path.write_text(json.dumps(config | {"rope_parameters": scaled | {wrong: 64}}))
        told = refused("inspect", llama)
        assert f"{wrong}, which nothing reads; did you mean original_max_position" in told
    path.write_text(json.dumps(config | {"rope_parameters": scaled}))
    assert ropext("inspect", llama)[0] == 0  # a value near zero stays


def test_pair_factors_are_counted(refused, llama, tmp_path):
    (tmp_path / "f.json").write_text("[1, 2, 3]")
    words = ["--factor", 4, "--method", "longrope", "--pair-factors", tmp_path / "f.json"]
    said = refused("plan", llama, *words)
    assert "3 numbers" in said
    assert "8 pairs" in said


def test_ntk_refuses_a_rotary_dim_of_2(refused, tmp_path):
    tiny = make_llama(tmp_path / "tiny", head_dim=2)
    assert "rotary dim of 2" in refused("plan", tiny, "--method", "ntk", "--factor", 2)


def test_extend_refuses_a_missing_existing_or_nested_output(refused, llama, tmp_path):
    extend = ["extend", llama, "--factor", 4, "--no-verify"]
    assert "-o OUT" in refused(*extend)
    (tmp_path / "there").mkdir()
    assert "--force" in refused(*extend, "-o", tmp_path / "there")
    assert "inside the input" in refused(*extend, "-o", llama / "out")
    assert "input itself" in refused(*extend, "-o", llama)


def test_extend_names_a_missing_shard(refused, llama, tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused("extend", llama, "--factor", 4, "-o", tmp_path / "out", "--no-verify")
    assert "model-00001-of-00002.safetensors" in said


def test_pickled_weights_alone_are_refused_with_the_conversion(refused, llama, tmp_path):
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"PK")
    said = refused("extend", llama, "--factor", 4, "-o", tmp_path / "out", "--no-verify")
    assert "safetensors" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["finetune", "x", "--packin"], "no such option: --packin; did you mean --packing?; see"),
        (["finetune", "x", "--packing"], "requires an argument; see ropext finetune --help"),
        (["eval", "x", "--dta", "y"], "no such option: --dta; did you mean --data?; see"),
        (["eval", "x", "--help=3"], "option '--help' does not take a value"),
        (
            ["extend", "x", "--steps", "10"],
            "set it for a later step: fit.steps=10 or finetune.steps=10",
        ),
        (["extend", "x", "--finetune", "d", "--steps=10"], "step: finetune.steps=10\n"),
        (["extend", "x", "--eval", "d", "--max-docs", "3"], "step: evaluate.max_docs=3\n"),
        (["run", "x", "--rank", "--quiet"], "step: finetune.rank=...\n"),
        (["eval", "x", "--steps", "10"], "no such option: --steps; see ropext eval --help"),
    ],
)
def test_unknown_options_are_answered_with_the_nearest_ones(refused, words, said):
    assert said in refused(*words)


def test_a_name_is_looked_for_here_and_at_the_hub(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("plan", "models/nope", "--factor", 4)
    assert "models/nope is no directory here and not in the hub's local cache" in said


def test_extend_asks_whether_a_factor_of_1000_is_meant(ropext, refused, llama, tmp_path):
    asked = "Is --target 1000 meant? (--even-so extends it anyway)"
    assert (
        "warning: [too-far] 128,000 tokens are 1000× the model's 128"
        in ropext("plan", llama, "--factor", 1000)[1]
    )
    assert asked in refused("extend", llama, "--factor", 1000, "-o", tmp_path / "out")
    # Less than the model reads already is no target that anybody meant.
    few = refused("extend", llama, "--factor", 600.5, "--context", 4096, "-o", tmp_path / "out")
    assert "Is that meant?" in few
    plan = ropext("plan", llama, "--factor", 1000, "--even-so")
    assert "meant?" not in plan[1]
    assert "meant?" not in ropext("plan", llama, "--factor", 512)[1]


def test_a_bug_keeps_its_traceback_and_exits_1(llama):
    import subprocess
    import sys

    code = (
        "import sys; sys.argv = ['ropext', 'plan', sys.argv[1], '--factor', '4']\n"
        "from ropext.files import inspecting\n"
        "def broken(*args, **kwargs): raise KeyError('a bug')\n"
        "inspecting.plan = broken\n"
        "from ropext.cli.app import main\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "Traceback" in run.stderr
    assert "a bug" in run.stderr


def test_code_that_ends_the_process_is_never_a_success(ropext, monkeypatch):
    """As the code of a model may, with --trust-remote-code."""
    monkeypatch.setattr("ropext.files.inspecting.plan", lambda *given, **more: sys.exit(0))
    with pytest.raises(RuntimeError, match="code that ropext called ended the process"):
        ropext("plan", "ropext://demo", "--factor", 4)


def test_a_text_in_the_place_of_documents_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match=r"; data names documents, and in Python a list holds"):
        evaluate("ropext://demo", data="a text " * 300)


def test_a_recipe_that_yaml_cannot_say_is_refused_in_a_sentence(tmp_path):
    recipe = {"model": "ropext://demo", "extend": {"method": abs, "factor": 2}}
    with pytest.raises(UsageError, match="of yours as module:function"):
        run(recipe, tmp_path / "out")


@pytest.mark.parametrize("output", [None, 3, b"x", "a\0b", "x" * 300])
def test_a_wrong_path_is_refused_in_a_sentence(output):
    with pytest.raises(UsageError, match=r"no name of a file|a path is a text"):
        extend("ropext://demo", output, factor=2)


def test_a_file_name_of_300_characters_is_refused(ropext):
    for words in (
        ["extend", "ropext://demo", "--factor", "4", "-o", "x" * 300],
        ["eval", "ropext://demo", "--data", "ropext://held-out", "--dry-run", "-o", "x" * 300],
        ["run", "x" * 300, "--dry-run"],
    ):
        code, _, err = ropext(*words)
        assert code == 2
        assert "longer than 255 bytes" in err


@pytest.mark.parametrize(
    "words",
    [
        ["extend", "ropext://demo", "--factor", "2", "-o"],
        ["fit", "ropext://demo", "--factor", "2", "--data", "ropext://tuning", "-o"],
        ["finetune", "ropext://demo", "--data", "ropext://tuning", "-o"],
        ["run", "smoke-test", "-o"],
        ["eval", "ropext://demo", "--data", "ropext://held-out", "-o"],
        ["eval", "ropext://demo", "--data", "ropext://held-out", "--losses"],
        ["eval", "--endpoint", "http://127.0.0.1:1/v1", "--lengths", "1k", "-o"],
        ["compare", "one", "two", "-o"],
        ["plan", "ropext://demo", "--factor", "2", "--plot"],
        ["inspect", "ropext://demo", "--plot"],
        ["verify", "here", "--endpoint=http://a", "--plain=http://b", "--fingerprint"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_name_that_is_too_long_with_ropexts_additions_is_refused(
    refused, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 227, "x" * 239, "x" * 255, "new/" + "x" * 255, "é" * 120, "x/" * 2500):
        said = refused(*words, name)
        assert f"({words[-1].replace('-o', '--output')}) cannot be written: name too long" in said


NO_TORCH = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "ropext://demo", "--data", "ropext://held-out", "--losses", "FILE/losses.parquet"],
        ["plan", "ropext://demo", "--factor", "2", "--plot", "FILE/plot.png"],
    ],
)
def test_a_file_in_a_place_that_is_no_folder_is_refused_before_any_work(
    ropext, refused, tmp_path, words
):
    (tmp_path / "file").write_text("mine")
    said = refused(*[word.replace("FILE", str(tmp_path / "file")) for word in words])
    assert said.count("\n") == 1, said  # not even "loading" is printed
    assert f"{tmp_path / 'file'} is no directory" in said


def test_an_unknown_attention_is_refused_in_a_sentence_by_a_dry_run(refused):
    where = ["ropext://demo", "--data", "ropext://held-out", "--max-docs", "8"]
    said = refused("eval", *where, "--attn-implementation", "flush", "--dry-run")
    assert "error: --attn-implementation flush: " in said


@pytest.mark.parametrize("epochs", ["1e10", "1e300"])
def test_more_epochs_than_rows_can_be_counted_are_refused(ropext, refused, tmp_path, epochs):
    out = tmp_path / "extended"
    ropext("extend", "ropext://demo", "--factor", "2", "--no-verify", "-o", str(out))
    said = refused("finetune", out, "--data", "ropext://tuning", "--epochs", epochs, "--dry-run")
    assert "--epochs" in said


def test_a_wrong_path_of_documents_is_refused_before_anything_is_loaded(tmp_path):
    """No model of these names exists, and torch cannot be imported: the command needs neither."""
    asked = {
        "eval nobody/none --data books.txt": "--data books.txt",
        "plan nobody/none --factor 4 --measure books.txt": "--measure books.txt",
        "fit nobody/none --factor 4 --data ./books -o out": "--data ./books",
        "finetune nobody/none --data books.jsonl -o out": "--data books.jsonl",
        "finetune nobody/none --data ropext://tuning --eval ./books -o out": "--eval ./books",
    }
    answers = drive(tmp_path, [line.split() for line in asked], before=NO_TORCH)
    for (line, named), (code, _, err) in zip(asked.items(), answers, strict=True):
        assert (code, err) == (2, f"error: {named}: there is no such file or folder\n"), line
