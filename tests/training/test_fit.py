"""A whole fit: its files, that stock loads them, that it learned, and that it resumes."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import in_two_processes
from json_schema import check
from safetensors.torch import load_file, save_file
from trained import count_training, kill_at_step, train

import ropext
from ropext.base.errors import (
    InputError,
    NotExpressible,
    OutputExists,
    Stopped,
    UnsupportedModel,
    UsageError,
)
from ropext.base.jsontext import values_json
from ropext.base.narration import Call, Hooks
from ropext.base.workdir import SEAL, write_manifest
from ropext.evaluation.forward import NanInLogits, TokenScorer
from ropext.results import rules
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.perplexity import Reading
from ropext.results.retrieval import ItemScore
from ropext.results.values import Value
from ropext.training import data, fit, fit_report, models, trainer
from ropext.training.fit_objective import FitObjective
from ropext.training.tables import fit_table
from ropext.verifying import verification

pytestmark = pytest.mark.slow

DEMO = Path(ropext.__file__).parent / "demo"
# The bundled checkpoint knows 256 tokens. Told that it knows 128, the spectrum that a factor of two
# needs is its own, every pair factor 1; PI begins with 2 everywhere.
KNOWN = {
    "context": 128,
    "factor": 2,
    "start": "pi",
    "steps": 48,
    "batch_tokens": 4096,
    "retrieval_items": 10,
    "held_out": 8,
    "learning_rate": 0.1,
    "eval_every": 12,
}
# On random weights nothing is learned, and everything else is as in earnest.
RANDOM = {
    "factor": 4,
    "start": "yarn,ntk",
    "steps": 8,
    "batch_tokens": 1024,
    "eval_every": 2,
    "retrieval_share": 0.0,
    "retrieval_items": 0,
    "held_out": 8,
}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Run a fit that learns; return its result, its folder, its messages, and the weights in memory
    afterwards."""
    output = tmp_path_factory.mktemp("fitted") / "out"
    told, loaded = [], []
    load = models.load_to_train

    def keeps(*args):
        loaded.append(load(*args))
        return loaded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_to_train", keeps)
        done = train('fit',
            DEMO / "checkpoint", str(DEMO / "data" / "tuning.jsonl"), output,
            call=Call(Hooks(told.append), ("ropext", "fit")), **KNOWN,
        )  # fmt: skip
    return done, output, told, loaded[0]


def test_a_fit_finds_the_true_spectrum_again(fitted):
    done, _, told, _ = fitted
    assert done.kept == "fitted", told
    assert done.change.ci95[1] < -1
    numbers = [done.numbers[label] for label in ("start", "fitted")]
    start, found = (values["far_half_nll@256"].value for values in numbers)
    true = np.mean([half for half, _ in losses_of(DEMO / "checkpoint", done)])
    assert start > true + 1
    assert found - true < 0.1 * (start - true)
    # The fast pairs, which turn often inside of 256 tokens, go back to 1.
    assert np.mean(np.abs(np.log(done.pair_factors[:6]))) < 0.3 * np.log(2)


def test_of_several_starts_the_lowest_on_held_out_documents_is_taken(tmp_path):
    """The result equals a fit from that start alone, though another start comes first."""
    short = KNOWN | {"steps": 4, "batch_tokens": 512, "eval_every": 4, "retrieval_items": 0}
    data = (DEMO / "checkpoint", str(DEMO / "data" / "tuning.jsonl"))
    alone = train("fit", *data, tmp_path / "alone", **short | {"start": "yarn"})
    both = train("fit", *data, tmp_path / "both", **short | {"start": "pi,yarn"})
    assert both.closed_forms["yarn"] < both.closed_forms["pi"]
    assert both.start == "yarn"
    assert (both.judgements, both.by_step) == (alone.judgements, alone.by_step)
    assert both.pair_factors == alone.pair_factors
    assert both.tokens == both.counted["tokens"] == alone.tokens


