"""Whole evaluations of a tiny checkpoint: the numbers, the kept files, the refusals."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from command_line import Forked, in_two_processes
from prepared import costs_of, evaluation_of
from small_models import CONTEXT, rope, tiny
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from transformers import AutoModelForCausalLM

import ropext
from ropext.base.errors import (
    InputError,
    NothingKept,
    OutputExists,
    Stopped,
    UsageError,
)
from ropext.base.narration import Hooks
from ropext.evaluation.lineup import Lineup, fetched, line_up
from ropext.evaluation.variants import Variant
from ropext.files.checkpoint import open_snapshot
from ropext.models.load import load_model
from ropext.options.evaluate import Evaluate
from ropext.pipeline.public import evaluate


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation")
    torch.set_num_threads(1)
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    return path


@pytest.fixture(scope="session")
def whole(place):
    """Run the undisturbed evaluation that others are compared with."""
    return evaluate(str(place / "model"), place / "whole", **asked(place))


def asked(place, **changes):
    options = {
        "data": str(place / "docs.jsonl"),
        "lengths": LENGTHS,
        "method": "pi,yarn",
        "factor": "4",
        "tasks": "copy",
        "items": 1,
        "depths": "0.2,0.8",
        "haystack": "noise",
    }
    return options | changes


def metric(done, label, name):
    return done.results["variants"][label]["metrics"][name]["value"]


def same_files(one, other, *names):
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


KEPT = ("results.json", "items.jsonl", "documents.json", "report.md", "report.html")


def test_an_evaluation_compares_base_untouched_and_extended(whole):
    assert list(whole.results["variants"]) == ["base", "untouched", "pi-4x", "yarn-4x"]
    assert whole.results["context"] == CONTEXT
    assert whole.results["tail_tokens"] == 16
    assert whole.results["documents"]["used"] == 9
    assert whole.results["protocol"] == "ropext"
    # The untouched model inside its window is the base: no tax at all, no gain.
    assert metric(whole, "untouched", "short_tax") == 0
    assert metric(whole, "untouched", "gain@64") == 0
    for label in ("untouched", "pi-4x", "yarn-4x"):
        gain = metric(whole, label, "in_window_nll@256") - metric(whole, label, "tail_nll@256")
        assert metric(whole, label, "gain@256") == pytest.approx(gain, abs=1e-9)
        assert metric(whole, label, "in_window@256") == metric(whole, "base", "tail@256")
    assert len((whole.path / "items.jsonl").read_text().splitlines()) == 4 * 3 * 2


def test_in_memory_equals_the_saved_extension_and_its_recorded_base(place, whole):
    saved = place / "saved"
    ropext.extend(str(place / "model"), saved, method="yarn", factor=4.0, no_verify=True)
    done = evaluate(str(saved), **asked(place, method=None, factor=None))
    assert list(done.results["variants"]) == ["base", "untouched", "extended"]
    for name in ("tail@256", "short_tax", "gain@128", "copy_nll@256"):
        expected = metric(whole, "yarn-4x", name)
        assert metric(done, "extended", name) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metric(done, "base", "tail@256") == pytest.approx(
        metric(whole, "base", "tail@256"), rel=1e-5
    )
    # Beyond its window the base gives the answers of the model before extension.
    for name in ("tail@256", "gain@128", "copy@256"):
        expected = metric(whole, "untouched", name)
        assert metric(done, "untouched", name) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert done.results["context"] == CONTEXT


def without_record(place, tmp_path, method):
    """Write an extension whose record another program's save has dropped."""
    out = tmp_path / method
    ropext.extend(str(place / "model"), out, method=method, factor=4.0, no_verify=True)
    (out / "ropext.json").unlink()
    return str(out)


def test_a_scaled_model_is_not_compared_with_itself(place, tmp_path):
    lost = without_record(place, tmp_path, "yarn")
    found = line_up(lost, None, Evaluate(data="any"))
    assert [own.label for own in found.variants] == ["extended"]
    assert (found.context, found.limit) == (CONTEXT, 4 * CONTEXT)
    (warning,) = found.warnings
    assert "scaled 4x from 64 by its config; no record" in warning
    assert "--base MODEL" in warning
    found = line_up(lost, None, Evaluate(data="any", base=str(place / "model")))
    assert [own.label for own in found.variants] == ["base", "untouched", "extended"]
    assert found.variants[0].snapshot.directory == place / "model"
    assert (found.context, found.warnings) == (CONTEXT, ())
    found = line_up(lost, None, Evaluate(data="any", context=4 * CONTEXT))
    assert found.context == 4 * CONTEXT
    lost = without_record(place, tmp_path, "pi")
    with pytest.raises(UsageError, match="is scaled without stating the original length"):
        line_up(lost, None, Evaluate(data="any"))
    assert line_up(lost, None, Evaluate(data="any", base=str(place / "model"))).context == CONTEXT


