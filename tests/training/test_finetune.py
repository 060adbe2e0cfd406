"""A whole run on a tiny model: its files, that they load, that it learned, and that it resumes."""

import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from json_schema import check
from safetensors.torch import load_file
from trained import count_training, kill_at_step, train

import ropext
from ropext.base.errors import InputError, OutputExists, Stopped, UsageError
from ropext.base.jsontext import values_json
from ropext.base.locks import lock_of, run_folder
from ropext.base.narration import Call, Hooks, Pace
from ropext.base.table import records
from ropext.cli.output import Out
from ropext.cli.training import run_training
from ropext.evaluation.forward import NanInLogits
from ropext.options.training import Finetune
from ropext.results import rules
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.perplexity import LossStatistics, Reading
from ropext.results.values import Bootstrap, Value
from ropext.training import fit_report, report, tables, trainer, tuned_report
from ropext.training.judge import training_numbers
from ropext.training.request import TrainingRequest
from ropext.training.result import Finetuned
from ropext.verifying import verification

pytestmark = pytest.mark.slow

RUN = {
    "steps": 8,
    "batch_tokens": 512,
    "eval_documents": 3,
    "eval_every": 4,
    "save_every": 3,
    "learning_rate": 0.01,
    "rank": 4,
}
OPEN = {name: own for name, own in RUN.items() if name != "steps"}
ROOT = str(Path(ropext.__file__).parents[1])


@pytest.fixture(scope="session")
def tuned(extended, stories, tmp_path_factory):
    """Return the result of one run with its control, its folder, and its messages."""
    output = tmp_path_factory.mktemp("tuned") / "out"
    told = []
    done = train(
        "finetune",
        extended,
        str(stories),
        output,
        control=True,
        call=Call(Hooks(told.append)),
        **RUN,
    )
    return done, output, told


def test_the_documents_held_out_are_those_of_a_fit_whatever_the_steps(extended, base, stories):
    def held(planned):
        return {own.name for own in planned.data.held_out}

    found = [
        held(count_training("finetune", extended, str(stories), **RUN | {"steps": n}))
        for n in (1, 40)
    ]
    assert len(found[0]) >= 3
    assert found[0] == found[1]
    fitted = count_training("fit", base, str(stories), factor=4, steps=2, held_out=100)
    assert {own.name for own in fitted.judge.documents} == found[0]


def test_with_one_data_seed_several_seeds_have_the_same_documents_and_the_same_base(
    extended, base, stories, tmp_path
):
    def drawn(kind, model, **options):
        training = count_training(kind, model, str(stories), **options)
        held = [own.name for own in training.judge.documents]
        return held, [training.rows[number].ids.tolist() for number in (0, 1)]

    one, other, moved = (
        drawn("finetune", extended, **RUN, seed=seed, data_seed=data)
        for seed, data in ((0, None), (1, 0), (1, None))
    )
    assert one[0] == other[0] != moved[0]
    assert one[1] != other[1]
    few = {"factor": 4, "steps": 2, "held_out": 3, "retrieval_items": 0}
    one, other, moved = (
        drawn("fit", base, **few, seed=seed, data_seed=data)
        for seed, data in ((0, None), (1, 0), (1, None))
    )
    assert one[0] == other[0] != moved[0]
    assert one[1] != other[1]
    short = RUN | {"steps": 1, "save_every": None}
    bases, tuned = [], []
    for seed in (1, 2):
        done = train(
            "finetune",
            extended,
            str(stories),
            tmp_path / str(seed),
            **short,
            seed=seed,
            data_seed=0,
        )
        bases.append(values_json(done.numbers["base"]))
        tuned.append(values_json(done.numbers["tuned"]))
    assert bases[0] == bases[1]
    assert tuned[0] != tuned[1]


def test_none_of_three_documents_is_held_out_and_a_note_says_so(extended, stories, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(stories.read_text().splitlines()[:3]))
    planned = count_training("finetune", extended, str(few), **RUN)
    assert planned.to_json()["judging_documents"] == 0
    assert "not evaluated: fewer than 4 of its 3 documents reach" in report.dry_run_text(planned)
    unsaid = count_training("finetune", extended, str(few), **OPEN)
    assert 3 < unsaid.rows.passes_over_data <= 4
    assert "at most 4 passes: no held-out document says" in report.dry_run_text(unsaid)


def test_an_error_about_documents_names_the_option_that_names_them(extended, stories, tmp_path):
    none = str(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"^--eval .*none.jsonl: there is no such file"):
        count_training("finetune", extended, str(stories), **RUN, evaluate=none)
    with pytest.raises(InputError, match=r"^--data .*none.jsonl: there is no such file"):
        count_training("finetune", extended, none, **RUN)


