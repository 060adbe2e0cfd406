"""eval of a GGUF, whose scaling transformers' own reader leaves out."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_line import run
from gguf_files import making

import ropext
from ropext.base import bundled, guard, staging
from ropext.base.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.base.narration import NOBODY
from ropext.evaluation import request
from ropext.files.gguf import open_gguf, proving
from ropext.models import dequantising
from ropext.models.dequantising import dequantised_directory
from ropext.options.evaluate import Evaluate
from ropext.options.training import Fit
from ropext.training import fit, origin, starts

DEMO = bundled.MODELS["ropext://demo"]
READ = {"data": "ropext://held-out", "max_docs": 2, "lengths": "1024"}
METHODS = {
    "yarn": {"method": "yarn"},
    "llama3": {"method": "llama3"},
    "yarn, its own": {"method": "yarn", "attention_factor": 1.3, "beta_fast": 8.0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write the bundled model as a GGUF, and as a directory with the GGUF's tokenizer."""
    room = tmp_path_factory.mktemp("models")
    file = making.of_checkpoint(DEMO, room / "demo.gguf")
    shutil.copytree(DEMO, room / "demo")
    with dequantised_directory(str(file)) as place:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(f"{place}/{name}", room / "demo" / name)
    return room / "demo", file


def test_a_missing_gguf_package_is_named_alone(tmp_path, monkeypatch, capsys):
    """transformers would say that torch is missing too."""
    making.of_checkpoint(DEMO, tmp_path / "demo.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    words = ("--data", "ropext://held-out", "--max-docs", "2")
    code, told = run("eval", tmp_path / "demo.gguf", *words, capsys=capsys)
    assert code == 2
    assert told.err == "error: this needs gguf, which is not installed: pip install gguf\n"


def tails(model):
    results = ropext.evaluate(str(model), **READ).results["variants"]
    return {
        label.removesuffix("-4x"): own["metrics"]["tail@1024"]["value"]
        for label, own in results.items()
        if "tail@1024" in own["metrics"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_scaled_file_is_measured_as_its_directory(models, tmp_path, options):
    base, file = models
    ropext.extend(str(file), tmp_path / "long.gguf", factor=4.0, **options)
    ropext.extend(str(base), tmp_path / "long", factor=4.0, no_verify=True, **options)
    one, two = tails(tmp_path / "long.gguf"), tails(tmp_path / "long")
    assert one.keys() == two.keys()
    assert one == pytest.approx(two, rel=1e-5)
    untouched = tails(file)["untouched"]
    assert abs(untouched / one["extended"] - 1) > 0.05


def test_a_model_that_transformers_loaded_from_a_file_is_saved_in_no_directory(models, tmp_path):
    from transformers import AutoModelForCausalLM

    file = models[1]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    with pytest.raises(
        UnsupportedModel, match=r"does not write a model .* from gguf weights; extend"
    ):
        ropext.save(ropext.patch(model, factor=2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_documents_of_a_file_are_prepared_once(models, monkeypatch):
    """Before its weights are made, and of the same lineup as with them."""
    prepared = []
    prepare = request.prepare

    def counted(options, lineup, *more, **named):
        done = prepare(options, lineup, *more, **named)
        prepared.append(done)
        return done

    monkeypatch.setattr(request, "prepare", counted)
    asked = request.EvaluationRequest(str(models[1]), Evaluate(**READ))
    with asked.prepared(None, NOBODY) as job:
        (before,) = prepared
        (after,) = {variant.snapshot.directory for variant in job.lineup.variants}
        assert list(after.glob("*.safetensors"))
        assert job.reads is before.reads
        assert job.lineup.context == before.lineup.context
        weights = [variant.snapshot.weight_files for variant in job.lineup.variants]
        assert all(weights)


def test_a_directory_of_a_file_has_its_spectrum_and_its_record(models, tmp_path):
    _, file = models
    done = ropext.extend(str(file), tmp_path / "long.gguf", factor=4.0, method="llama3")
    said = []
    with dequantised_directory(str(tmp_path / "long.gguf"), said.append) as place:
        config = json.loads(Path(place, "config.json").read_text(encoding="utf-8"))
        assert config["rope_scaling"]["rope_type"] == "llama3"
        assert config["max_position_embeddings"] == 1024
        assert (
            json.loads(Path(place, "ropext.json").read_text(encoding="utf-8"))["method"] == "llama3"
        )
    assert done.plan.target == 1024
    assert re.match(
        r"transformers dequantises F32 \(GGUF\) to float32: \d\.\d\d MB of memory", said[0]
    )
    with dequantised_directory("any/directory") as place:
        assert place == "any/directory"


@pytest.mark.parametrize("options", [(), ("--factor", "4", "--method", "yarn")])
def test_a_gguf_is_written_as_a_directory_that_transformers_loads(
    models, tmp_path, capsys, options
):
    """The weights of this file are the bundled model's in float32, so the logits are its own."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "made/directory"
    code, said = run("extend", models[1], "--as", "directory", *options, "-o", out, capsys=capsys)
    assert code == 0, said.err
    config = AutoConfig.from_pretrained(DEMO)
    if options:
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
        config.max_position_embeddings = 1024
        assert run("verify", out, capsys=capsys)[0] == 0
        record = json.loads((out / "ropext.json").read_text("utf-8"))
        assert record["base"]["name"] == str(models[1])
        assert "dequantised from F32 (GGUF) to float32" in (out / "README.md").read_text("utf-8")
    mine, theirs = (
        AutoModelForCausalLM.from_pretrained(place, config=own)
        for place, own in ((out, None), (DEMO, config))
    )
    ids = torch.arange(3, 600).remainder(200).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(mine(ids).logits, theirs(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("some words")["input_ids"]
    mode = (out / "config.json").stat().st_mode
    assert (out / "model.safetensors").stat().st_mode == mode
    assert (out / "model.safetensors").stat().st_nlink == 1
    assert [path.name for path in out.parent.iterdir()] == ["directory"]


def test_as_directory_refuses_options_that_do_not_fit(models, tmp_path, capsys):
    out = tmp_path / "out"
    for words, reason in (
        ((DEMO, "--factor", "2"), "is no GGUF"),
        ((models[1], "--factor", "2", "--link", "hard"), "has weights of its own"),
        ((models[1], "--factor", "2", "--eval", "ropext://held-out"), "without later steps"),
        ((models[1], "--dry-run"), "give --factor"),
        ((models[1], "--method", "yarn"), "give --factor"),
    ):
        code, said = run("extend", *words, "--as", "directory", "-o", out, capsys=capsys)
        assert code == 2, words
        assert reason in said.err, said.err
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine").touch()
    code, said = run("extend", models[1], "--as", "directory", "-o", out, capsys=capsys)
    assert code == 2
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_mistakes_are_refused_before_weights_are_made(models, monkeypatch, tmp_path):
    def load(*_):
        raise AssertionError("weights were made")

    monkeypatch.setattr(dequantising, "_save_model", load)
    file = str(models[1])
    with pytest.raises(InputError, match="there is no such file"):
        ropext.evaluate(file, data=str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="no such metric"):
        ropext.evaluate(file, **READ, gates=["nothing > 1"])
    with pytest.raises(UsageError, match=r"^losses writes the loss of every token"):
        ropext.evaluate(file, tasks="copy", lengths="256", losses=tmp_path / "losses.parquet")


def test_a_file_that_transformers_cannot_dequantise_is_refused(tmp_path):
    path = making.write(tmp_path / "m.gguf", "smollm3")
    with (
        pytest.raises(InputError, match="cannot be dequantised by transformers"),
        dequantised_directory(str(path)),
    ):
        pass


def test_finetune_of_a_file_is_refused(models):
    with pytest.raises(UsageError, match="takes no gradients"):
        origin.open_origin(str(models[1]))


TINY = {"steps": 2, "batch_tokens": 512, "retrieval_items": 0, "retrieval_share": 0.0}
TINY |= {"held_out": 2, "start": "yarn", "device": "cpu"}


@pytest.mark.slow
def test_factors_fitted_on_a_file_are_written_into_a_file(models, tmp_path, monkeypatch):
    _, file = models
    out, said, committed = tmp_path / "out", [], []
    commit = staging._commit

    def noted(work, target):
        committed.append((target.path, sorted(os.listdir(work / "new"))))
        commit(work, target)

    monkeypatch.setattr(staging, "_commit", noted)
    ropext.fit(str(file), READ["data"], out, factor=2.0, say=said.append, **TINY)
    assert (committed[-1][0], "demo-long.gguf" in committed[-1][1]) == (out, True)
    assert guard.recorded(out) == {*guard.listing(out)}  # --force may replace all of it
    made = open_gguf(str(out / "demo-long.gguf"))
    assert ".ropext-" not in json.dumps(made.kept_record)  # the folder at work
    kept = json.loads((out / "ropext.json").read_text())
    (site,) = kept["sites"]
    found = proving.spectra_in(made)[0]
    assert found.inv_freq == pytest.approx(site["spectrum"]["inv_freq"], rel=1e-6)
    assert found.attention_factor == pytest.approx(site["spectrum"]["attention_factor"], rel=1e-6)
    assert found.inv_freq != pytest.approx(site["base"]["inv_freq"], rel=1e-3)
    assert made.config["max_position_embeddings"] == 512
    assert proving.identify_parts(made) == proving.identify_parts(open_gguf(str(file)))
    assert f"{out}/demo-long.gguf is the GGUF with the fitted frequencies" in said[-1]


@pytest.mark.parametrize(
    ("arch", "within", "begins", "nearest"),
    [
        ("llama", None, "longrope", ""),
        ("llama", "yarn", "yarn", ""),
        ("qwen2", None, "ntk", ""),
        ("qwen3", "longrope", "", "ntk"),
        ("qwen2", "yarn", "", "ntk"),
        ("deepseek2", "longrope", "", "ntk"),
    ],
)
def test_a_fit_trains_the_factors_that_the_architecture_holds(
    tmp_path, arch, within, begins, nearest
):
    more = {"attention.kv_lora_rank": 16} if arch == "deepseek2" else {}
    path = making.write(tmp_path / "m.gguf", arch, making.LLAMA | more)
    options = Fit(factor=4.0, within=within)
    if begins:
        assert starts.choose_starts(open_gguf(str(path)), options)[0] == begins
        return
    with pytest.raises(NotExpressible) as told:
        starts.choose_starts(open_gguf(str(path)), options)
    assert str(told.value).startswith(f"--within {within}: ")
    assert f"of the narrower forms, --within {nearest} is carried exactly" in str(told.value)


def test_a_form_that_the_file_cannot_hold_is_refused_before_the_fit(models, tmp_path):
    """Told of the directory that was made of it, whose own config could say it."""
    directory, file = models
    options = Fit(factor=2.0, within="longrope")
    qwen = making.write(tmp_path / "q.gguf", "qwen3")
    with pytest.raises(NotExpressible, match=r"a qwen3 GGUF.*--within ntk is carried"):
        fit.prepare_fit(str(directory), str(tmp_path / "nowhere"), options, named=str(qwen))
    with pytest.raises(InputError, match="nowhere"):
        fit.prepare_fit(str(directory), str(tmp_path / "nowhere"), options, named=str(file))
