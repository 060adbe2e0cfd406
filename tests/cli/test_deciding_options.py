"""Some options decide a run's numbers.

With another value of a deciding option, ropext refuses to resume a started run and names the
option. With another value of any other option, the run resumes.
"""

import inspect
import json
import os
import time

import pytest
from command_line import Forked, run

from ropext.base.bundled import DATA
from ropext.cli.options import command_of
from ropext.options.endpoint import ONLY

TRAIN = ("--data", "data.jsonl", "--batch-tokens", "1024", "--steps", "40", "-o", "OUT")
BEGUN = {
    "finetune": (
        *("finetune", "long", *TRAIN, "--save-every", "1"),
        *("--eval-documents", "2", "--eval-every", "5"),
    ),
    "fit": (
        *("fit", "ropext://demo", "--factor", "2", "--start", "yarn", *TRAIN),
        *("--eval-every", "1", "--retrieval-items", "2", "--held-out", "8"),
    ),
    "eval": (
        *("eval", "long", "--data", "data.jsonl", "--max-docs", "2", "--lengths", "256,512"),
        *("--tasks", "passkey", "--items", "2", "-o", "OUT"),
    ),
}
# Options of this call alone, or a run's inputs; the digest of the read file identifies the latter.
OF_THE_CALL = {
    *("output", "force", "dry_run", "out", "push_to_hub", "public", "fail_if"),
    *("full", "losses", "table_format"),
    *("directory", "model", "data", "revision", "trust_remote_code"),
    *("as_json", "quiet", "log_times"),
}
# Another value of each option, with the flags that it needs.
DECIDES = {
    "finetune": {
        "strategy": "pose",
        "window": "128 --strategy pose",
        "packing": "glued",
        "steps": "41",
        "epochs": "1",
        "batch_tokens": "2048",
        "learning_rate": "3e-4",
        "warmup": "1",
        "schedule": "constant",
        "rank": "8",
        "alpha": "8",
        "dropout": "0.1",
        "targets": "q_proj,v_proj",
        "train_norms": "",
        "train_embeddings": "",
        "retrieval_share": "0.5",
        "keep_short": "1",
        "evaluate": "ropext://held-out",
        "eval_every": "4",
        "eval_documents": "3",
        "patience": "1",
        "column": "other",
        "split_documents": "blank-lines",
        "seed": "1",
        "data_seed": "1",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
    },
    "fit": {
        "factor": "3",
        "target": "768",
        "context": "200",
        "within": "yarn",
        "start": "ntk",
        "strategy": "pose",
        "window": "128 --strategy pose",
        "steps": "41",
        "batch_tokens": "2048",
        "learning_rate": "0.01",
        "ceiling": "3",
        "keep_short": "1",
        "retrieval_share": "0.5",
        "retrieval_items": "4",
        "held_out": "9",
        "eval_every": "2",
        "packing": "glued",
        "column": "other",
        "split_documents": "blank-lines",
        "seed": "1",
        "data_seed": "1",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
    },
    "eval": {
        "column": "other",
        "split_documents": "blank-lines",
        "lengths": "256",
        "method": "pi --factor 2",
        "factor": "2 --method pi",
        "target": "1024 --method pi",
        "window": "64 --method self-extend --factor 2",
        "group": "3 --method self-extend --factor 2",
        "literal": "--method self-extend --factor 2",
        "base": "ropext://demo",
        "kl": "",
        "kv": "q8_0",
        "tasks": "mkey",
        "depths": "0.5",
        "items": "3",
        "haystack": "noise",
        "protocol": "yarn",
        "max_docs": "3",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
        "seed": "1",
    },
}
DOES_NOT = {
    "finetune": {
        "micro_rows": "1",
        "control": "",
        "save_every": "2",
        "device": "cpu",
        "max_document_mib": "65",
        "link": "hard",
        "slim": "",
    },
    "fit": {
        "micro_rows": "1",
        "device": "cpu",
        "max_document_mib": "65",
        "link": "hard",
    },
    "eval": {"device": "cpu", "chunk": "64", "slice_memory": "64", "max_document_mib": "65"},
}
# What another value needs that is not here, or means nothing for these data.
ELSEWHERE = {
    "finetune": {
        "train": "a position table",
        "qlora": "a GPU",
        "split": "a dataset",
        "report_to": "a tracker",
    },
    "fit": {
        "from_original": "a scaled model",
        "again": "an extended model",
        "original_context": "a scaled model",
        "even_so": "a model that scaling cannot help",
        "for_loaders": "a narrower --within, which then differs",
        "split": "a dataset",
        "report_to": "a tracker",
    },
    "eval": {
        "split": "a dataset",
        "data_revision": "a dataset",
        "context": "another base",
        "adapter": "an adapter",
        "device_map": "accelerate's devices",
        "lm_eval": "lm-eval",
        "lm_eval_limit": "lm-eval",
        "chat": "tasks in words",
        "chat_args": "tasks in words",
        "passages": "tasks in words",
        **dict.fromkeys(ONLY, "a server"),
    },
}