def test_refusals_of_one_text_name_an_alternative(extended, base, stories, tmp_path):
    texts = [json.loads(line)["text"] for line in stories.read_text().splitlines()]
    (one := tmp_path / "one.txt").write_text("\n=====\n".join(texts))
    for packing in ("documents", "glued"):
        with pytest.raises(InputError, match="--split-documents makes several documents"):
            count_training("fit", base, str(one), factor=4, steps=2, packing=packing)
    assert "--split-documents" in report.dry_run_text(
        count_training("finetune", extended, str(one), **RUN)
    )
    for how in ("=====", "windows"):
        assert count_training("fit", base, str(one), factor=4, steps=2, split_documents=how)
        planned = count_training("finetune", extended, str(one), **RUN, split_documents=how)
        assert planned.judging_count > 0


@pytest.mark.parametrize(
    ("kind", "link", "copies"),
    [("finetune", "copy", 2), ("finetune", "hard", 1), ("fit", "copy", 1), ("fit", "hard", 0)],
)
def test_room_for_the_output_is_checked_before_the_training(
    base, extended, stories, tmp_path, monkeypatch, kind, link, copies
):
    """OUT holds the tuned weights and the base's; after a fit only the base's."""
    model, options = (base, {"factor": 4, "steps": 2}) if kind == "fit" else (extended, RUN)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed = copies * weights
    for free, refused in ((needed, False), (max(0, needed - 1), copies > 0)):
        space = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda place, space=space: space)
        with pytest.raises(InputError, match="MB free") if refused else nullcontext():
            count_training(kind, model, str(stories), tmp_path / "out", link=link, **options)
    assert not list(tmp_path.glob("out*"))


def test_fewer_than_eight_documents_give_no_verdict():
    value = Value(1.0, None, None, 7, range=(0.9, 1.1))
    numbers = {label: {"tail_nll@256": value} for label in ("base", "tuned")}
    assert tuned_report.finetune_verdict(numbers, 256) == [
        "Fewer than 8 documents give numbers, and no verdict."
    ]
    tail = replace(value, ci95=(0.9, 1.1))
    gain = Value(-0.2121, 0.1, (-0.4065, 0.1849), 8)
    sure = {label: {"tail_nll@256": tail, "gain@256": gain} for label in numbers}
    assert (
        "is 0.2121 nats per token above the base's in its own window (95 % interval -0.1849 to "
        "+0.4065, so which is lower is not known); a part"
    ) in tuned_report.finetune_verdict(sure, 256)[0]


def test_the_table_sets_each_model_against_the_base_paired_by_document():
    def values(tail, gain, half):
        interval = (gain - half, gain + half) if half else None
        return {
            "tail_nll@256": Value(tail, None, (tail - 1, tail + 1), 8),
            "gain@256": Value(gain, None, interval, 8),
            "short_tax": Value(0.01, None, None, 8),
        }

    numbers = {"base": values(2.0, 0.0, 0.1), "untuned": values(2.3, -0.3, 0.02)}
    numbers |= {"control": values(1.95, 0.05, 0.03), "tuned": values(1.875, 0.125, None)}
    table = tables.finetune_table(numbers, 256, None, "Fine-tuning")
    assert [row[0] for row in table.rows] == ["base", "extended", "control", "tuned"]
    assert [row[2] for row in table.rows] == [
        "", "+0.3000 ±0.0200", "-0.0500 ±0.0300", "-0.1250 (8 documents)",
    ]  # fmt: skip
    behind = [row["against the base"] for row in records(table)]
    assert behind == [None, 0.3, -0.05, -0.125], "rows for programs say what is printed"
    control = records(table)[2]
    ends = (control["against the base low"], control["against the base high"])
    assert ends == pytest.approx((-0.08, -0.02))
    of_base = (
        "At 256 the tuned model's loss on the last tokens is 0.1250 nats per token below the base's"
    )
    of_control = (
        "The control's is 0.0500 nats per token below the base's (95 % interval -0.0800 to "
        "-0.0200) by adaptation to the text alone."
    )
    (said,) = tuned_report.finetune_verdict(numbers, 256)
    assert said == (
        f"{of_base} in its own window, and 0.0750 nats per token below the control's. {of_control}"
    )
    numbers["tuned"] |= {
        "gain@256": Value(0.125, 0.01, (0.1, 0.15), 8),
        "gain_beyond_control@256": Value(0.07, 0.05, (-0.03, 0.17), 8),
    }
    (said,) = tuned_report.finetune_verdict(numbers, 256)
    assert said == (
        f"{of_base} in its own window (95 % interval -0.1500 to -0.1000), and 0.0700 nats per "
        "token below the control's (95 % interval -0.1700 to +0.0300, so which is lower is not "
        f"known). {of_control}"
    )


def test_the_control_is_compared_with_the_tuned_model_on_the_same_tokens():
    """Of 8 documents of 64 tokens, by hand the mean of the last 16 differences."""
    rng = np.random.default_rng(3)
    losses = rng.normal(2, 0.5, (3, 8, 64)).astype(np.float32)
    readings = {
        label: MeasuredModel(reading=Reading(label, {64: list(rows)}))
        for label, rows in zip(("base", "control", "tuned"), losses, strict=True)
    }
    frame = LossStatistics(64, (64,), 16, Bootstrap())
    numbers = training_numbers(Measurement(frame, readings))
    value = numbers["tuned"]["gain_beyond_control@64"]
    assert value.value == pytest.approx((losses[1] - losses[2])[:, -16:].mean(), abs=1e-6)
    assert value.ci95[0] < value.value < value.ci95[1]