def losses_of(directory, done):
    """Return the losses of every judging document, far half and tail, by stock transformers
    alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    names = {own.name for own in done.training.judge.documents}
    losses = []
    with open(DEMO / "data" / "tuning.jsonl", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if f"tuning.jsonl:{number}" not in names:
                continue
            ids = torch.tensor(tokenizer(json.loads(line)["text"])["input_ids"][:256])
            with torch.no_grad():
                logits = model(ids[None]).logits[0].float()
            nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            losses.append((float(nll[127:].mean()), float(nll[-32:].mean())))
    assert len(losses) == len(names) == 8
    return losses


def test_frozen_weights_are_bit_equal_after_it(fitted):
    _, output, _, model = fitted
    base = load_file(DEMO / "checkpoint" / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in base.items())
    written = (output / "model.safetensors").read_bytes()
    assert written == (DEMO / "checkpoint" / "model.safetensors").read_bytes()


def test_stock_transformers_builds_the_fitted_spectrum_from_the_written_config(fitted):
    from transformers import AutoModelForCausalLM

    done, output, _, _ = fitted
    model = AutoModelForCausalLM.from_pretrained(output)
    rotary = model.model.rotary_emb
    plain = 10000.0 ** (-np.arange(0, 32, 2) / 32)
    assert rotary.inv_freq.numpy() == pytest.approx(plain / done.pair_factors, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(done.attention_factor, rel=1e-6)
    found = verification.verify(output)
    assert found.passed, found.failures()


def test_the_numbers_equal_stock_transformers_on_the_output(fitted):
    done, output, _, _ = fitted
    half, tail = np.mean(losses_of(output, done), axis=0)
    assert done.numbers["fitted"]["far_half_nll@256"].value == pytest.approx(half, abs=1e-4)
    assert done.numbers["fitted"]["tail_nll@256"].value == pytest.approx(tail, abs=1e-4)


def test_the_output_describes_the_fit(fitted):
    done, output, told, _ = fitted
    record = json.loads((output / "ropext.json").read_text())
    check(record, "ropext")
    assert record["method"] == "longrope"
    assert record["command"] == ["ropext", "fit"]
    section = record["fit"]
    assert (section["kept"], section["start"], section["step"]) == ("fitted", "pi", done.step)
    assert section["tokens"] == 48 * 4096
    assert len(section["judging"]) == 8
    assert section["change"] == values_json(done.change)
    opened = ropext.open(output)
    assert opened == done
    assert repr(opened) == repr(done)
    assert opened.judgements == done.judgements
    assert opened.closed_forms == done.closed_forms
    assert [row["model"] for row in opened.table()] == ["base", "pi", "fitted"]
    card = (output / "README.md").read_text()
    assert "fitted on text with the weights frozen: 17 numbers" in card
    assert "short tax" in card
    stored = json.loads((output / "pair-factors.json").read_text())
    assert stored["pair_factors"] == list(done.pair_factors)
    for name in ("pair-factors.png", "positions.png"):
        assert (output / "fit" / name).read_bytes().startswith(b"\x89PNG")
    losses = json.loads((output / "fit" / "losses.json").read_text())
    assert [own["step"] for own in losses["losses"]] == list(range(1, 49))
    assert [own["step"] for own in losses["judgements"]] == [12, 24, 36, 48]
    text = fit_report.fit_result(done)
    assert "pi" in text
    assert "cost: 48 steps, 196,608 tokens with gradients" in text
    assert "short tax" in text
    assert any("step" in sentence and "is kept" in sentence for sentence in told)
    assert not list(output.parent.glob("out.run"))


def test_the_pair_factors_file_gives_the_same_spectrum_to_extend(fitted):
    done, output, _, _ = fitted
    plan = ropext.plan(
        str(DEMO / "checkpoint"), method="longrope", context=128, factor=2,
        pair_factors=str(output / "pair-factors.json"), attention_factor=done.attention_factor,
    )  # fmt: skip
    assert plan.main.wanted == done.plan.main.wanted


def test_the_start_is_written_if_no_step_is_surely_better(tmp_path, monkeypatch):
    """The steps are so wide that they only do harm; the cost counts every token that the model
    read."""
    from transformers import LlamaModel

    told, read, forward = [], [], LlamaModel.forward

    def counting(self, input_ids=None, **how):
        if not torch.is_grad_enabled() and input_ids.shape[1] > 48:  # a shorter one proves a reader
            read.append(input_ids.shape[1] + input_ids.shape[1] % 2)  # a question's last is unread
        return forward(self, input_ids=input_ids, **how)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    options = KNOWN | {"start": "yarn", "steps": 4, "eval_every": 1, "learning_rate": 4.0}
    done = train(
        "fit",
        DEMO / "checkpoint",
        str(DEMO / "data" / "tuning.jsonl"),
        tmp_path / "out",
        call=Call(Hooks(told.append)),
        **options,
    )
    assert (done.kept, done.step) == ("start", 0)
    assert done.forward_tokens == sum(read)
    assert not (tmp_path / "out.run").exists()
    assert done.change.value > -1e-5  # the first step of the warm-up moves nothing
    assert done.judgements[2] > done.judgements[1] + 0.1
    assert any("no step is better than yarn by 0.01 nats per token or more" in own for own in told)
    assert done.numbers["fitted"]  # measured and shown all the same
    yarn = tmp_path / "yarn"
    wish = {"method": "yarn", "factor": 2, "context": 128}
    ropext.extend(str(DEMO / "checkpoint"), yarn, no_verify=True, **wish)
    written = (tmp_path / "out" / "config.json").read_bytes()
    assert written == (yarn / "config.json").read_bytes()
    record = json.loads((tmp_path / "out" / "ropext.json").read_text())
    assert (record["method"], record["fit"]["kept"]) == ("yarn", "start")
    assert verification.verify(tmp_path / "out").passed


@pytest.fixture(scope="module")
def plain(base, stories, tmp_path_factory):
    """Run a short fit of random weights."""
    output = tmp_path_factory.mktemp("plain") / "out"
    return train("fit", base, str(stories), output, **RANDOM)


def test_a_killed_fit_resumes_to_the_same_spectrum(plain, base, stories, tmp_path):
    done, output = plain, tmp_path / "out"
    kill_at_step(4, partial(train, "fit", base, str(stories), output, **RANDOM), tmp_path)
    assert not output.exists()
    kept = load_file(tmp_path / "out.run/fitted-yarn/checkpoint-4/model.safetensors")
    assert set(kept) == {"offsets", "attention"}  # the weights are in no checkpoint
    with pytest.raises(OutputExists, match=r"another run of ropext fit \(it differs in .*ceiling"):
        train("fit", base, str(stories), output, **RANDOM | {"ceiling": 3.0})
    told = []
    again = train("fit", base, str(stories), output, call=Call(Hooks(told.append)), **RANDOM)
    assert any("resuming after step 4" in sentence for sentence in told)
    assert again.by_step == done.by_step
    assert again.judgements == done.judgements
    assert again.pair_factors == done.pair_factors


DAMAGED = {
    "readings/yarn/*/*.npy": "resuming after step 5",
    "steps/yarn/4/pass-*/*.npy": "resuming after step 3",
    "steps/yarn/4/knobs.json": "resuming after step 3",
    "steps/yarn/2/pass-*/*.npy": "fitting",
}


@pytest.mark.parametrize(("piece", "said"), DAMAGED.items())
def test_a_killed_fit_does_damaged_pieces_again(plain, base, stories, tmp_path, piece, said):
    output = tmp_path / "out"
    kill_at_step(5, partial(train, "fit", base, str(stories), output, **RANDOM), tmp_path)
    folder = tmp_path / "out.run"
    path = min(folder.glob(piece))
    content = path.read_bytes()
    path.write_bytes(content[:-200] + content[-100:])
    told = []
    again = train("fit", base, str(stories), output, call=Call(Hooks(told.append)), **RANDOM)
    name = path.relative_to(folder).as_posix()
    assert (
        f"{folder}: pieces that are not as this version wrote them are computed again: {name}"
        in told
    )
    resumed = [sentence for sentence in told if sentence.startswith(("resuming", "fitting"))]
    assert resumed[-1].startswith(said)
    assert again.by_step == plain.by_step
    assert again.judgements == plain.judgements
    assert again.pair_factors == plain.pair_factors


def shared_by_two(base, stories, tmp_path):
    """Return the result of a fit in two processes."""

    def call():
        done = train("fit", base, str(stories), tmp_path / "out", **RANDOM)
        print(json.dumps(done and done.to_json()))

    (code, said), (other, err) = in_two_processes(call, tmp_path)
    assert (code, other) == (0, 0), said + err
    return json.loads(said.splitlines()[-1])


def test_two_processes_find_the_same_as_one(plain, base, stories, tmp_path):
    done, found = plain, shared_by_two(base, stories, tmp_path)
    for mine, theirs in zip(done.by_step, found["losses"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
    mine = list(done.judgements.values())
    theirs = [own["far_half_nll"] for own in found["judgements"]]
    assert theirs == pytest.approx(mine, abs=1e-5)


def test_a_loss_that_is_no_number_in_one_process_ends_all_at_the_same_step(
    base, stories, tmp_path, monkeypatch
):
    compute = trainer._Trainer.compute_loss

    def breaks(self, *args, **kwargs):
        bad = self.state.global_step == 4 and os.environ["RANK"] == "1"
        return compute(self, *args, **kwargs) * (float("nan") if bad else 1.0)

    monkeypatch.setattr(trainer._Trainer, "compute_loss", breaks)
    found = shared_by_two(base, stories, tmp_path)
    assert [own["step"] for own in found["judgements"]] == [2, 4]
    assert any("the loss is nan at step 5" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("within", "start", "context", "form", "method"),
    [("yarn", "yarn", 128, "yarn", "yarn"), ("ntk", "dynamic", 64, "default", "abf")],
)
def test_the_narrower_forms_are_written_by_their_own_keys(
    within, start, context, form, method, tmp_path
):
    options = {"within": within, "start": start, "context": context, "steps": 12}
    options |= {"factor": 256 / context, "retrieval_items": 0, "held_out": 32}
    options |= {"learning_rate": 0.03}
    done = train(
        "fit",
        DEMO / "checkpoint",
        str(DEMO / "data" / "tuning.jsonl"),
        tmp_path / "out",
        **KNOWN | options,
    )
    assert done.kept == "fitted"
    assert (done.plan.method, done.plan.main.params["rope_type"]) == (method, form)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if within == "yarn":
        assert config["rope_parameters"]["truncate"] is False
    else:
        assert config["rope_theta"] == done.plan.knobs["theta"]
        assert done.attention_factor == 1
    assert verification.verify(tmp_path / "out").passed


def test_a_loader_decides_which_factors_are_trained(base, stories):
    def within(**options):
        return count_training(
            "fit", base, str(stories), **RANDOM | {"start": None} | options
        ).within

    assert within() == "longrope"
    assert within(for_loaders=("vllm",)) == "longrope"
    assert within(for_loaders=("llama.cpp",)) == "ntk"
    with pytest.raises(NotExpressible, match=r"--for llama.cpp"):
        within(for_loaders=("llama.cpp",), within="longrope")


def test_a_loss_that_is_no_number_ends_the_fit_and_keeps_the_earlier_judgements(
    base, stories, tmp_path, monkeypatch
):
    compute = trainer._Trainer.compute_loss

    def breaks(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 4 else loss

    monkeypatch.setattr(trainer._Trainer, "compute_loss", breaks)
    done = train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    said = f"the loss is nan at step 5 (from {done.start}); the steps judged before count"
    assert any(said in note for note in done.notes)
    assert list(done.judgements) == [2, 4]
    assert done.tokens == 4 * 1024


def test_a_judgement_that_is_no_number_ends_the_fit_and_keeps_the_earlier_ones(
    base, stories, tmp_path, monkeypatch
):
    read, count = TokenScorer.token_nll, []

    def breaks(self, ids, watch):
        nll = read(self, ids, watch)
        count.append(len(ids))
        # Of 24 documents 6 are held out: the base reads them in 7 windows each, each of two starts
        # once, and the first two judgements.
        if len(count) == 6 * (7 + 2 + 2) + 3:
            raise NanInLogits("the logits are not finite at token 200")
        return nll

    monkeypatch.setattr(TokenScorer, "token_nll", breaks)
    done = train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    said = next(note for note in done.notes if note.startswith("stopped: after step 6 held-out"))
    assert "the logits are not finite at token 200" in said
    assert f"(from {done.start}); the steps judged before count" in said
    assert list(done.judgements) == [2, 4]
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_spectrum_that_leaves_the_guards_ends_the_fit_and_keeps_the_judgements(
    base, stories, tmp_path
):
    options = RANDOM | {"within": "ntk", "start": "ntk", "learning_rate": 0.5, "steps": 40}
    done = train("fit", base, str(stories), tmp_path / "out", **options | {"ceiling": 1.5})
    assert any("stopped: " in note and "judged before count" in note for note in done.notes)
    assert 0 < len(done.by_step) < 40


def test_few_documents_are_warned_of(base, stories, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(stories.read_text().splitlines()[:5]))
    planned = count_training("fit", base, str(few), **RANDOM)
    assert len(planned.judge.documents) == 1
    assert "only 1 held-out documents give no interval" in planned.remarks[0]


def test_no_document_is_in_both_parts(base, stories):
    for packing in ("documents", "glued"):
        prepared = count_training("fit", base, str(stories), **RANDOM | {"packing": packing})
        found = prepared.data
        assert any("no two of which share" in own for own in prepared.remarks) == (
            packing == "glued"
        )
        judging = {bytes(own.ids[1:60].tobytes()) for own in found.held_out}
        for document in found.documents:
            text = document.ids.astype(np.int32).tobytes()
            assert not any(own in text for own in judging)


def test_mistakes_give_one_sentence(base, stories, tmp_path):
    from transformers import ModernBertConfig

    output = tmp_path / "out"

    def fit(data=str(stories), **options):
        return train("fit", base, str(data), output, **RANDOM | options)

    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(InputError, match="holds no document"):
        fit(empty)
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps({"text": f"the cat sat {n}"}) for n in "abc"))
    with pytest.raises(InputError, match=r"none of the 3 documents reaches 256.*--split-documents"):
        fit(short)
    with pytest.raises(UsageError, match="cannot start from --start longrope"):
        fit(start="longrope")
    with pytest.raises(UsageError, match=r"^--start 'foo' is not a method"):
        fit(start="foo")
    with pytest.raises(UsageError, match=r"--within yarn cannot start from --start pi"):
        fit(start="pi", within="yarn")
    with pytest.raises(UsageError, match="--ceiling must be at least 1"):
        fit(ceiling=0.5)
    with pytest.raises(UsageError, match="--retrieval-share must be below 1"):
        fit(retrieval_share=1.0)
    with pytest.raises(UsageError, match=r"--within is one of longrope, yarn, ntk"):
        fit(within="all")
    with pytest.raises(UsageError, match="unknown option 'rank'"):
        fit(rank=4)
    with pytest.raises(UsageError, match="give --factor 4, or --target"):
        fit(factor=None)
    masked = tmp_path / "masked"
    shutil.copytree(base, masked)
    config = ModernBertConfig(architectures=["ModernBertForMaskedLM"])
    (masked / "config.json").write_text(config.to_json_string())
    with pytest.raises(UnsupportedModel, match="is a masked language model"):
        train("fit", masked, str(stories), output, **RANDOM)
    assert not list(tmp_path.glob("out*"))


def test_an_interrupt_saves_and_the_same_command_resumes(base, stories, tmp_path, monkeypatch):
    step = trainer._Trainer.training_step

    def asks(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), 2)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "training_step", asks)
    with pytest.raises(Stopped, match=r"saved after step 3 of 8; run the same command to resume"):
        train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    monkeypatch.undo()
    manifest = json.loads((tmp_path / "out.run" / "run.json").read_text())
    del manifest[SEAL]
    manifest["versions"]["torch"] = "1.0"
    write_manifest(tmp_path / "out.run", manifest)
    said = []
    again = train(
        "fit", base, str(stories), tmp_path / "out", call=Call(Hooks(said.append)), **RANDOM
    )
    assert again.judgements.keys() == {2, 4, 6, 8}
    assert any("started with torch 1.0, resumes with torch 2" in each for each in said)


def test_an_interrupt_while_documents_are_read_keeps_the_read_ones(
    base, stories, tmp_path, monkeypatch
):
    put, names = Store.put, []

    def asks(self, name, result):
        put(self, name, result)
        names.append((self.folder, name))
        if len(names) == 2:
            os.kill(os.getpid(), 2)

    monkeypatch.setattr(Store, "put", asks)
    with pytest.raises(
        Stopped, match=r"^interrupted; finished work is kept in .*out\.run; run the same"
    ):
        train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    assert len(names) == 2
    train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    kept = [own for own in names if own[0] is not None]
    assert len({*kept}) == len(kept) > 2


def test_other_weights_of_the_same_shapes_are_another_run(base, stories, tmp_path):
    """A header does not identify the weights; readings and steps depend on them."""
    again = tmp_path / "again"
    shutil.copytree(base, again)
    file = again / "model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    tensors[first].view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    from ropext.options.training import Fit
    from ropext.pipeline.stages import FitStage

    found = [
        fit.prepare_fit(str(own), str(stories), Fit(**RANDOM)).decides() for own in (base, again)
    ]
    assert [key for key in found[0] if found[0][key] != found[1][key]] == ["weights"]
    # A value at its default is in no key. If a default changes, another number that is in a key
    # must rise.
    assert found[0]["schema"] == FitStage.schema == 3


def test_a_full_disk_gives_one_sentence_and_the_same_command_resumes(
    base, stories, tmp_path, monkeypatch
):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer._Trainer, "_save_checkpoint", full)
    with pytest.raises(Stopped, match=r"out\.run cannot be written: No space left on device"):
        train("fit", base, str(stories), tmp_path / "out", **RANDOM)
    monkeypatch.undo()
    assert train("fit", base, str(stories), tmp_path / "out", **RANDOM).judgements.keys() == {
        2,
        4,
        6,
        8,
    }


def test_a_model_without_answers_gets_no_questions_at_the_target(base, stories, tmp_path):
    options = RANDOM | {"retrieval_items": 10, "retrieval_share": 0.5, "steps": 2}
    done = train("fit", base, str(stories), tmp_path / "out", **options)
    assert any("the base does not answer them inside its own context" in own for own in done.notes)
    assert done.numbers["base"]["passkey@64"].n == 10
    assert done.measurement.values("fitted")["tail_nll@256"].value == pytest.approx(
        done.numbers["fitted"]["tail_nll@256"].value, abs=0
    )
    assert not any(name.startswith("passkey") for name in done.numbers["start"])
    assert done.training.rows.questions is None


def score(index, exact):
    return ItemScore("passkey", 255, 0.5, index, 1.0, 5, exact, f"{index}", (1,), (1,))


def test_of_the_steps_that_surely_beat_the_start_the_lowest_is_taken():
    """A step that is lower in the mean, but not surely, does not count. If no step is surely
    better, the lowest is reported."""
    gains = {"start": [0, 0.004] * 4, "5": [0.02, 0.024] * 4, "10": [0.4, -0.2] * 4}
    gains |= {"15": [0.03, 0.034] * 4, "20": [-0.1] * 8}
    models = {
        label: MeasuredModel(
            reading=Reading(label, {256: [np.full(256, 2.0 - gain, np.float32) for gain in each]})
        )
        for label, each in gains.items()
    }
    found = Measurement(data.judging_workload((), (64, 256), 0).frame, models)
    hoped, surer, start = (rules.far_loss(found, label) for label in ("10", "15", "start"))
    assert hoped < surer < start
    assert rules.best_fit_step(found, ["5", "10", "15", "20"], "start") == "15"
    assert rules.best_fit_step(found, ["20", "10"], "start") == "10"


def test_a_fit_that_answers_surely_fewer_questions_has_lost():
    wrong = {"start": 0, "twelve": 12, "one": 1}  # of forty
    models = {
        label: MeasuredModel(items=tuple(score(index, index >= count) for index in range(40)))
        for label, count in wrong.items()
    }
    found = Measurement(
        data.judging_workload((), (64, 256), 0).frame, models | {"no": MeasuredModel()}
    )
    assert rules.lost_answers(found, "twelve", "start").value == pytest.approx(-12 / 40)
    assert rules.lost_answers(found, "one", "start") is None
    assert rules.lost_answers(found, "start", "twelve") is None
    assert rules.lost_answers(found, "no", "no") is None


def test_a_few_steps_are_those_of_a_literal_loop(tmp_path, monkeypatch):
    """Stock's model with a rotation of its own, the loss written out, and AdamW by hand: windows of
    the target and short ones, from the same rows."""
    from transformers import AutoModelForCausalLM

    decide, seen = FitObjective._choose_step, []

    def remembering(self, pause, steps):
        seen.append((self, self.steps.knobs(4)))
        return decide(self, pause, steps)

    monkeypatch.setattr(FitObjective, "_choose_step", remembering)
    options = KNOWN | {"steps": 4, "batch_tokens": 512, "eval_every": 4, "keep_short": 2}
    options |= {"retrieval_items": 0, "retrieval_share": 0.0, "learning_rate": 0.05}
    train(
        "fit", DEMO / "checkpoint", str(DEMO / "data" / "tuning.jsonl"), tmp_path / "out", **options
    )
    objective, knobs = seen[0]

    model = AutoModelForCausalLM.from_pretrained(DEMO / "checkpoint").eval().requires_grad_(False)
    plain = torch.tensor(10000.0 ** (-np.arange(0, 32, 2) / 32))
    # Sixteen offsets of the logarithms of the pair factors, which begin at 2, and the attention's.
    moving = torch.zeros(17, dtype=torch.float64, requires_grad=True)

    def rotation(x, position_ids, *args, **kwargs):
        frequencies = (plain / (2 * moving[:16].exp())).float()
        angles = position_ids[:, :, None].float() * frequencies
        both = torch.cat([angles, angles], -1)
        scale = (moving[16] / 4).exp().float()
        return both.cos() * scale, both.sin() * scale

    model.model.rotary_emb.forward = rotation
    mean = torch.zeros(17, dtype=torch.float64)
    square = torch.zeros(17, dtype=torch.float64)
    losses = []
    for step, rate in enumerate((0.0, 0.05, 0.0375, 0.0125)):  # one step of warm-up, then a cosine
        total = 0.0
        for number in range(4 * step, 4 * step + 4):
            ids = torch.from_numpy(objective.mixed[number].ids.astype("int64"))
            logits = model(ids[None], use_cache=False).logits[0]
            nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            loss = nll.mean()
            if len(ids) == 256:  # the far half, and as much the last 32 tokens
                loss = (nll[127:].mean() + nll[-32:].mean()) / 2
            total = total + loss / 4
        (gradient,) = torch.autograd.grad(total, moving)
        gradient = gradient / max(1.0, float(gradient.norm()))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        first = mean / (1 - 0.9 ** (step + 1))
        second = square / (1 - 0.95 ** (step + 1))
        with torch.no_grad():
            moving -= rate * first / (second.sqrt() + 1e-8)
        losses.append(total.item())
    assert [own["loss"] for own in objective.history.losses] == pytest.approx(losses, abs=1e-4)
    factors = 2 * moving[:16].detach().exp().numpy()
    assert np.abs(factors / 2 - 1).max() > 0.05  # or the comparison would show nothing
    assert np.array(knobs["pair_factors"]) == pytest.approx(factors, rel=1e-5)
    assert knobs["attention_factor"] == pytest.approx(
        float((moving[16].detach() / 4).exp()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("wrote", "rows"), [(True, ["base", "yarn", "fitted"]), (False, ["base", "yarn"])]
)
def test_the_table_has_only_the_checkpoint_that_was_written(wrote, rows):
    value = Value(2.0, 0.1, (1.8, 2.2), 8)
    numbers = {label: {"tail_nll@512": value} for label in ("base", "start", "fitted")}
    table = fit_table(numbers, "yarn", (256, 512), None, wrote_fitted=wrote)
    assert [row[0] for row in table.rows] == rows