def test_weights_saved_from_memory_are_compared_with_those_they_came_from(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    ropext.save(ropext.patch(model, method="yarn", factor=4.0), tmp_path / "saved")
    found = line_up(str(tmp_path / "saved"), None, Evaluate(data="any"))
    assert [own.label for own in found.variants] == ["base", "untouched", "extended"]
    assert found.variants[0].snapshot.directory == place / "model"


def test_the_recorded_base_has_its_own_softmax_scale_too(place, tmp_path):
    """DeepSeek's mscale_all_dim scales the softmax by the whole factor."""
    scaled = rope("yarn", 2.0) | {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaled["original_max_position_embeddings"] = CONTEXT // 2
    write_checkpoint(
        tmp_path / "model", kind="deepseek_v3", q_lora_rank=None, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
        first_k_dense_replace=2, n_routed_experts=4, rope_parameters=scaled,
    )  # fmt: skip
    saved = tmp_path / "saved"
    ropext.extend(str(tmp_path / "model"), saved, method="yarn", factor=4.0, no_verify=True)
    asked_for = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS}
    own = evaluate(str(tmp_path / "model"), context=CONTEXT, **asked_for)
    recorded = evaluate(str(saved), **asked_for)
    for name in ("tail@64", "tail@256"):
        expected = metric(own, "base", name)
        assert metric(recorded, "base", name) == pytest.approx(expected, rel=1e-5)


def test_two_revisions_of_one_model_are_read_separately(place, tmp_path):
    write_checkpoint(tmp_path / "other", seed=1)
    one = open_snapshot(str(place / "model"))
    other = replace(open_snapshot(str(tmp_path / "other")), name=one.name)
    pair = (Variant("base", "base", other), Variant("untouched", "untouched", one))
    whole = fetched(Lineup(pair, CONTEXT, CONTEXT))
    assert [own.snapshot.directory for own in whole.variants] == [other.directory, one.directory]


def test_interrupted_and_resumed_gives_the_same_bytes(place, whole):
    done, path = [], place / "stopped"
    hooks = Hooks(show=lambda read, *_: read and done.append(1), stop=lambda: len(done) >= 12)
    with pytest.raises(Stopped, match="12 finished pieces are kept"):
        evaluate(str(place / "model"), path, **vars(hooks), **asked(place))
    again = evaluate(str(place / "model"), path, **asked(place))
    assert again.resumed == 12
    same_files(path, whole.path, *KEPT, "plots/nll-by-position.png")


def test_an_interrupt_without_kept_results_exits_with_130(place):
    with pytest.raises(NothingKept) as caught:
        evaluate(str(place / "model"), stop=lambda: True, **asked(place))
    assert caught.value.exit_code == 130


@pytest.mark.parametrize(("asks", "loads"), [(1, 0), (2, 0), (3, 1)])
def test_an_interrupt_while_documents_or_weights_load_stops_eval(place, monkeypatch, asks, loads):
    asked_so_far, loaded = [], []

    def load(*how):
        loaded.append(1)
        return load_model(*how)

    monkeypatch.setattr("ropext.evaluation.evaluation.load_model", load)
    hooks = Hooks(stop=lambda: asked_so_far.append(1) or len(asked_so_far) >= asks)
    with pytest.raises(NothingKept):
        evaluate(str(place / "model"), **vars(hooks), **asked(place))
    assert (len(asked_so_far), len(loaded)) == (asks, loads)


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_bytes(place, whole):
    done = []

    def show(read, *_):
        done.extend([1] * bool(read))  # not at its beginning
        if len(done) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    model, output = str(place / "model"), place / "killed"
    call = partial(evaluate, model, output, show=show, **asked(place))
    assert Forked(call, place).wait()[0] == -signal.SIGKILL
    assert not (output / "results.json").exists()
    (output / "variants" / ".torn.npy.0123456789abcdef.ropext-tmp").write_bytes(b"half")
    again = evaluate(model, output, **asked(place))
    assert again.resumed == 20
    assert not list(output.rglob("*-tmp"))
    same_files(output, whole.path, *KEPT)


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(place, whole):
    call = partial(evaluate, str(place / "model"), place / "two", **asked(place))
    for code, said in in_two_processes(call, place):
        assert code == 0, said
    same_files(place / "two", whole.path, *KEPT)


def test_several_processes_need_a_directory(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="give -o RUN"):
        evaluate(str(place / "model"), **asked(place))


def test_a_directory_of_another_run_is_refused(place, whole):
    with pytest.raises(OutputExists, match="holds another run"):
        evaluate(str(place / "model"), whole.path, **asked(place, seed=5))
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(OutputExists, match="holds something else"):
        evaluate(str(place / "model"), place / "mine", **asked(place))
    assert (place / "mine" / "thesis.txt").read_text() == "x"


def test_weights_that_were_trained_again_are_another_run(tmp_path):
    """The same names, shapes and file size; other numbers inside."""
    from safetensors.numpy import load_file, save_file

    write_checkpoint(tmp_path / "model")
    few = {"tasks": "copy", "items": 1, "depths": "0.5", "lengths": "64", "haystack": "noise"}
    evaluate(str(tmp_path / "model"), tmp_path / "run", **few)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name: own * 1.01 for name, own in weights.items()}
    save_file(changed, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OutputExists, match="holds another run"):
        evaluate(str(tmp_path / "model"), tmp_path / "run", **few)