def test_the_final_loss_is_that_of_the_weights_that_are_kept(tmp_path):
    """A learning rate that makes each step worse: patience keeps an early one."""
    ropext.extend("ropext://demo", output=tmp_path / "y", method="yarn", factor=2)
    done = ropext.finetune(
        tmp_path / "y", "ropext://tuning", output=tmp_path / "out", steps=6, batch_tokens=512,
        eval_every=1, eval_documents=8, patience=2, learning_rate=0.08, schedule="constant",
        warmup=0,
    )  # fmt: skip
    record = json.loads((tmp_path / "out/ropext.json").read_text())["finetune"]
    losses = json.loads((tmp_path / "out/training/losses.json").read_text())["tuned"]
    by_step = {entry["step"]: entry["loss"] for entry in losses}
    assert record["steps"] < record["trained_steps"] == done.steps
    assert record["final_loss"] == by_step[record["steps"]] != by_step[record["trained_steps"]]


def test_eight_passes_are_warned_of():
    assert report.repeated_text_warning(7.9) == ""
    assert "warning: [passes] after 8 passes the" in report.repeated_text_warning(8)


def test_a_fit_names_engines_that_cannot_read_it_and_the_cost_of_the_narrower_form():
    factors = [1.0 + 0.2 * pair for pair in range(16)]
    written = ropext.plan("ropext://demo", method="longrope", factor=4, pair_factors=factors)
    yarn = ropext.plan("ropext://demo", method="yarn", factor=4)
    said = fit_report.readers_note(written, yarn, 0.0486)
    assert said.startswith("written as longrope, which these engines do not compute as planned: ")
    for loader in ("llama.cpp", "ctranslate2"):
        assert loader in said.partition("; with --within yarn")[0]
    again = said.partition("; with --within yarn ")[2]
    assert "llama.cpp" in again
    assert "ctranslate2" not in again
    assert again.endswith("do, too, and it costs at most 0.0486 nats per token here (second half)")
    assert fit_report.readers_note(written, None, 0.0).startswith("written as longrope, which")
    plain = ropext.plan("ropext://demo", method="ntk", factor=4)
    assert fit_report.readers_note(plain, yarn, 0.0) == ""


def test_a_finetuning_without_steps_is_ended_by_its_held_out_documents(extended, stories):
    planned = count_training("finetune", extended, str(stories), **OPEN)
    said = report.dry_run_text(planned)
    assert "at most 400 steps, stops when held-out documents no longer improve" in said
    assert f": at most {planned.rows.passes_over_data:.1f} passes\n" in said
    # Three documents: before, after and at each of 100 evaluations; the base in windows, twice.
    assert planned.forward_tokens == 3 * 256 * (100 + 2 + 2)
    assert f"{planned.forward_tokens:,} without (evaluations, one every 4 steps)" in said
    for length, passes in (({"epochs": 7}, 6.5), ({"steps": 99}, 2)):
        asked = count_training("finetune", extended, str(stories), **OPEN, **length)
        assert asked.rows.passes_over_data > passes
        assert "at most" not in report.dry_run_text(asked).partition("documents: ")[2]


def test_a_run_says_after_its_first_step_how_long_it_will_take():
    told = []
    job = SimpleNamespace(last_step=200, stopping=trainer.Stopping(evaluate=len))
    watch = trainer._TrainerWatch(SimpleNamespace(say=told.append, job=job), lambda: False)
    now = [0.0]
    watch.pace = Pace(clock=lambda: now[0])
    watch.on_step_begin(None, SimpleNamespace(global_step=7), None)
    for step in range(8, 41):
        now[0] += 3
        watch.on_log(None, SimpleNamespace(global_step=step), None, {"loss": 2.0})
    assert told[0] == "step 8 of 200: loss 2.0000, about 10 min left, evaluations not counted"
    assert [sentence.split()[1] for sentence in told] == ["8", "18", "28", "38"]


def test_a_finetuning_learns_and_lists_its_numbers_with_base_and_control(tuned):
    done, _, _ = tuned
    assert [entry["step"] for entry in done.by_step] == list(range(1, 9))
    assert done.by_step[-1]["loss"] < done.by_step[0]["loss"] - 0.1
    assert [entry["step"] for entry in done.evaluations] == [4, 8]
    tail = {label: own["tail_nll@256"].value for label, own in done.numbers.items()}
    assert tail["tuned"] < tail["untuned"] - 0.1
    assert tail["control"] < tail["base"] - 0.1
    # The evaluation inside of the training and the one afterwards read the same weights.
    assert done.evaluations[-1]["tail_nll"] == pytest.approx(tail["tuned"], abs=1e-5)
    assert done.numbers["base"]["short_tax"].value == 0
    assert len(done.control["losses"]) == 8