@pytest.mark.parametrize("command", BEGUN)
def test_every_option_is_marked_as_deciding_or_not(command):
    options = set(inspect.signature(command_of(command)).parameters) - OF_THE_CALL
    named = [DECIDES[command], DOES_NOT[command], ELSEWHERE[command]]
    listed = {name for part in named for name in part}
    assert options - listed == set(), (
        "write another value of the option into DECIDES or DOES_NOT above, or into ELSEWHERE why "
        "none can be tried here"
    )
    assert listed - options == set(), "these options are gone: take them out of the tables above"
    assert len(options) == sum(map(len, named))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write an extended model, and documents with two columns."""
    import ropext

    place = tmp_path_factory.mktemp("deciding")
    ropext.extend("ropext://demo", place / "long", factor=2, no_verify=True)
    texts = [json.loads(line)["text"] for line in DATA["ropext://tuning"].read_text().splitlines()]
    rows = ({"text": text, "other": text[100:]} for text in texts[:24])
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def has_work(output):
    """Return whether a run has kept a file besides its manifest."""
    return any(
        path.is_file() and path.name != "run.json" and not path.name.startswith(".")
        for place in (output, output.with_name(f"{output.name}.run"))
        for path in place.rglob("*")
    )


@pytest.fixture(scope="module")
def begun(folder):
    """Return the words of each command whose run was killed once it had kept some work."""
    found = {}
    for command, words in BEGUN.items():
        output = folder / f"out-{command}"
        found[command] = [output.name if word == "OUT" else word for word in words]
        process = Forked(lambda words=found[command]: run(*words)[0], folder)
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not has_work(output) and os.waitid(os.P_PID, process.pid, ended) is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
        assert has_work(output), command
    return found


def flipped(table):
    return [(command, name) for command, own in table.items() for name in own]


def again(folder, begun, command, name, value, capsys, monkeypatch):
    """Return the output of a dry run of the same command with another value of one option."""
    monkeypatch.chdir(folder)
    flag = {"evaluate": "--eval"}.get(name, "--" + name.replace("_", "-"))
    words = list(begun[command])
    if flag in words:
        del words[words.index(flag) : words.index(flag) + 2]
    if (command, name) in {("fit", "target"), ("finetune", "epochs"), ("eval", "base")}:
        other = {"target": "--factor", "epochs": "--steps"}.get(name)
        if other:
            del words[words.index(other) : words.index(other) + 2]
    return run(*words, flag, *value.split(), "--dry-run", capsys=capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), flipped(DECIDES))
def test_another_value_of_a_deciding_option_is_refused(
    folder, begun, command, name, capsys, monkeypatch
):
    value = DECIDES[command][name]
    code, heard = again(folder, begun, command, name, value, capsys, monkeypatch)
    assert code == 2, heard.err
    assert f"holds another run of ropext {command} (it differs in" in heard.err


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), flipped(DOES_NOT))
def test_another_value_of_any_other_option_resumes(
    folder, begun, command, name, capsys, monkeypatch
):
    value = DOES_NOT[command][name]
    code, heard = again(folder, begun, command, name, value, capsys, monkeypatch)
    assert code == 0, heard.err


@pytest.mark.slow
@pytest.mark.parametrize("command", BEGUN)
def test_the_same_command_resumes(folder, begun, command, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, heard = run(*begun[command], "--dry-run", capsys=capsys)
    assert code == 0, heard.err


# The keys of a recipe, by the stages that another value repeats; the stages after a checkpoint
# follow by its content.
RECIPE = {
    "model": "ropext://demo",
    "extend": {"method": "yarn", "factor": 2},
    "fit": {"data": "ropext://tuning", "start": "yarn", "steps": 40},
    "finetune": {"data": "ropext://tuning", "steps": 40, "eval_every": 5},
    "evaluate": {"data": "ropext://held-out", "tasks": ["passkey"]},
}
PAIRS = f"[{','.join(['1.2'] * 16)}]"
REACH, SHAPE = {"plan", "extend", "fit", "evaluate"}, {"plan", "extend"}
EXTENDING = {
    "factor": ("3", REACH),
    "target": ("768 factor=null", REACH),
    "context": ("200", REACH),
    "from_original": ("true", {"plan", "fit"}),
    "again": ("true", {"plan"}),
    "even_so": ("true", {"plan", "fit"}),
    "for": ("vllm", {"plan", "fit"}),
    "method": ("pi", SHAPE),
    "length_only": ("true method=null", SHAPE),
    "untrained": ("true", {"plan"}),
    "attention_factor": ("1.1", SHAPE),
    "temperature": ("0.9", SHAPE),
    "theta": ("20000 method=abf", SHAPE),
    "beta_fast": ("16", SHAPE),
    "beta_slow": ("2", SHAPE),
    "low_freq_factor": ("2 method=llama3", SHAPE),
    "high_freq_factor": ("8 method=llama3", SHAPE),
    "truncate": ("false", SHAPE),
    "pair_factors": ("pairs.json method=longrope", SHAPE),
    "short_pair_factors": (f"{PAIRS} method=longrope pair_factors=pairs.json", SHAPE),
    "link": ("hard", {"extend", "fit"}),
    "no_verify": ("true", {"extend"}),
    "hash": ("true", {"extend"}),
}
TOP = {
    "seed": ("1", {"fit", "finetune", "evaluate"}),
    "output": ("elsewhere", set()),
}
# Keys that the table above leaves out, and keys that the run itself records under another name.
MORE = {
    "fit": {"split": "other", "report_to": "wandb"},
    "finetune": {"qlora": "", "split": "other", "report_to": "wandb"},
    "evaluate": {"split": "other", "data_revision": "v1", "lm_eval": "arc_easy"},
}
MORE["evaluate"] |= {"device_map": "auto", "fail_if": "tail@512>100"}
MORE["evaluate"] |= {"lm_eval_limit": "3", "chat_args": "a=1 --chat true --tasks vt"}
MORE["evaluate"] |= {"chat": "--tasks vt", "passages": "own.jsonl --tasks qa_1"}
OF_THE_RUN = {
    "eval": {"method", "factor", "target", "base", "kv", "window", "group", "literal"},
    "fit": {"factor", "target", "context"},
}
# A run takes a checkpoint's training as one piece: these start it again, although `finetune` and
# `fit` would resume.
LIKE_OTHERS = {"micro_rows", "control", "save_every", "link", "slim"}


def trainings():
    """Yield (section, key, value with the flags it needs, stages that run again), from the tables
    above."""
    for command, section in (("fit", "fit"), ("finetune", "finetune"), ("eval", "evaluate")):
        values = DECIDES[command] | DOES_NOT[command] | MORE[section]
        passing = {*DOES_NOT[command], "report_to", "device_map", "fail_if"} - LIKE_OTHERS
        for name, value in values.items():
            if name not in OF_THE_RUN.get(command, ()):
                stages = set() if name in passing else {section}
                stages |= {"evaluate"} if name == "control" else set()  # which reads it too
                key = "eval" if name == "evaluate" else name
                extra = " steps=null" if name == "epochs" else ""
                yield section, key, as_override(value) + extra, stages


def as_override(flags):
    """Return `128 --strategy pose` as `128 strategy=pose`."""
    value, *more = (flags if flags and not flags.startswith("--") else f"true {flags}").split(" --")
    keys = (word.replace("-", "_").replace(" ", "=") for word in more)
    return " ".join([value.strip(), *keys])


KEYS = [
    *(("", key, *own) for key, own in TOP.items()),
    *(("extend", key, *own) for key, own in EXTENDING.items()),
    *trainings(),
]


def test_every_key_of_a_recipe_is_marked_as_deciding_or_not():
    from ropext.pipeline.recipe import SECTIONS, options_by_key

    wanted = {(section, key) for section in ("", *SECTIONS) for key in options_by_key(section)}
    wanted -= {("", section) for section in SECTIONS}
    # What a run is of, by its content; and what means something for a scaled model alone.
    wanted -= {("", "model"), ("", "revision"), *((name, "data") for name in SECTIONS)}
    wanted -= {("extend", "original_context")}
    wanted -= {("finetune", "train")}  # a position table is trained by no run
    # What a choice of the method reads: tests/pipeline/test_auto.py.
    wanted -= {("extend", "within")}
    assert sorted((section, key) for section, key, _, _ in KEYS) == sorted(wanted)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return the deciding inputs of each stage of the recipe above, with other values and
    unchanged."""
    from ropext.pipeline.checked_recipe import open_recipe
    from ropext.pipeline.run_context import plan_run
    from ropext.pipeline.stages import stages_of

    place = tmp_path_factory.mktemp("recipe")
    (place / "pairs.json").write_text(json.dumps([1.5] * 16))

    def read(*words):
        work = plan_run(open_recipe(RECIPE, words), place / "out")
        return {step.name: step.key() for step in stages_of(work)}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield read, read()


@pytest.mark.parametrize(("section", "key", "value", "stages"), KEYS)
def test_another_value_in_a_recipe_does_the_stages_that_read_it_again(
    inputs, section, key, value, stages
):
    prefix = f"{section}." if section else ""
    value, *more = value.split()
    read, before = inputs
    after = read(*(f"{prefix}{word}" for word in (f"{key}={value}", *more)))
    assert {name for name in before if before[name] != after[name]} == stages