def test_the_attention_that_a_config_names_is_not_followed(tmp_path):
    """transformers would follow it, and here has nothing to do so with."""
    write_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    few = {"tasks": "copy", "items": 1, "depths": "0.5", "lengths": "64", "haystack": "noise"}
    done = evaluate(str(tmp_path / "model"), **few)
    assert done.results["variants"]["untouched"]["retrieval"]
    costs_of(str(tmp_path / "model"), **few)


def test_force_replaces_another_run_and_nothing_else(place):
    path = place / "forced"
    few = {"tasks": "copy", "items": 1, "depths": "0.5", "lengths": "64", "haystack": "noise"}
    evaluate(str(place / "model"), path, **few)
    (path / "notes.txt").write_text("mine")
    evaluate(str(place / "model"), path, force=True, **few | {"seed": 1})
    assert json.loads((path / "results.json").read_text())["seed"] == 1
    assert (path / "notes.txt").read_text() == "mine"


def test_retrieval_alone_needs_no_data(place):
    heard, options = [], {"tasks": "copy", "items": 2, "depths": "0.5", "haystack": "noise"}
    done = evaluate(str(place / "model"), say=heard.append, **options)
    (label,) = [own for own in done.results["variants"] if own != "base"]
    assert label == "untouched"
    assert done.results["documents"] is None
    assert done.results["lengths"] == [16, 32, 64]
    assert set(done.results["variants"][label]["metrics"]) == {
        *("copy@64", "copy_nll@64", "effective_context.copy")
    }
    # The shorter default lengths hold no item; a requested length that holds none is an error.
    assert sum("copy is left out at" in line for line in heard) == 2
    with pytest.raises(UsageError, match="takes at least"):
        evaluate(str(place / "model"), **options, lengths="32,64")