def test_a_result_with_a_gradient_that_is_not_finite_opens(tmp_path):
    done = Finetuned(
        output=tmp_path,
        counted={},
        work=None,
        measurement=None,
        steps=1,
        kept_step=1,
        stopped_early=False,
        by_step=[{"step": 1, "loss": 2.5, "grad_norm": math.inf, "learning_rate": 0.01}],
        evaluations=[],
        numbers={},
        overlap=None,
        control=None,
        notes=[],
    )
    opened = Finetuned.of(tmp_path, json.loads(json.dumps(done.to_json())))
    assert opened.by_step == [{"step": 1, "loss": 2.5, "grad_norm": None, "learning_rate": 0.01}]


def test_the_base_is_the_model_before_its_extension(tuned, base, stories):
    """The base's number, from stock transformers on the unextended directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done, _, _ = tuned
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [json.loads(line)["text"] for line in stories.read_text().splitlines()]
    held = {d.name for d in done.training.judge.documents}
    losses = []
    for number, text in enumerate(texts, 1):
        if f"stories.jsonl:{number}" not in held:
            continue
        ids = torch.tensor(tokenizer(text)["input_ids"][:256])
        # Windows of 64, stride 32: the last 16 tokens before 256 are in the window from 192 on.
        # BOS, with which the tokenizer begins a text, takes the place of its first token.
        window = torch.cat([ids[:1], ids[193:]])
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0].float()
        nll = torch.nn.functional.cross_entropy(logits[47:63], ids[240:256], reduction="none")
        losses.append(float(nll.mean()))
    assert len(losses) == 3
    found = done.numbers["base"]["tail_nll@256"].value
    assert found == pytest.approx(np.mean(losses), abs=1e-5)


def test_the_merged_checkpoint_is_stock_verifies_and_keeps_config_ties_and_types(tuned, extended):
    _, output, _ = tuned
    assert (output / "config.json").read_bytes() == (extended / "config.json").read_bytes()
    found = verification.verify(output)
    assert found.passed, found.failures()
    old, new = (load_file(folder / "model.safetensors") for folder in (extended, output))
    assert old.keys() == new.keys()
    assert "lm_head.weight" not in new
    assert all(old[name].dtype == new[name].dtype for name in old)
    changed = {name.split(".")[-2] for name in old if not torch.equal(old[name], new[name])}
    assert changed == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_the_same_training_into_its_output_was_done_before(
    tuned, extended, stories, tmp_path, capsys
):
    output = shutil.copytree(tuned[1], tmp_path / "out", symlinks=True)

    def asked(force=False, model=extended, **options):
        call = Call(force=force)
        request = TrainingRequest(
            str(model), str(stories), Finetune(**RUN | {"control": True} | options)
        )
        run_training(Out(as_json=True), request, output, call, dry_run=True, wanted=None)
        answer = json.loads(capsys.readouterr().out)
        if not answer.get("done_before"):
            return None
        with request.prepared(output, call) as job:
            return job.make(output, call)

    def differs(**options):
        with pytest.raises(OutputExists) as refused:
            asked(**options)
        return re.search(r"another finished finetune \(it differs in (.+)\)", str(refused.value))[1]

    left = lock_of(run_folder(output))  # by a kill between the output's name and the clean-up
    left.write_bytes(b'{"ropext": "lock", "pid": 1')
    again = asked()
    assert again.is_from_before
    assert again.to_json() == values_json(tuned[0].to_json()) | {"output": str(output)}
    assert repr(again).splitlines()[1:] == repr(tuned[0]).splitlines()[1:]
    assert again.tables == tuned[0].tables
    assert ropext.open(output) == again
    assert again.numbers == tuned[0].numbers
    with pytest.raises(InputError, match="was finished before, and its models"):
        assert again.training
    with pytest.raises(UsageError, match=r"no losses of tokens; it has \.table\(\), \.by_step and"):
        again.losses()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert asked(force=True) is None
    assert differs(learning_rate=0.5) == "options.learning_rate"
    mended = shutil.copytree(extended, tmp_path / "mended")
    assert asked(model=mended).is_from_before  # the same files at another place
    (mended / "chat_template.jinja").write_text("{{ messages }}")
    (mended / "generation_config.json").write_text('{"temperature": 0.5}')
    changed = "base.chat_template.jinja, base.generation_config.json"
    assert differs(model=mended) == changed
    assert asked(force=True, model=mended) is None
    assert differs(control=False) == "files.control"
    (output / "training/losses.json").write_text("{}")
    with pytest.raises(OutputExists, match="exists; --force replaces"):
        asked()


def test_a_slim_output_is_the_merged_checkpoint_alone(tuned, extended, stories, tmp_path):
    whole = tuned[1]
    train("finetune", extended, str(stories), tmp_path / "out", slim=True, **RUN)
    left_out = ("base/", "adapter/", "control/")
    expected = set()
    for path in whole.rglob("*"):
        name = path.relative_to(whole).as_posix()
        if path.is_file() and not name.startswith(left_out):
            expected.add(name)
    written = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    assert written == expected
    same = "model.safetensors"
    assert (tmp_path / "out" / same).read_bytes() == (whole / same).read_bytes()
    assert "has it unmerged" not in (tmp_path / "out/README.md").read_text("utf-8")
    assert verification.verify(tmp_path / "out").passed


def test_the_record_and_the_card_of_a_finetuning_describe_the_run(tuned, extended):
    done, output, _ = tuned
    record = json.loads((output / "ropext.json").read_text())
    check(record, "ropext")
    before = json.loads((extended / "ropext.json").read_text())
    assert record["sites"] == before["sites"]
    assert record["finetune"]["steps"] == 8
    assert record["finetune"]["tokens"] == 8 * 512
    assert record["finetune"]["overlap"]["mark"] == ""  # of 8 steps none was chosen
    assert "chose" not in record["trained_on"]
    assert record["finetune"]["numbers"] == values_json(done.numbers)
    assert record["proof"]["rotary_modules"] == 1
    card = (output / "README.md").read_text()
    tail = done.numbers["tuned"]["tail_nll@256"].value
    assert f"| {tail:.4f} |" in card
    assert "the base trained on the same tokens" in card
    assert str(output.parent) not in card
    assert str(extended.parent) not in (output / "ropext.json").read_text().replace(
        json.dumps(before["base"]["name"]), ""
    )


def test_a_finetuning_writes_its_base_and_its_losses(tuned, extended):
    _, output, told = tuned
    for name in ("config.json", "model.safetensors", "ropext.json", "tokenizer.json"):
        assert (output / "base" / name).read_bytes() == (extended / name).read_bytes()
    assert (output / "training" / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = json.loads((output / "training" / "losses.json").read_text())
    assert len(losses["tuned"]) == len(losses["control"]) == 8
    assert not output.with_name("out.run").exists()
    # used.log holds the memory that each training's first step took; the messages state the same.
    lines = (output / "training/used.log").read_text().splitlines(keepends=True)
    *used, sign = map(json.loads, lines)
    assert sign == {"sha256": hashlib.sha256("".join(lines[:-1]).encode()).hexdigest()}
    assert json.loads((output / "ropext.json").read_text())["files"]["training/used.log"] == "log"
    labels = ["the first step (tuned)", "the first step (control)"]
    assert [own["what"] for own in used] == labels
    assert all(own["seconds"] > 0 and own["peak_bytes"] > 2**20 for own in used)
    said = [own for own in told if own.startswith("the first step")]
    assert [own.partition(" took")[0] for own in said] == labels


ELSEWHERE = """
import sys
assert not any(m.startswith("ropext") for m in sys.modules)
import torch
{lines}
from transformers import AutoModelForCausalLM as Merged
merged = Merged.from_pretrained(folder + "/..", dtype="auto")
ids = torch.arange(4, 60).repeat(4)[None, :200]
with torch.no_grad():
    one, two = model(input_ids=ids).logits, merged(input_ids=ids).logits
