"""Which stages are done, skipped or refused; extensions alone, so that no torch is needed."""

import importlib.metadata
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from marked import at_work, checkpoint, manifest

import ropext
from ropext.base.bundled import MODELS
from ropext.base.errors import (
    GateFailed,
    InputError,
    Interrupted,
    OutputExists,
    Stopped,
    UsageError,
)
from ropext.base.jsontext import read_object, read_values, write_json
from ropext.base.narration import Call, Hooks
from ropext.files.checkpoint import open_snapshot
from ropext.pipeline import run_digests, run_output, running, stage, stages
from ropext.pipeline.checked_recipe import open_recipe
from ropext.pipeline.evidence import Evidence
from ropext.pipeline.python_results import Ran
from ropext.pipeline.run_context import plan_run
from ropext.pipeline.running import UNFINISHED, WantedStages, forecast
from ropext.pipeline.stage import has_finished_step
from ropext.results.gates import Outcome

SMALL = {"model": "ropext://demo", "extend": {"method": "yarn", "factor": 2, "no_verify": True}}


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def go(wish=SMALL, output="out", **more):
    said = []
    done = ropext.run(wish, output, say=said.append, **more)
    return done, said


def counts_of(output, wish=SMALL, words=(), stages=UNFINISHED, say=print):
    """Return the counts of a dry run."""
    call = Call(Hooks(say))
    return forecast(open_recipe(wish, words), output, call, stages).to_json()


def work_of(wish):
    """Return the run of a recipe that writes `out`, before it has begun."""
    return plan_run(open_recipe(wish), Path("out"))