def test_several_needles_share_their_haystack(place):
    options = {"tasks": "mkey", "items": 2, "depths": "0.2,0.8", "lengths": "128,256"}
    done = evaluate(str(place / "model"), place / "needles", haystack="noise", **options)
    rows = [json.loads(line) for line in (done.path / "items.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["base"] * 8 + ["untouched"] * 8
    assert [(row["length"], row["depth"]) for row in rows[8:10]] == [(128, 0.2), (128, 0.8)]


def test_a_longrope_with_two_sets_is_read_in_two_passes(place):
    path = place / "longrope"
    write_checkpoint(path, max_position_embeddings=256, rope_parameters=rope("longrope"))
    heard = []
    options = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "context": CONTEXT}
    done = evaluate(str(path), say=heard.append, **options)
    (label,) = [own for own in done.results["variants"] if own != "base"]
    passes = done.results["variants"][label]["passes"]
    assert passes == {"pass-64": 64, "pass-256": 256}
    costs = costs_of(str(path), **options)
    whole = [(own.passes, own.tokens) for own in costs.work if "whole" in own.what]
    assert whole == [(9, 64), (9, 256)]
    assert any("2 passes, one for each spectrum" in line for line in heard)


def test_the_base_of_an_extended_longrope_reads_its_window_with_the_set_of_that_length(place):
    """A longrope with two sets is extended once more. Its base is the model before that, read from
    the directory itself, and from the record of the extended one."""
    short, long = place / "two-sets", place / "two-sets-more"
    write_checkpoint(short, max_position_embeddings=128, rope_parameters=rope("longrope", 2.0))
    for context in (CONTEXT, 128):
        ropext.extend(
            str(short), long, method="pi", factor=2.0, context=context, no_verify=True, force=True
        )
        options = {"data": str(place / "docs.jsonl"), "lengths": "64,256"}
        found = evaluate(str(long), **options)
        expected = evaluate(str(short), **options, context=context)
        for name in ("tail_nll@64", "tail_nll@256"):
            assert metric(found, "base", name) == pytest.approx(
                metric(expected, "base", name), abs=1e-5
            )


def test_an_adapter_is_compared_with_and_without(place, whole, recwarn):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.inference_mode(False):
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        wrapped.save_pretrained(place / "adapter")
    recwarn.clear()
    options = asked(place, method="yarn", tasks=None, adapter=str(place / "adapter"))
    done = evaluate(str(place / "model"), **options)
    assert list(done.results["variants"]) == ["base", "untouched", "yarn-4x", "yarn-4x+adapter"]
    # What transformers says to peft is no advice for a user of ours.
    assert [own for own in recwarn if own.category is FutureWarning] == []
    without, on_top = (metric(done, own, "tail@256") for own in ("yarn-4x", "yarn-4x+adapter"))
    assert without == pytest.approx(metric(whole, "yarn-4x", "tail@256"), rel=1e-6)
    assert abs(on_top - without) > 1e-3


def test_chunks_give_the_numbers_of_one_piece(place, whole):
    done = evaluate(str(place / "model"), **asked(place, chunk=48, tasks=None))
    for label in ("base", "untouched", "yarn-4x"):
        expected = metric(whole, label, "tail_nll@256")
        assert metric(done, label, "tail_nll@256") == pytest.approx(expected, abs=1e-4)


def test_dropped_lengths_and_documents_are_named(place):
    write_documents(place / "mixed.jsonl", count=5, words=60)
    rows = (place / "mixed.jsonl").read_text()
    write_documents(place / "mixed.jsonl", count=7, words=20, seed=1)
    (place / "mixed.jsonl").write_text(rows + (place / "mixed.jsonl").read_text())
    heard = []
    options = asked(place, tasks=None, lengths=None, data=str(place / "mixed.jsonl"))
    untouched = options | {"method": None, "factor": None}
    done = evaluate(str(place / "model"), say=heard.append, **untouched)
    assert done.results["lengths"][-1] == 32
    assert any("lengths 64 are left out: of 12 documents 5 reach 64" in line for line in heard)
    # The target of an extension is the length in question.
    with pytest.raises(InputError, match="0 of 12 documents reach the target of 256 tokens") as no:
        evaluate(str(place / "model"), **options)
    assert "--lengths 16,32 reads no further" in str(no.value)
    with pytest.raises(InputError, match="5 of 12 documents reach the target of 64 tokens") as few:
        evaluate(str(place / "model"), **options | {"factor": "2", "context": 32})
    assert "--lengths 8,16,32,64 reads those alone" in str(few.value)


def test_lengths_beyond_the_config_name_extend(place):
    heard = []
    options = asked(place, tasks=None, method=None, factor=None)
    evaluate(str(place / "model"), say=heard.append, **options)
    assert any("`ropext extend` of the base makes a checkpoint" in line for line in heard)


def test_the_dry_run_counts_the_later_work(place):
    units = []
    hooks = Hooks(show=lambda done, total, what: units.append((done, total)))
    evaluate(str(place / "model"), **vars(hooks), **asked(place))
    setting = evaluation_of(place / "model", **asked(place))
    costs = costs_of(place / "model", **asked(place))
    assert units[-1] == (costs.tokens, costs.tokens)
    assert len(setting.corpus.documents) == 9
    assert costs.passes == sum(part.passes for part in costs.work)
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    row = torch.ones(1, setting.reads.frame.longest, dtype=torch.long)
    with torch.no_grad():
        layers = model(row, use_cache=True).past_key_values.layers
    assert costs.cache_bytes == sum(own.keys.nbytes + own.values.nbytes for own in layers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dry_run_counts_the_bytes_of_the_weights(place, tmp_path, tied, dtype):
    write_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    costs = costs_of(str(tmp_path / "model"), **asked(place))
    assert costs.weight_bytes == sum(own.nbytes for own in model.parameters())


def test_the_time_of_the_first_unit_is_printed_and_kept(place, tmp_path):
    resource, heard = pytest.importorskip("resource"), []
    hooks = Hooks(say=heard.append)
    evaluate(str(place / "model"), tmp_path / "run", **vars(hooks), **asked(place))
    (line,) = (tmp_path / "run" / "used.log").read_text("utf-8").splitlines()
    used = json.loads(line)
    # The highest so far of this process, of which the kernel tells in KiB.
    assert 2**20 < used["peak_bytes"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert used["what"].startswith("the first pass (")
    (said,) = [sentence for sentence in heard if "at the peak" in sentence]
    assert said.startswith(f"{used['what']} took {used['seconds']:.2g} s, and ")
    # Nothing is read a second time, and nothing took anything.
    evaluate(str(place / "model"), tmp_path / "run", **vars(hooks), **asked(place))
    assert len((tmp_path / "run" / "used.log").read_text("utf-8").splitlines()) == 1


def test_evaluate_refuses_a_tokenizer_of_another_model(place, tmp_path):
    write_checkpoint(tmp_path / "model")
    small = tiny(vocab_size=128)
    small.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="does not match the model"):
        evaluate(str(tmp_path / "model"), data=str(place / "docs.jsonl"), lengths="64")


def test_evaluate_names_missing_tokenizer_files(place, tmp_path):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"there is no tokenizer\.json, and .*slow tokenizer"):
        evaluate(str(tmp_path / "model"), data=str(place / "docs.jsonl"), lengths="64")
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(InputError, match="its files are missing"):
        evaluate(str(tmp_path / "model"), data=str(place / "docs.jsonl"), lengths="64")


def test_evaluate_refuses_a_tokenizer_json_that_is_too_new(place, tmp_path):
    write_checkpoint(tmp_path / "model")
    path = tmp_path / "model/tokenizer.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"model": held["model"] | {"type": "Newer"}}))
    with pytest.raises(InputError, match=r"no tokenizer that transformers can load: data did not"):
        evaluate(str(tmp_path / "model"), data=str(place / "docs.jsonl"), lengths="64")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "yarn", "factor": None}, "add --factor 4"),
        ({"method": None, "factor": "4"}, "add --method"),
        ({"tasks": "riddle"}, "no retrieval task 'riddle'"),
        ({"protocol": "mine"}, "--protocol is one of"),
        ({"lengths": "8k,4k"}, "must ascend"),
        ({"chunk": 3}, "--chunk must be at least 16"),
        ({"items": 0}, "--items must be at least 1"),
        ({"items": 10**9, "tasks": "passkey"}, "--items must be at most 1000, was 1000000000"),
        ({"max_docs": 10**30}, "--max-docs must be at most"),
        ({"slice_memory": 10**30}, "--slice-memory must be at most"),
        ({"lengths": "64,9999999m"}, "--lengths go up to 2147483647 tokens"),
        ({"lengths": "64,1" + "0" * 400}, "must be a whole number of tokens"),
        (
            {"items": 1000, "tasks": "passkey", "lengths": "64,2097152", "data": None},
            "4194432000 tokens together",
        ),
        ({"tasks": None, "data": None}, "nothing to measure"),
        ({"data": None, "haystack": "text"}, "made of --data"),
        ({"lengths": "16", "tasks": "mkey"}, "takes at least"),
        ({"nonsense": 1}, "unknown option 'nonsense'"),
        ({"lm_eval": "tasks/mine.yaml"}, "names of installed tasks, not files"),
        ({"lm_eval": "mine.yml"}, "names of installed tasks, not files"),
        ({"lm_eval": "/etc/tasks"}, "names of installed tasks, not files"),
        ({"data": "/gone.jsonl"}, "no such file"),
    ],
)
def test_mistakes_get_one_sentence(place, changes, says):
    with pytest.raises((UsageError, InputError), match=says):
        evaluate(str(place / "model"), **asked(place, **changes))


def test_out_of_memory_names_the_options_and_keeps_finished_work(place, whole, monkeypatch):
    from ropext.evaluation.forward import TokenScorer

    own, read = TokenScorer.token_nll, []

    def fails_at_last(self, ids, watch):
        read.append(len(ids))
        if len(read) > 70:
            # The error of torch's CPU allocator for a request that is too large.
            torch.empty(1 << 60, dtype=torch.uint8)
        return own(self, ids, watch)

    path = place / "memory"
    monkeypatch.setattr(TokenScorer, "token_nll", fails_at_last)
    with pytest.raises(Stopped, match=r"finished documents are kept.*--chunk.*--dtype") as caught:
        evaluate(str(place / "model"), path, **asked(place))
    assert caught.value.exit_code == 4
    monkeypatch.undo()
    assert evaluate(str(place / "model"), path, **asked(place)).resumed > 9
    same_files(path, whole.path, *KEPT)


def test_weights_that_are_not_numbers_stop_with_the_document(place, tmp_path):
    path = write_checkpoint(tmp_path / "model")
    from safetensors.numpy import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="not finite"):
        evaluate(str(path), data=str(place / "docs.jsonl"), lengths="64")