print(float((one - two).abs().max()), float(two.std()))
"""


def test_the_cards_two_lines_load_the_adapter_from_another_directory(tuned, tmp_path):
    _, output, _ = tuned
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../base"
    card = (output / "adapter" / "README.md").read_text()
    lines = card.split("```python\n")[1].split("```")[0]
    assert "path/to/this/folder" in lines
    lines = lines.replace("path/to/this/folder", str(output / "adapter"))
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE.format(lines=lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    difference, size = map(float, done.stdout.split())
    assert difference < 1e-5
    assert size > 1e-3


def test_killed_it_resumes_with_the_losses_of_an_uninterrupted_run(
    tuned, extended, stories, tmp_path
):
    output = tmp_path / "out"
    kill_at_step(5, partial(train, "finetune", extended, str(stories), output, **RUN), tmp_path)
    assert not output.exists()
    # As if the kill had come while a later checkpoint was being written.
    half = tmp_path / "out.run" / "tuned" / "checkpoint-5"
    half.mkdir()
    (half / "trainer_state.json").write_text("{")
    with pytest.raises(
        OutputExists, match=r"another run of ropext finetune \(it differs in .*seed"
    ):
        train("finetune", extended, str(stories), output, **RUN | {"seed": 1})
    told = []
    done = train("finetune", extended, str(stories), output, call=Call(Hooks(told.append)), **RUN)
    assert any("resuming after step 4" in sentence for sentence in told)
    assert done.by_step == tuned[0].by_step
    assert done.evaluations == tuned[0].evaluations
    merged = load_file(output / "model.safetensors")
    for name, tensor in load_file(tuned[1] / "model.safetensors").items():
        assert torch.equal(merged[name], tensor), name
    again = train("finetune", extended, str(stories), output, **RUN)
    assert again.is_from_before
    assert again == done


def emptied(path):
    path.write_bytes(b"")


def with_another_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def with_a_lower_loss(path):
    content = json.loads(path.read_text())
    for entry in content["log_history"]:
        if "eval_held_out" in entry:
            entry["eval_held_out"] -= 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage", "resumes"),
    [
        ("checkpoint-4/adapter_model.safetensors", with_another_byte, 3),
        ("checkpoint-4/optimizer.pt", emptied, 3),
        ("checkpoint-4/trainer_state.json", with_a_lower_loss, 3),
        ("checkpoint-4/complete", emptied, 3),
        ("checkpoint-3/adapter_model.safetensors", with_another_byte, 4),
    ],
)
def test_a_killed_training_does_the_steps_of_a_damaged_checkpoint_again(
    tuned, extended, stories, tmp_path, name, damage, resumes
):
    output = tmp_path / "out"
    kill_at_step(5, partial(train, "finetune", extended, str(stories), output, **RUN), tmp_path)
    path = tmp_path / "out.run/tuned" / name
    damage(path)
    told = []
    done = train("finetune", extended, str(stories), output, call=Call(Hooks(told.append)), **RUN)
    assert f"{path.parent} is not as this version wrote it: its steps are done again" in told
    assert f"resuming after step {resumes}" in told
    assert done.by_step == tuned[0].by_step
    assert done.evaluations == tuned[0].evaluations
    merged = load_file(output / "model.safetensors")
    for name, tensor in load_file(tuned[1] / "model.safetensors").items():
        assert torch.equal(merged[name], tensor), name


def test_an_interrupt_saves_and_the_same_call_resumes(
    tuned, extended, stories, tmp_path, monkeypatch
):
    step, output = trainer._Trainer.training_step, tmp_path / "out"

    def asks(self, *args, **kwargs):
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "training_step", asks)
    with pytest.raises(Stopped, match="saved after step 2 of 8; run the same command to resume"):
        train("finetune", extended, str(stories), output, **RUN)
    assert Stopped.exit_code == 4
    assert (tmp_path / "out.run" / "tuned" / "checkpoint-2" / "complete").exists()
    monkeypatch.undo()
    told = []
    done = train("finetune", extended, str(stories), output, call=Call(Hooks(told.append)), **RUN)
    assert "resuming after step 2" in told
    assert done.by_step == tuned[0].by_step
    merged = load_file(output / "model.safetensors")
    for name, tensor in load_file(tuned[1] / "model.safetensors").items():
        assert torch.equal(merged[name], tensor), name


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def state(**values):
    def spoil(checkpoint, _):
        path = checkpoint / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def linked(checkpoint, bomb):
    (checkpoint / "rng_state.pth").unlink()
    (checkpoint / "rng_state.pth").symlink_to(bomb)


def pickled(name, *gone):
    def spoil(checkpoint, bomb):
        shutil.copy(bomb, checkpoint / name)
        for other in gone:
            (checkpoint / other).unlink()

    return spoil


POISON = {
    **{name: pickled(name) for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")},
    "an adapter": pickled("adapter_model.bin", "adapter_model.safetensors"),
    "a link": linked,
    "a key": state(loads="evil"),
    "a step": state(global_step="../../x"),
    "a history": state(log_history=7),
    "a callback": state(stateful_callbacks={"Evil": {"args": {}, "attributes": {}}}),
    "callbacks that are none": state(stateful_callbacks=7),
    "a best value": state(best_metric="low"),
    "a logged value": state(log_history=[{"step": 1, "loss": "low"}]),
    "a checkpoint's name": state(best_model_checkpoint=7),
    "no JSON": lambda checkpoint, _: (checkpoint / "trainer_state.json").write_text("{"),
}


def test_a_poisoned_folder_of_a_run_is_one_sentence_and_runs_nothing(
    extended, stories, tmp_path, monkeypatch
):
    step, output, folder = trainer._Trainer.training_step, tmp_path / "out", tmp_path / "out.run"

    def asks(self, *args, **kwargs):
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "training_step", asks)
    with pytest.raises(Stopped):
        train("finetune", extended, str(stories), output, **RUN)
    monkeypatch.undo()
    folder.rename(tmp_path / "kept")
    bomb, ran = tmp_path / "bomb", tmp_path / "ran"
    bomb.write_bytes(pickle.dumps(Bomb(ran)))
    for name, spoil in POISON.items():
        shutil.copytree(tmp_path / "kept", folder)
        spoil(folder / "tuned" / "checkpoint-2", bomb)
        (folder / "tuned" / "checkpoint-2" / "complete").unlink()
        trainer.mark_complete(folder / "tuned" / "checkpoint-2")  # as a stranger would
        with pytest.raises(InputError, match=r"cannot be resumed \(|is a link to") as caught:
            train("finetune", extended, str(stories), output, **RUN)
        assert "\n" not in str(caught.value), name
        assert not ran.exists(), name
        assert not output.exists(), name
        shutil.rmtree(folder)


def interrupt(monkeypatch, label):
    """Send a real SIGINT when the first document is kept that was read for a label."""
    put = Store.put

    def asks(self, name, result):
        put(self, name, result)
        if self.folder is not None and self.folder.name == label:
            monkeypatch.setattr(Store, "put", put)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Store, "put", asks)


def test_an_interrupt_while_documents_are_read_stops_after_the_one_in_hand(
    tuned, extended, stories, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    told = []
    with monkeypatch.context() as early:
        interrupt(early, "untuned")
        with pytest.raises(Stopped, match=r"^interrupted; finished work is kept in "):
            train("finetune", extended, str(stories), output, call=Call(Hooks(told.append)), **RUN)
    assert "stopping after the current document (Ctrl-C again ends at once)" in told
    assert not list((tmp_path / "out.run").glob("*/checkpoint-*"))
    assert len(list((tmp_path / "out.run/readings/untuned").rglob("*.npy"))) == 1
    # After the training all of it is kept: the same call only reads and merges.
    with monkeypatch.context() as late:
        interrupt(late, "tuned")
        with pytest.raises(Stopped, match=r"^interrupted; finished work is kept in "):
            train("finetune", extended, str(stories), output, **RUN)
    assert not output.exists()
    monkeypatch.setattr(trainer._Trainer, "train", None)
    put, names = Store.put, []

    def noted(self, name, result):
        put(self, name, result)
        names.append(self.folder.name)

    monkeypatch.setattr(Store, "put", noted)
    done = train("finetune", extended, str(stories), output, **RUN)
    assert names == ["tuned"] * (RUN["eval_documents"] - 1)
    assert done.by_step == tuned[0].by_step
    with_control = dict(tuned[0].numbers["tuned"])
    del with_control["gain_beyond_control@256"]  # this call trained none
    assert done.numbers["tuned"] == with_control


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint(
    extended, stories, tmp_path, monkeypatch
):
    compute = trainer._Trainer.compute_loss

    def breaks(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 4 else loss

    monkeypatch.setattr(trainer._Trainer, "compute_loss", breaks)
    with pytest.raises(Stopped, match=r"loss is nan at step 5.*--learning-rate"):
        train("finetune", extended, str(stories), tmp_path / "out", **RUN | {"eval_documents": 0})
    kept = trainer.last_checkpoint(tmp_path / "out.run" / "tuned")
    assert kept.name == "checkpoint-3"


def test_an_evaluation_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint(
    extended, stories, tmp_path, monkeypatch
):
    def breaks(*_):
        raise NanInLogits("the logits are not finite at token 7")

    monkeypatch.setattr(rules, "far_loss", breaks)
    words = r"^after step 4 held-out documents cannot be read: .* at token 7; .*--learning-rate"
    with pytest.raises(Stopped, match=words):
        train("finetune", extended, str(stories), tmp_path / "out", **RUN)
    kept = trainer.last_checkpoint(tmp_path / "out.run" / "tuned")
    assert kept.name == "checkpoint-3"


def test_an_open_end_keeps_the_best_evaluated_weights(extended, stories, tmp_path, monkeypatch):
    heldout = [3.0, 2.0, 2.5, 2.2, 1.9, 1.8, 1.85, 1.9, 1.8]
    values = iter(heldout)
    monkeypatch.setattr(rules, "far_loss", lambda *_: next(values))
    options = OPEN | {"eval_every": 1, "save_every": 100, "control": True}
    done = train("finetune", extended, str(stories), tmp_path / "out", **options)
    assert done.stopped_early
    assert (done.steps, done.kept_step) == (9, 6)
    assert "trained 9 steps, stopped: held-out" in tuned_report.finetune_result(done)
    assert "weights of step 6, the best, are kept" in tuned_report.finetune_result(done)
    # By hand: a warm-up of 20 steps, halved after each evaluation that was no better than the best.
    halvings = [0, 0, 0, 0, 1, 2, 2, 2, 3]
    rates = [0.01 * step / 20 / 2**own for step, own in enumerate(halvings)]
    assert [own["learning_rate"] for own in done.by_step] == pytest.approx(rates)
    # The control is trained on the tokens that are in the merged weights, at the same rates.
    assert done.control["steps"] == len(done.control["losses"]) == 6
    assert [own["learning_rate"] for own in done.control["losses"]] == pytest.approx(rates[:6])
    record = json.loads((tmp_path / "out" / "ropext.json").read_text())["finetune"]
    assert (record["steps"], record["trained_steps"], record["tokens"]) == (6, 9, 6 * 512)
    assert record["overlap"]["mark"] == "3 of 3 chosen on"
    told = [note for note in done.notes if note.startswith("3 of 3 documents chose")]
    assert len(told) == 1
    # Killed after the best step it ends alike: what stops it follows from its checkpoint.
    values, step = iter(heldout), trainer._Trainer.training_step

    def ends(self, *args, **kwargs):
        if self.state.global_step == 6:
            raise RuntimeError("killed")
        return step(self, *args, **kwargs)

    options["control"] = False
    with monkeypatch.context() as early:
        early.setattr(trainer._Trainer, "training_step", ends)
        with pytest.raises(RuntimeError, match="killed"):
            train("finetune", extended, str(stories), tmp_path / "two", **options)
    best = load_file(tmp_path / "two.run/tuned/checkpoint-6/adapter_model.safetensors")
    merged = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(best[name], merged[name]) for name in best)
    again = train("finetune", extended, str(stories), tmp_path / "two", **options)
    assert (again.by_step, again.evaluations) == (done.by_step, done.evaluations)
    assert (again.steps, again.kept_step) == (9, 6)


def test_pose_trains_positions_up_to_the_target_in_rows_of_half_of_it(
    extended, stories, tmp_path, monkeypatch
):
    compute, seen = trainer._Trainer.compute_loss, []

    def looks(self, model, inputs, *args, **kwargs):
        seen.append({key: inputs[key].clone() for key in ("input_ids", "position_ids")})
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "compute_loss", looks)
    options = RUN | {"steps": 4, "strategy": "pose", "eval_documents": 0}
    train("finetune", extended, str(stories), tmp_path / "out", **options)
    # What the model was given: 16 rows of 128 tokens, each with one jump, up to position 255.
    assert {own["input_ids"].shape[1] for own in seen} == {128}
    positions = torch.cat([own["position_ids"] for own in seen])
    assert positions.shape == (16, 128)
    assert ((positions.diff() != 1).sum(1) == 1).sum() >= 14  # a jump of none is drawn once in 129
    assert 220 < int(positions.max()) < 256
    record = json.loads((tmp_path / "out" / "ropext.json").read_text())
    assert record["finetune"]["strategy"] == "pose"


# An eighth of it is 34 bytes for each of 2 rows x 256 tokens x 32 channels x 2 layers, or less.
PLENTY = 8 * 34 * 2 * 256 * 32 * 2


@pytest.mark.parametrize(("free", "times"), [(PLENTY - 8, 2), (PLENTY, 1)])
def test_layers_are_recomputed_in_the_backward_pass_only_if_memory_is_short(
    extended, stories, tmp_path, monkeypatch, free, times
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    from ropext.training import objective

    step, forward, ran, runs = trainer._Trainer.training_step, LlamaMLP.forward, [], []

    def counts(self, *args, **kwargs):
        ran.append(self)
        return forward(self, *args, **kwargs)

    def within(self, *args, **kwargs):  # neither the probe before it nor the proof after it
        ran.clear()
        loss = step(self, *args, **kwargs)
        runs.append(len(ran))
        return loss

    monkeypatch.setattr(objective, "free_memory", lambda device: free)
    monkeypatch.setattr(LlamaMLP, "forward", counts)
    monkeypatch.setattr(trainer._Trainer, "training_step", within)
    options = RUN | {"steps": 1, "eval_documents": 0, "micro_rows": 2}
    done = train("finetune", extended, str(stories), tmp_path / "out", **options)
    assert done.counted["recompute"] is (times == 2)
    assert runs == [2 * times]  # one in each of two layers


def test_mistakes_give_one_sentence(base, extended, stories, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(InputError, match=r"not extended by ropext.*ropext extend"):
        train("finetune", base, str(stories), output)
    with pytest.raises(UsageError, match=r"q_prj .*did you mean q_proj.*down_proj"):
        train("finetune", extended, str(stories), output, targets=("q_prj",))
    with pytest.raises(UsageError, match=r"--rank 17 is above 16, the smaller side of .*k_proj"):
        train("finetune", extended, str(stories), output, rank=17)
    with pytest.raises(UsageError, match="qlora needs a CUDA device"):
        train("finetune", extended, str(stories), output, qlora=True)
    with pytest.raises(InputError, match=r"no column story.*there are text"):
        train("finetune", extended, str(stories), output, column="story")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "the cat sat " * 10}))
    with pytest.raises(InputError, match=r"at least 256 tokens.*has 121.*--strategy pose"):
        train("finetune", extended, str(short), output)
    record = json.loads((extended / "ropext.json").read_text()) | {"finetune": {"steps": 1}}
    again = tmp_path / "again"
    shutil.copytree(extended, again)
    (again / "ropext.json").write_text(json.dumps(record))
    source = re.escape(record["base"]["name"])
    with pytest.raises(InputError, match=rf"its .* untuned base does not lie in it.* {source} ag"):
        train("finetune", again, str(stories), output)  # as --slim leaves it
    shutil.copytree(extended, again / "base")
    with pytest.raises(
        InputError, match=rf"its .* untuned base lies in {re.escape(str(again))}.ba"
    ):
        train("finetune", again, str(stories), output)
    assert not list(tmp_path.glob("out*"))
    # This one is seen when the model is loaded.
    with pytest.raises(UsageError, match=r"--attn-implementation nonsense: .*sdpa"):
        train("finetune", extended, str(stories), output, attn_implementation="nonsense", **RUN)
    assert not output.exists()
    # Nothing was kept of it, so that the corrected command may take the name.
    assert not (tmp_path / "out.run").exists()
    count_training("finetune", extended, str(stories), output, **RUN)