def bytes_of(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_a_second_run_skips_all_stages(tmp_path):
    first, _ = go()
    assert first.stages == {"plan": "done", "extend": "done", "report": "done"}
    before = {p: os.stat(p).st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    again, said = go()
    assert set(again.stages.values()) == {"skipped"}
    assert said == [f"{name}: done before, skipped" for name in ("plan", "extend", "report")]
    changed = {p.name for p, t in before.items() if os.stat(p).st_mtime_ns != t}
    assert changed <= {"log.txt", "run.json"}


def test_the_output_is_the_checkpoint_with_the_evidence_of_the_run(tmp_path):
    words = ("ropext", "run", "r.yaml", "--token", "hf_abcdefghijkl")
    running.run(open_recipe(SMALL), Path("out"), Call(command=words))
    record = json.loads((tmp_path / "out/ropext.json").read_text())
    assert record["command"] == ["ropext", "run", "r.yaml", "--token", "***"]
    assert record["run"]["resolved"]["extend"]["factor"] == 2.0
    assert record["run"]["stages"]["extend"]["outputs"]["extended"]
    assert str(tmp_path) not in json.dumps(record)
    own = (tmp_path / "out/model.safetensors", tmp_path / "out.run/extended/out/model.safetensors")
    assert own[0].samefile(own[1])  # the run takes the room of its weights once
    log = (tmp_path / "out.run/log.txt").read_text()
    assert "begin: ropext run r.yaml --token ***\n" in log
    assert "hf_abcdefghijkl" not in log
    assert "What was made" in (tmp_path / "out.run/report.md").read_text()


def test_the_same_recipe_gives_the_same_bytes_anywhere(tmp_path, monkeypatch):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        go()
        out = bytes_of(tmp_path / name / "out")
        run = bytes_of(tmp_path / name / "out.run")
        found.append((out, {k: v for k, v in run.items() if k.name not in ("log.txt")}))
    assert found[0] == found[1]


def test_a_log_is_no_content_of_a_folder(tmp_path):
    found = set()
    for text in ("one", "two"):
        (tmp_path / "used.log").write_text(text)
        (tmp_path / "weights").write_text("the same")
        found.add(run_digests.RunDigests().of_tree(tmp_path))
    assert len(found) == 1


@pytest.mark.parametrize("content", ["", "{", "7", '{"a": 1}', "[1]"])
def test_a_damaged_note_of_outputs_is_named_with_the_way_out(tmp_path, content):
    """Whoever deletes it has an output of an unknown run, which --force replaces."""
    note = tmp_path / "out.run/stages/output.json"
    note.parent.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    assert run_output.find_output_list(tmp_path / "out") is None
    note.write_text(content)
    with pytest.raises(InputError, match=r"damaged.*delete it") as raised:
        run_output.find_output_list(tmp_path / "out")
    assert str(note) in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_changed_key_does_the_stages_that_read_it_again(tmp_path):
    go()
    wish = SMALL | {"extend": SMALL["extend"] | {"factor": 4}}
    done, said = go(wish)
    assert set(done.stages.values()) == {"done"}
    assert "plan: again (changed: extend.factor)" in said
    assert "extend: again (changed: config)" in said
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    done, said = go(wish | {"extend": wish["extend"] | {"link": "hard"}})
    assert done.stages["plan"] == "skipped"
    assert "extend: again (changed: extend.link)" in said


def test_changed_weights_of_the_base_are_seen_though_their_header_is_the_same(tmp_path):
    import shutil

    from ropext.base.bundled import MODELS

    shutil.copytree(MODELS["ropext://demo"], tmp_path / "base")
    wish = SMALL | {"model": "base"}
    go(wish)
    weights = tmp_path / "base/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    _, said = go(wish)
    assert "extend: again (changed: base)" in said
    assert (tmp_path / "out/model.safetensors").read_bytes() == bytes(content)


def test_deleted_or_edited_files_are_made_again(tmp_path):
    go()
    (tmp_path / "out.run/extended/out/config.json").write_text("{}")
    done, said = go()
    assert done.stages == {"plan": "skipped", "extend": "done", "report": "skipped"}
    assert "extend: again, what it wrote is gone or was edited" in said
    import shutil

    shutil.rmtree(tmp_path / "out")
    done, _ = go()
    assert done.stages == {"plan": "skipped", "extend": "skipped", "report": "done"}
    assert (tmp_path / "out/config.json").is_file()


def test_a_recipe_with_windows_line_ends_is_recognised_by_the_next_run(tmp_path):
    text = "model: ropext://demo\r\nextend: {method: yarn, factor: 2, no_verify: true}\r\n"
    (tmp_path / "r.yaml").write_bytes(text.encode())
    go("r.yaml")
    done, _ = go("r.yaml")
    assert set(done.stages.values()) == {"skipped"}


def test_an_output_that_this_run_did_not_write_needs_force(tmp_path):
    checkpoint(tmp_path / "out")
    with pytest.raises(OutputExists, match="force=True"):
        go()
    go(force=True)
    (tmp_path / "out/README.md").write_text("mine")
    with pytest.raises(
        OutputExists, match=r"changed since this recipe wrote it: README\.md; force"
    ):
        go()
    assert (tmp_path / "out/README.md").read_text() == "mine"


def test_an_output_that_changed_names_the_files(tmp_path):
    go()
    changed = r"out \(output\) changed since this recipe wrote it: "
    record = tmp_path / "out/ropext.json"
    before = record.read_text()
    for content in (f"{before} ", "{"):
        record.write_text(content)
        with pytest.raises(OutputExists, match=rf"{changed}ropext\.json; force"):
            go()
    record.write_text(before)
    (tmp_path / "out/config.json").unlink()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(OutputExists, match=rf"{changed}config\.json and mine\.txt; force"):
        go()


def test_a_replaced_output_is_kept_on_request(tmp_path, capsys):
    recipe = "model: ropext://demo\nextend: {{method: {}, factor: 2, no_verify: true}}\n"
    outputs = []
    for method in ("yarn", "pi", "ntk"):
        (tmp_path / "r.yaml").write_text(recipe.format(method))
        words = ("run", "r.yaml", "-o", "out", "--keep-previous")
        assert run(*words, capsys=capsys)[0] == 0
        outputs.append(bytes_of(tmp_path / "out"))
        if len(outputs) > 1:
            assert bytes_of(tmp_path / "out.previous") == outputs[-2]
    # Python has it too.
    (tmp_path / "r.yaml").write_text(recipe.format("llama3"))
    go("r.yaml", keep_previous=True)
    outputs.append(bytes_of(tmp_path / "out"))
    assert bytes_of(tmp_path / "out.previous") == outputs[-2]
    # Where the report alone is done again, nothing is replaced: the one before is still kept.
    (tmp_path / "out.run/report.html").unlink()
    assert run(*words, capsys=capsys)[0] == 0
    assert bytes_of(tmp_path / "out.previous") == outputs[-2]
    outputs.append(bytes_of(tmp_path / "out"))  # with the words of this command in its record
    (tmp_path / "out.previous/notes.txt").write_text("mine")
    (tmp_path / "r.yaml").write_text(recipe.format("yarn"))
    code, said = run(*words, capsys=capsys)
    assert code == 2
    assert "out.previous" in said.err
    assert bytes_of(tmp_path / "out") == outputs[-1]


def test_a_run_directory_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run/thesis.txt").write_text("mine")
    with pytest.raises(OutputExists, match="holds something else"):
        go()


def test_an_edited_recipe_in_the_run_s_folder_is_kept(tmp_path):
    recipe, kept = tmp_path / "r.yaml", tmp_path / "out.run/recipe.yaml"
    for text in ("model: ropext://demo\nextend: {factor: 2, no_verify: true}", "\n# more\n"):
        recipe.write_text(text if text.startswith("model") else recipe.read_text() + text)
        ropext.run("r.yaml", "out")  # it replaces its own output
        assert kept.read_text().startswith(recipe.read_text())
    written = kept.read_text()
    for edited in (written.replace("2", "4"), written + "# mine", "factor: 4", ""):
        kept.write_text(edited)
        for force in (False, True):
            with pytest.raises(OutputExists, match=r"recipe\.yaml is not as ropext wrote it; move"):
                ropext.run("r.yaml", "out", force=force)
        assert kept.read_text() == edited
    recipe.write_text(written)  # a copy is a recipe like any other
    kept.unlink()
    ropext.run("r.yaml", "out")
    assert kept.read_text() == written


def test_from_and_only_choose_the_stages(tmp_path):
    with pytest.raises(UsageError, match=r"^only report needs plan, which is not done"):
        go(only="report")
    done, _ = go(only="plan")
    assert done.stages == {"plan": "done"}
    assert not (tmp_path / "out").exists()
    go()
    done, said = go(begin="extend")
    assert done.stages == {"plan": "skipped", "extend": "done", "report": "done"}
    assert "extend: again, as asked" in said
    for flag, name, words in (
        ("only", "finetune", "the recipe has no such section"),
        ("begin", "bake", "no such stage; the stages of this run are plan, extend, report"),
    ):
        with pytest.raises(UsageError, match=words):
            go(**{flag: name})


def test_a_changed_version_is_reported_and_nothing_is_repeated(tmp_path):
    go()
    path = tmp_path / "out.run/stages/extend/run.json"
    record = json.loads(path.read_text())
    record["versions"]["transformers"] = "4.0.0"
    write_manifest(path, record)
    done, said = go()
    assert done.stages["extend"] == "skipped"
    assert any("transformers 4.0.0, now" in line and 'begin="extend"' in line for line in said)


def test_after_an_upgrade_that_affects_numbers_the_evaluation_is_done_again(tmp_path, monkeypatch):
    """tokenizers is such a library; a stage that gives no number is skipped."""
    wish = {
        "model": "ropext://demo",
        "extend": {"factor": 2},
        "evaluate": {"data": "ropext://held-out", "max_docs": 1, "lengths": "256"},
    }
    go(wish)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "99.0" if name == "tokenizers" else version(name),
    )
    done, said = go(wish)
    assert (done.stages["extend"], done.stages["evaluate"]) == ("skipped", "done")
    assert "evaluate: again (changed: versions.tokenizers)" in said
    held = json.loads((tmp_path / "out.run/evaluation/run.json").read_text())
    assert held["decides"]["versions"]["tokenizers"] == "99.0"
    assert go(wish)[0].stages["evaluate"] == "skipped"


def test_another_schema_or_a_torn_record_is_done_again(tmp_path, monkeypatch):
    go()
    monkeypatch.setattr(stages.ExtendStage, "schema", 99)
    _, said = go()
    assert "extend: again (this ropext does it in another way)" in said
    (tmp_path / "out.run/stages/extend/run.json").write_text('{"decides": 99')
    done, _ = go()
    assert done.stages["extend"] == "done"


def write_manifest(path, content):
    """Write a manifest as ropext would."""
    rest = {key: value for key, value in content.items() if key != "ropext"}
    manifest(path.parent, rest.pop("command"), rest.pop("decides"), **rest)


def test_a_begun_stage_resumes_and_a_finished_one_is_reused(tmp_path):
    go()
    path = tmp_path / "out.run/stages/extend/run.json"
    record = json.loads(path.read_text())
    begun = {key: value for key, value in record.items() if key != "files"}
    write_manifest(path, begun)
    done, said = go()  # killed after its output got its name
    assert done.stages["extend"] == "skipped"
    assert json.loads(path.read_text()) == record
    write_manifest(path, begun)
    shutil.rmtree(tmp_path / "out.run/extended")
    done, said = go()
    assert "extend: resumes after an interrupt" in said


@pytest.mark.parametrize("name", ["recipe.yaml", "plan.json", "report.html"])
def test_a_file_that_cannot_be_replaced_gives_one_sentence(tmp_path, monkeypatch, name):
    go()
    unlink = Path.unlink

    def refused(path, missing_ok=False):
        if path.name == name:
            raise OSError(30, "Read-only file system", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(Stopped, match=rf"cannot be written: Read-only .*{name}\); {KEPT}"):
        go(begin="plan")


def test_a_log_that_cannot_be_written_gives_one_sentence(tmp_path):
    go()
    (tmp_path / "out.run/log.txt").unlink()
    (tmp_path / "out.run/log.txt").mkdir()
    with pytest.raises(Stopped, match=rf"log\.txt cannot be written.*; {KEPT}"):
        go()


KEPT = r"what is finished is kept in out\.run; run the same command to resume$"


def test_a_failed_gate_has_its_exit_code(tmp_path):
    bad = Outcome("g > 1", "tuned", False, 2.0, "g is 2")
    ran = Ran(None, tmp_path / "out.run", "tuned", {}, tmp_path / "out", Evidence(None, (bad,)))
    with pytest.raises(
        GateFailed,
        match=r"g > 1 \(tuned: 2\); the checkpoint that did not pass is kept in .*out\.run",
    ):
        ran.raise_if_failed()
    (tmp_path / "out").mkdir()
    with pytest.raises(GateFailed, match=r"out is from an earlier run$"):
        ran.raise_if_failed()
    assert GateFailed.exit_code == 3


def test_an_output_that_another_command_replaced_is_opened_as_its(tmp_path):
    ran, _ = go()
    assert ropext.open("out") == ran
    extended = ropext.extend(
        "ropext://demo", "out", method="pi", factor=2, no_verify=True, force=True
    )
    assert ropext.open("out") == extended
    assert ropext.open("out.run") == ran


def test_a_gate_over_a_number_that_is_not_finite_is_kept(tmp_path):
    bad = Outcome("g > 1", "tuned", False, math.inf, "g is inf", math.inf)
    evidence = Evidence(None, (bad,))
    write_json(tmp_path / "outcome.json", evidence.to_json())
    kept = read_values(Evidence, read_object(tmp_path / "outcome.json") | {"measured": None}, "x")
    assert kept.gates == (replace(bad, looked_at=None, value=None),)
    ran = Ran(None, tmp_path / "out.run", "tuned", {}, tmp_path / "out", evidence)
    assert ran == replace(ran, evidence=kept)


def test_the_dry_run_writes_nothing(tmp_path):
    (tmp_path / "OUT").mkdir()  # nobody's: the recipe names no output
    found = counts_of(None)
    (tmp_path / "OUT").rmdir()
    told = found["stages"]
    assert list(told) == ["plan", "extend", "report"]
    assert "256 to 512 tokens" in told["plan"]["what"]
    assert "copied, not verified" in told["extend"]["what"]
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_of_a_new_run_reads_no_weight_and_no_document(tmp_path, monkeypatch):
    said_by = lambda name: lambda *_, **__: pytest.fail(f"{name} in a dry run")  # noqa: E731
    monkeypatch.setattr("ropext.pipeline.run_context.with_weights", said_by("weights were fetched"))
    monkeypatch.setattr(run_digests.RunDigests, "of_model", said_by("weights were hashed"))
    monkeypatch.setattr(run_digests.RunDigests, "of_data", said_by("documents were hashed"))
    later = {"finetune": {"data": "ropext://tuning"}, "evaluate": {"data": "ropext://held-out"}}
    told = counts_of(tmp_path / "out", SMALL | later)["stages"]
    assert [name for name, stage in told.items() if "skipped" in stage] == []
    assert list(told) == ["plan", "extend", "finetune", "evaluate", "report"]


def kept_by_count(tmp_path, wish=SMALL, **choice):
    """Return for each stage whether a dry run calls it done, and check that the dry run wrote
    nothing."""
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    found = counts_of(tmp_path / "out", wish, stages=WantedStages(**choice))
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    told = found["stages"]
    return {name: own["what"].startswith("done before") for name, own in told.items()}


def test_the_dry_run_says_which_stages_are_done_and_heeds_from_and_only(tmp_path):
    with pytest.raises(UsageError, match="--only report needs plan, which is not done"):
        kept_by_count(tmp_path, only="report")
    with pytest.raises(UsageError, match="no such stage"):
        kept_by_count(tmp_path, begin="bake")
    assert kept_by_count(tmp_path, only="plan") == {"plan": False}
    go()
    done = {"plan": True, "extend": True, "report": True}
    assert kept_by_count(tmp_path) == done
    assert kept_by_count(tmp_path, begin="extend") == done | {"extend": False, "report": False}
    assert kept_by_count(tmp_path, only="report") == {"report": False}
    again = kept_by_count(tmp_path, SMALL | {"extend": SMALL["extend"] | {"link": "hard"}})
    assert again == done | {"extend": False, "report": False}
    # As the run itself then does.
    ran, _ = go(SMALL | {"extend": SMALL["extend"] | {"link": "hard"}})
    assert ran.stages == {"plan": "skipped", "extend": "done", "report": "done"}


class Greeting(stage.Stage):
    """A stage that starts from no checkpoint."""

    name = "hello"
    schema = 1

    @property
    def path(self):
        return self.work.folder / "hello.txt"

    def key(self):
        return {"model": self.work.recipe.model}

    def look(self):
        return {"hello": self.work.digests.of(self.path)} if self.path.is_file() else None

    def do(self):
        self.path.write_text("hello\n")

    def counts(self):
        return {"what": "a greeting"}


def test_a_stage_that_starts_from_no_checkpoint_is_kept_by_the_dry_run_and_by_the_run(
    tmp_path, monkeypatch
):
    plan, extend = stages.stages_of(work_of(SMALL))
    kinds = (type(plan), type(extend), Greeting)
    monkeypatch.setattr(running, "stages_of", lambda work: [kind(work) for kind in kinds])
    go()
    linked = SMALL | {"extend": SMALL["extend"] | {"link": "hard"}}
    kept = {"plan": True, "extend": False, "hello": True, "report": False}
    assert kept_by_count(tmp_path, linked) == kept
    ran, _ = go(linked)
    assert {name: state == "skipped" for name, state in ran.stages.items()} == kept


def test_a_training_starts_from_the_fit_if_there_is_one():
    later = {"finetune": {"data": "ropext://tuning"}, "fit": {"data": "ropext://tuning"}}
    starts = [{}, later, {"finetune": later["finetune"]}]
    found = []
    for more in starts:
        by_name = {one.name: one.starts_from for one in stages.stages_of(work_of(SMALL | more))}
        found.append(by_name.get("finetune"))
        assert by_name["extend"] == ()
        assert by_name.get("fit", ()) == ()
    assert found == [None, ("fit",), ("extend",)]


def test_every_stage_of_a_recipe_has_its_kind_in_their_order():
    from ropext.pipeline.recipe import STAGES
    from ropext.pipeline.run_output import ReportStage

    assert tuple(kind.name for kind in (*stages.STAGE_KINDS, ReportStage)) == STAGES


def test_the_dry_run_describes_each_stage_by_its_options(tmp_path):
    wish = {
        "model": "ropext://demo",
        "extend": {"method": "yarn", "factor": 2},
        "fit": {"data": "ropext://tuning", "steps": 2},
        "finetune": {"data": "ropext://tuning", "batch_tokens": 1024, "control": True},
        "evaluate": {"data": "ropext://held-out", "max_docs": 8, "tasks": ["passkey"]},
    }
    found = counts_of(tmp_path / "out", wish)["stages"]
    said = {name: own["what"] for name, own in found.items()}
    assert said["fit"] == "2 steps, 8,192 tokens per step"
    assert said["finetune"] == "at most 400 steps, 1,024 tokens per step"
    assert said["evaluate"] == (
        "at most 8 documents, 4 questions of passkey at each depth; at 64, 128, 256, 512; by base, "
        "untouched, control, extended, fitted, tuned"
    )
    found = counts_of(tmp_path / "out", wish, ["finetune.epochs=2"])
    assert found["stages"]["finetune"]["what"] == "2 passes over the data, 1,024 tokens per step"
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_says_the_warnings_of_the_plan_and_writes_no_log(tmp_path):
    ropext.extend("ropext://demo", "long", method="yarn", factor=2, no_verify=True)
    said = []
    wish = {"model": "long", "extend": {"factor": 2, "even_so": True, "again": True}}
    counts_of(tmp_path / "out", wish, say=said.append)
    assert any("this scales the model again, after yarn" in sentence for sentence in said)
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


def test_the_dry_run_refuses_the_same_as_the_run(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(OutputExists, match="this recipe did not write it"):
        kept_by_count(tmp_path)
    (tmp_path / "out/mine.txt").unlink()
    (tmp_path / "out").rmdir()
    (tmp_path / "out.run").write_text("mine")
    with pytest.raises(OutputExists, match="holds something else"):
        kept_by_count(tmp_path)
    (tmp_path / "out.run").unlink()
    judged = {"evaluate": {"data": "ropext://held-out", "fail_if": ["tail@4k > 9"]}}
    with pytest.raises(UsageError, match="4k is none of the lengths"):
        kept_by_count(tmp_path, SMALL | judged)
    nowhere = {"evaluate": {"data": "nowhere.jsonl"}}
    with pytest.raises(InputError, match="there is no such file"):
        kept_by_count(tmp_path, SMALL | nowhere)


def test_leftovers_of_a_kill_next_to_a_whole_output_are_removed(tmp_path):
    go()
    left = at_work(tmp_path / "out")
    done, _ = go()
    assert set(done.stages.values()) == {"skipped"}
    assert not left.exists()


@pytest.mark.parametrize("factor", [2, 4])
def test_killed_while_the_output_was_replaced_it_resumes(tmp_path, factor):
    """The old output had been moved aside, the new one had no name yet."""
    go()
    work = at_work(tmp_path / "out")
    (tmp_path / "out").rename(work / "old")
    checkpoint(work / "new")
    go(SMALL | {"extend": SMALL["extend"] | {"factor": factor}})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 256 * factor
    assert not work.exists()


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path, monkeypatch):
    extend = stages.write_extension

    def meanwhile(*args, **more):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine.txt").write_text("mine")
        return extend(*args, **more)

    monkeypatch.setattr(stages, "write_extension", meanwhile)
    with pytest.raises(OutputExists, match="this recipe did not write it"):
        go()
    assert (tmp_path / "out/mine.txt").read_text() == "mine"


def test_a_run_needs_an_output():
    with pytest.raises(UsageError, match="names no output; add output: DIR, or give output=OUT"):
        ropext.run(SMALL)
    with pytest.raises(UsageError, match="names no directory of its own"):
        ropext.run(SMALL, "..")


def test_the_recipes_output_counts_from_the_recipe(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/r.yaml").write_text(
        "model: ropext://demo\nextend: {factor: 2, no_verify: true}\noutput: made\n"
    )
    ropext.run("sub/r.yaml")
    assert (tmp_path / "sub/made/config.json").is_file()
    assert (tmp_path / "sub/made.run/recipe.yaml").read_text().startswith("model: ropext://demo")
    record = json.loads((tmp_path / "sub/made/ropext.json").read_text())
    assert record["run"]["recipe"] == (tmp_path / "sub/r.yaml").read_text()


def test_killed_in_a_stage_whose_inputs_changed_the_old_output_is_not_taken(tmp_path, monkeypatch):
    go()
    wish = SMALL | {"extend": SMALL["extend"] | {"factor": 4}}
    with monkeypatch.context() as broken:
        broken.setattr("ropext.pipeline.stages.write_extension", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(wish)
    done, _ = go(wish)
    assert done.stages["extend"] == "done"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 1024


def test_killed_before_it_claims_its_folder_an_evaluation_leaves_no_old_results(
    tmp_path, monkeypatch
):
    wish = SMALL | {"evaluate": {"data": "ropext://held-out"}}
    work = work_of(wish)
    work.evaluation.mkdir(parents=True)

    def step(key, do):
        own = stages.EvaluateStage(work)
        monkeypatch.setattr(own, "key", lambda: {"key": key})
        monkeypatch.setattr(own, "do", do)
        return own

    def results():
        for name in ("results.json", "report.html"):
            (work.evaluation / name).write_text("of the key before")

    before = step("before", results)
    assert before.do_once()
    assert before.finished_files() is not None
    now = step("now", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        now.do_once()
    assert now.finished_files() is None


def test_the_device_decides_nothing_and_the_reading_mode_does(tmp_path):
    def inputs(**evaluate):
        wish = SMALL | {"evaluate": {"data": "ropext://held-out"} | evaluate}
        work = work_of(wish)
        return stages.EvaluateStage(work).key()

    assert inputs(device="cpu", chunk=64) == inputs()
    assert inputs(max_docs=9) != inputs()
    # Documents count by their content, not by their name.
    content = (tmp_path / "copy.jsonl", inputs()["evaluate.data"])
    from ropext.base.bundled import DATA

    content[0].write_bytes(DATA["ropext://held-out"].read_bytes())
    assert inputs(data=str(content[0]))["evaluate.data"] == content[1]


def test_a_model_in_the_hubs_cache_is_read_for_its_key(tmp_path):
    """Its folder is called by a commit, and may have been edited all the same."""
    place = tmp_path / "models--me--m" / "snapshots" / ("0123456789" * 4)
    shutil.copytree(MODELS["ropext://demo"], place)
    first = run_digests.RunDigests().of_model(open_snapshot(str(place)))
    weights = place / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert run_digests.RunDigests().of_model(open_snapshot(str(place))) != first


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("tail@512 > 0 vs untuched", "untuched is neither the directory of an evaluation nor"),
        ("tuned:tail@512 > 0", "no variant 'tuned'; there are base, untouched, extended"),
        ("tail@512 > 0 vs extended", "it compares extended only with itself; name another model"),
        ("base:tail@512 > 0 vs base", "it compares base only with itself; name another model"),
        ("tail@512 > 0 vs ./extended", "./extended is neither the directory of an evaluation nor"),
        ("tail@128k > 8", r"128k is none of the lengths .*measured \(64, 128, 256, 512\)"),
        ("passkey@512 < 1", "passkey is asked only where"),
    ],
)
def test_a_gate_on_an_unmeasured_metric_is_refused_before_anything_is_written(
    tmp_path, gate, words
):
    judged = {"evaluate": {"data": "ropext://held-out", "fail_if": [gate]}}
    with pytest.raises(UsageError, match=words):
        go(SMALL | judged)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file/out", "file/deeper/out"])
def test_an_output_below_a_file_gives_one_sentence(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=f"{place}.* cannot be written"):
        go(SMALL, place)


def test_an_output_inside_the_model_is_refused_before_anything_is_written(tmp_path):
    import shutil

    from ropext.base.bundled import MODELS

    shutil.copytree(MODELS["ropext://demo"], tmp_path / "base")
    before = sorted(tmp_path.rglob("*"))
    for output, words in (("base/out", "is inside the input"), ("base", "is the input itself")):
        with pytest.raises(UsageError, match=words):
            go(SMALL | {"model": "base"}, output, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_inputs_are_not_in_the_place_of_the_kept_output(tmp_path):
    checkpoint(tmp_path / "out")
    shutil.copytree(MODELS["ropext://demo"], tmp_path / "out.previous")
    before = bytes_of(tmp_path)
    wish = SMALL | {"model": "out.previous"}
    recipe = open_recipe(wish)
    with pytest.raises(
        UsageError, match=r"out.previous \(where --keep-previous .*the input itself"
    ):
        forecast(recipe, tmp_path / "out", Call(force=True, keep_previous=True))
    assert bytes_of(tmp_path) == before
    forecast(recipe, tmp_path / "out", Call(force=True))  # which keeps nothing there


def test_a_token_in_a_recipe_is_not_copied(tmp_path):
    text = "# hf_abcdefghijklmnop\nmodel: ropext://demo\nextend: {factor: 2, no_verify: true}\n"
    (tmp_path / "r.yaml").write_text(text)
    ropext.run("r.yaml", "out")
    copy = (tmp_path / "out.run/recipe.yaml").read_text()
    assert copy.startswith(text.replace("hf_abcdefghijklmnop", "***"))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "r.yaml":
            assert b"hf_abcdefghijklmnop" not in path.read_bytes(), path


def test_a_run_that_was_only_begun_is_nothing_to_keep(tmp_path, monkeypatch):
    work = work_of(SMALL)
    own = stages.PlanStage(work)
    with monkeypatch.context() as broken:
        broken.setattr(own, "do", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own.do_once()
    assert (tmp_path / "out.run/stages/plan/run.json").is_file()
    assert not has_finished_step(work.folder)
    own.do_once()
    assert has_finished_step(work.folder)


def test_an_interrupt_names_the_kept_results_after_a_finished_stage(tmp_path, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "write_bytes", interrupted)  # interrupts the plan, the first stage
    with pytest.raises(KeyboardInterrupt):
        go()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "write_extension", interrupted)
    with pytest.raises(
        Interrupted, match=r"finished stages are kept in out\.run; run the same command"
    ):
        go()


def test_an_interrupt_while_a_run_is_planned_names_finished_stages_alone(tmp_path, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as planned:
        planned.setattr(running, "plan_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            go()
    assert list(tmp_path.iterdir()) == []
    go()
    monkeypatch.setattr(running, "plan_run", interrupted)
    with pytest.raises(Interrupted, match=r"finished stages are kept in out\.run"):
        go()
