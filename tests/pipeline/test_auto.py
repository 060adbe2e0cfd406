"""`--method auto` takes the winner of an exhaustive ranking, and documents that took no part give
the verdict."""

import json
import shutil
from dataclasses import replace

import pytest
from command_line import run
from json_schema import check
from marked import manifest

import ropext
from benchmarks import counting_model
from ropext.base.bundled import DATA, MODELS
from ropext.base.errors import InputError, UsageError
from ropext.base.narration import NOBODY
from ropext.base.table import escape
from ropext.files.checkpoint import open_snapshot
from ropext.pipeline.auto import ChoiceStep
from ropext.pipeline.auto_choice import AutoChoice
from ropext.pipeline.auto_plan import plan_choice
from ropext.pipeline.checked_recipe import open_recipe
from ropext.pipeline.run_digests import RunDigests
from ropext.results.model_index import card_figures
from ropext.results.rules import Standing
from ropext.results.values import Value
from ropext.scaling import METHODS

HELD_OUT = [json.loads(line)["text"] for line in DATA["ropext://held-out"].read_text().splitlines()]
AUTO = ("extend", "ropext://demo", "--factor", "2", "--method", "auto")
CHEAP = ("fit.steps=1", "fit.held_out=8", "fit.retrieval_items=2", "evaluate.tasks=passkey",
         "evaluate.items=1")  # fmt: skip


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --data TEXTS"),
        (("--data", "ropext://held-out", "--no-verify"), "leave --no-verify out"),
        (("--data", "ropext://held-out", "--fit", "x.jsonl"), "leave fit.data out"),
        (("--data", "ropext://held-out", "--beta-fast", "16"), "is a knob of one method"),
        (("--data", "ropext://held-out", "extend.budget=30m"), "extend has no key 'budget'"),
        (("--data", "missing.jsonl"), "no such file"),
        (("--data", "ropext://held-out", "--target", "9000"), "none of its documents reaches"),
        (("--data", "ropext://held-out", "--for", "nobody"), "nobody"),
        (("--data", "ropext://held-out", "evaluate.fail_if=gain@9k < 0"), "none of the lengths"),
        (("--data", "ropext://held-out", "evaluate.fail_if=no:tail@512 > 9"), "no variant 'no'"),
    ],
)
def test_an_impossible_choice_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.chdir(tmp_path)
    own = [word for word in AUTO if "--target" not in words or word not in ("--factor", "2")]
    code, heard = run(*own, *words, "-o", "out", capsys=capsys)
    assert (code, list(tmp_path.iterdir())) == (2, []), heard.err
    assert said in heard.err


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("of another")
    code, heard = run(*AUTO, "--data", "ropext://held-out", "-o", "out", capsys=capsys)
    assert code == 2
    assert "out" in heard.err
    assert "--force" in heard.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_impossible_choice_is_refused_before_a_weight_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(ChoiceStep, "key", lambda _: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="none of its documents reaches"):
        ropext.extend(
            "ropext://demo", tmp_path / "out", factor=2, method="auto", data=["too short"] * 3
        )


@pytest.mark.parametrize("words", [("--data", "x"), ("--within", "yarn")])
def test_options_of_method_auto_are_refused_without_it(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    code, heard = run("extend", "ropext://demo", "--factor", "2", *words, "-o", "o", capsys=capsys)
    assert code == 2
    assert f"{words[0]} goes with --method auto" in heard.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "auto"}, "give data=TEXTS"),
        ({"method": "auto", "data": "missing.jsonl"}, "^the call: "),
        ({"method": "yarn", "data": HELD_OUT}, 'data goes with method="auto"'),
        ({"method": "auto", "data": HELD_OUT, "no_verify": True}, "leave no_verify=True out"),
        (
            {"method": "auto", "data": HELD_OUT, "facto": 2},
            "unknown option 'facto'; did you mean factor",
        ),
        ({"method": "auto", "data": HELD_OUT, "budget": "9tokens"}, "unknown option 'budget'"),
    ],
)
def test_python_refuses_the_same_as_the_command_line(tmp_path, options, said):
    with pytest.raises((InputError, UsageError), match=said):
        ropext.extend("ropext://demo", tmp_path / "out", factor=2, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_candidates_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (*AUTO, "--data", "ropext://held-out", "-o", "out", "--dry-run", "--json")
    code, heard = run(*words, capsys=capsys)
    assert (code, list(tmp_path.iterdir())) == (0, []), heard.err
    told = json.loads(heard.out)
    methods = [method.name for method in METHODS.values() if method.competes]
    assert {"pi", "yarn"} <= {*methods}
    assert {"abf", "longrope"}.isdisjoint(methods)
    forms = ", ".join(["untouched", *methods])
    # These forms and Self-Extend, each on 32 documents of 512 tokens, or on the requested number.
    for count, more in ((32, ()), (3, ("evaluate.max_docs=3",))):
        told = json.loads(run(*words, *more, capsys=capsys)[1].out)
        tokens = (len(methods) + 2) * count * 512
        check(told, "run")
        said = f"{forms}, self-extend: {tokens:,} tokens, on {count} documents"
        assert told["stages"]["choose"] == said


def test_a_run_refuses_its_mistakes_before_a_choice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ropext.pipeline.auto.choose_method", lambda *_: pytest.fail("it chose"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    code, heard = run(*AUTO, "--data", "ropext://held-out", "-o", "out", "--dry-run", capsys=capsys)
    assert (code, "exists" in heard.err) == (2, True), heard.err
    (tmp_path / "auto.yaml").write_text(
        "model: ropext://demo\nextend: {method: auto, factor: 2, data: ropext://held-out}\n"
    )
    for more in ((), ("--dry-run",)):
        words = ("run", "auto.yaml", "-o", "other", "--from", "bogus", *more)
        code, heard = run(*words, capsys=capsys)
        assert (code, "no such stage" in heard.err) == (2, True), heard.err


@pytest.mark.parametrize(
    "word",
    ["extend.within=yarn", "extend.for=vllm", "fit.steps=3", "seed=1",
     "evaluate.data=ropext://tuning", "finetune.data=ropext://tuning"],
)  # fmt: skip
def test_another_value_of_a_deciding_option_chooses_a_method_again(tmp_path, word):
    recipe = {
        "model": "ropext://demo",
        "extend": {"method": "auto", "factor": 2, "data": "ropext://held-out"},
        "fit": {"steps": 2},
    }
    hashes = RunDigests()

    def inputs(read):
        return ChoiceStep(read, tmp_path, NOBODY, hashes).key()

    before = inputs(open_recipe(recipe))
    assert inputs(open_recipe(recipe)) == before
    assert inputs(open_recipe(recipe, [word])) != before
    assert inputs(open_recipe(recipe, ["extend.untrained=true"])) == before  # it decides no number
    section, key, *_ = word.replace("=", ".").split(".")
    if key == "data":  # by its content
        named = recipe | {section: {"data": write(tmp_path / "a.jsonl", ["one"])}}
        before = inputs(open_recipe(named))
        write(tmp_path / "a.jsonl", ["another"])
        assert inputs(open_recipe(named)) != before


def test_documents_of_the_verdict_share_no_text_with_those_of_the_choice(tmp_path):
    """One that has chooses too, and the next takes its place."""
    recipe = {"model": "ropext://demo", "extend": {"method": "auto", "factor": 2}}

    def divided(texts):
        recipe["extend"]["data"] = write(tmp_path / "data.jsonl", texts)
        found = plan_choice(open_recipe(recipe), NOBODY)
        judged = [document.content for document in found.to_judge]
        return judged, [document.content for document in found.to_choose]

    judged, chosen = divided(HELD_OUT)
    assert set(judged) | set(chosen) == set(HELD_OUT)
    more = [f"{text} And so it ended, {k} times." for text in judged[:3] for k in range(4)]
    judged_now, chosen = divided([*HELD_OUT, *more])
    assert len(judged_now) >= len(judged)
    assert set(judged_now) | set(chosen) == {*HELD_OUT, *more}
    assert not any(text[:800] in other for text in judged_now for other in chosen)
    with pytest.raises(InputError, match="two without common text"):
        divided([judged[0], f"{judged[0]} And so it ended."])


def choice_of(tmp_path, extend, **changes):
    """Return a choice whose forms were not read."""
    recipe = open_recipe({"model": "ropext://demo", "extend": extend}, [])
    found = plan_choice(recipe, NOBODY)
    recipe = found.recipe.model_copy(update=changes)
    write(tmp_path / "choosing.jsonl", [document.content for document in found.to_choose])
    return AutoChoice(replace(found, recipe=recipe), tmp_path, NOBODY)


ORDER = Standing(8, 1.0, {
    name: Value(0, None, None, 8) for name in ("untouched", "yarn", "ntk", "llama3", "pi")
}, {})  # fmt: skip


@pytest.mark.parametrize(
    ("options", "starts"),
    [({}, "yarn,ntk,llama3"), ({"within": "yarn"}, "yarn")],
)
def test_a_fit_is_tried_from_the_three_lowest_that_it_may_begin_at(tmp_path, options, starts):
    data = write(tmp_path / "data.jsonl", HELD_OUT)
    own = choice_of(tmp_path, {"method": "auto", "factor": 4, "data": data} | options)
    fit = own.fit_of("yarn", ORDER)
    assert fit.keys["fit.start"] == starts
    assert fit.why_not == ""
    assert own.fit_of("untouched", ORDER).keys == {}


def test_a_choice_refuses_the_tokenizer_of_another_model_without_a_stated_vocabulary(tmp_path):
    model = shutil.copytree(MODELS["ropext://demo"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"]  # the default of llama is 32,000
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["\u0120"] = 40000
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = write(tmp_path / "data.jsonl", ["xq zk jv " * 400] * 10)
    extend = {"method": "auto", "factor": 2, "data": data}
    recipe = open_recipe({"model": str(model), "extend": extend})
    with pytest.raises(InputError, match="holds token 40000, but the model has 32000 embeddings"):
        plan_choice(recipe, NOBODY)


def test_a_fit_is_counted_on_the_revision_that_was_named(tmp_path, monkeypatch):
    data = write(tmp_path / "data.jsonl", HELD_OUT)
    own = choice_of(tmp_path, {"method": "auto", "factor": 4, "data": data}, revision="v1")
    opened = []

    def prepared(request, output, call):
        opened.append(request.revision)
        raise InputError("this fit cannot be done")

    monkeypatch.setattr("ropext.training.request.TrainingRequest.prepared", prepared)
    fit = own.fit_of("yarn", ORDER)
    assert opened == ["v1", "v1"]  # from three forms, then from the chosen one
    assert (fit.keys, fit.why_not) == ({}, "this fit cannot be done")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a whole choice on the bundled model."""
    folder = tmp_path_factory.mktemp("auto")
    data = write(folder / "data.jsonl", HELD_OUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(*AUTO, "--data", data, "-o", "out", *CHEAP)[0] == 0
    return folder


@pytest.mark.slow
def test_the_documents_are_divided(made):
    choice = made / "out.run/choice"
    chose, judged = texts_of(choice / "choosing.jsonl"), texts_of(choice / "verdict.jsonl")
    assert not set(chose) & set(judged)
    assert set(chose) | set(judged) <= set(HELD_OUT)
    told = json.loads((choice / "choice.json").read_text())
    assert told["verdict_documents"] == len(judged) >= 8
    results = json.loads((made / "out.run/evaluation/results.json").read_text())
    assert results["documents"]["used"] == len(judged)
    assert results["variants"]["fitted"]["overlap"]["trained_on"] == 0


@pytest.mark.slow
def test_the_method_taken_is_that_of_an_exhaustive_ranking(made):
    from ropext.evaluation.measured_plan import RankingRequest, measure
    from ropext.options.extend import Extend

    choice = made / "out.run/choice"
    told = json.loads((choice / "choice.json").read_text())
    data = str(choice / "choosing.jsonl")
    ranking = measure(RankingRequest("ropext://demo", data, Extend(factor=2.0))).ranking
    assert told["taken"] in ranking.standing.tied
    assert told["forward_tokens"] > 0
    behind = {name: above["value"] for name, above in told["standing"]["behind"].items()}
    assert told["standing"]["documents"] == ranking.standing.documents
    for method, above in ranking.standing.behind.items():
        assert behind[method] - behind[ranking.best] == pytest.approx(above.value, abs=1e-5)
    far = ranking.beside["self-extend"].value + behind[ranking.best]
    assert (
        f"self-extend (only in memory): its loss differs by {far:+.4f} nats per token"
        in told["in_memory"][0]
    )
    record = json.loads((made / "out/ropext.json").read_text())
    assert told["in_memory"][0] in record["run"]["choice"]["verdict"]["sentence"]
    assert told["fits"]


@pytest.mark.slow
def test_card_record_and_report_carry_the_verdict(made):
    record = json.loads((made / "out/ropext.json").read_text())
    verdict = record["run"]["choice"]["verdict"]
    results = json.loads((made / "out.run/evaluation/results.json").read_text())
    assert verdict["gain"] == results["variants"]["fitted"]["metrics"]["gain@512"]
    assert verdict["short_tax"] == results["variants"]["fitted"]["metrics"]["short_tax"]
    assert escape(verdict["sentence"]) in (made / "out.run/report.md").read_text()
    assert verdict["sentence"].partition(";")[0] in (made / "out/README.md").read_text()


@pytest.mark.slow
def test_a_second_run_of_method_auto_does_nothing(made, monkeypatch, capsys):
    monkeypatch.chdir(made)
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file() and p.name != "log.txt"}
    words = (*AUTO, "--data", str(made / "data.jsonl"), "-o", "out", *CHEAP)
    code, heard = run(*words, capsys=capsys)
    assert code == 0
    assert "choose: done before, skipped" in heard.err
    after = {p: p.read_bytes() for p in made.rglob("*") if p.is_file() and p.name != "log.txt"}
    assert not {p for p in after if before.get(p) != after[p]}


@pytest.mark.slow
def test_an_interrupted_choice_reads_nothing_twice_but_damaged_losses(
    made, tmp_path, monkeypatch, capsys
):
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    choice = tmp_path / "out.run/choice"
    whole = (choice / "choice.json").read_bytes()
    (choice / "choice.json").unlink()
    step = tmp_path / "out.run/stages/choose"
    record = json.loads((step / "run.json").read_text())
    begun = {key: record[key] for key in ("versions",)}  # as a kill leaves it
    manifest(step, record["command"], record["decides"], **begun)
    last = sorted((choice / "readings").iterdir())[-1]
    shutil.rmtree(last)
    torn = next(path for path in (choice / "readings").rglob("*.npy"))
    before = torn.read_bytes()
    torn.write_bytes(before[:200])
    kept = {p: p.stat().st_mtime_ns for p in (choice / "readings").rglob("*") if p.is_file()}
    data = str(made / "data.jsonl")
    code, heard = run(*AUTO, "--data", data, "-o", "out", *CHEAP, capsys=capsys)
    assert code == 0
    assert f"are computed again: {torn.relative_to(choice).as_posix()}" in heard.err
    assert torn.read_bytes() == before
    del kept[torn]
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert json.loads((choice / "choice.json").read_text()) == json.loads(whole)


@pytest.mark.slow
def test_method_auto_leaves_a_random_model_unextended(tmp_path, monkeypatch, capsys):
    """Every form of a model with random weights predicts alike: chance."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    directory = open_snapshot("ropext://demo").directory
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory)
    config.initializer_range = 1e-3
    AutoModelForCausalLM.from_config(config).save_pretrained("random")
    AutoTokenizer.from_pretrained(directory).save_pretrained("random")
    data = write(tmp_path / "data.jsonl", HELD_OUT[:24])
    words = ("extend", "random", "--factor", "2", "--method", "auto", "--data", data)
    code, heard = run(*words, "-o", "out", "evaluate.items=1", capsys=capsys)
    assert code == 0, heard.err
    told = json.loads((tmp_path / "out.run/choice/choice.json").read_text())
    assert told["taken"] == "untouched"
    assert not told["fits"]
    assert "untouched" in told["left_out"]["fit"]
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["max_position_embeddings"] == 512
    assert written["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert "leave this model as it is: without scaling it is as good at 512" in heard.out


def counting(folder, reach, last=0):
    """Write a model that counts the tokens it has read, with its documents:
    benchmarks/counting_model.py."""
    counting_model.write_model(folder / "counts", reach)
    return write(folder / "texts.jsonl", counting_model.documents(60, 128, 1, last))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reach", "last", "said"),
    [
        ("any", 0, "leave this model as it is"),
        ("any", 40, "on truncated text the base predicts the last tokens before 128 better"),
    ],
)
def test_a_verdict_follows_from_the_facts_of_the_model(
    tmp_path, monkeypatch, capsys, reach, last, said
):
    monkeypatch.chdir(tmp_path)
    data = counting(tmp_path, reach, last)
    words = ("extend", "counts", "--factor", "2", "--method", "auto", "--data", data)
    code, heard = run(*words, "-o", "out", *CHEAP, capsys=capsys)
    assert code == 0, heard.err
    assert said in heard.out


@pytest.mark.slow
def test_method_auto_divides_one_file_into_training_choice_and_verdict(
    tmp_path, monkeypatch, capsys
):
    """The verdict is positive and comes from documents that nothing else has read. A second run
    with other documents for it, and a third without, give each its own."""
    monkeypatch.chdir(tmp_path)
    data = counting(tmp_path, "window")
    words = ("extend", "counts", "--factor", "2", "--method", "auto", "--data", data, "-o", "out")
    words += (*CHEAP, "--finetune", data, "finetune.steps=1", "finetune.rank=2")

    def outcome(*more):
        code, heard = run(*words, *more, capsys=capsys)
        assert code == 0, heard.err
        record = json.loads((tmp_path / "out/ropext.json").read_text())
        final = list(record["run"]["evaluation"]["variants"].values())[-1]
        return heard, record["run"]["choice"]["verdict"], final, record

    heard, verdict, final, record = outcome()
    judged = texts_of(tmp_path / "out.run/choice/verdict.jsonl")
    assert "20 documents of the verdict are kept out of training" in heard.err
    assert verdict["sentence"].startswith("extended by ")
    assert verdict["gain"]["ci95"][0] > 0
    assert verdict["gain"]["n"] == len(judged) == 20
    assert verdict["mark"] == final["overlap"]["mark"] == ""
    assert record["trained_on"]["documents"] + record["trained_on"]["chose"]["documents"] >= 40
    values = {own.value for own in card_figures(tmp_path / "out") if own.metric == "perplexity"}
    assert values == {final["metrics"]["tail@128"]["value"]}

    heard, verdict, final, _ = outcome(f"evaluate.data={data}", "evaluate.max_docs=60")
    assert "choose: done before" not in heard.err
    assert verdict["gain"]["n"] == 60
    assert final["overlap"]["trained_on"] + final["overlap"]["chosen_on"] == 60
    assert final["overlap"]["chosen_on"] > 0
    assert verdict["mark"] == final["overlap"]["mark"]
    assert verdict["mark"].endswith(f"{final['overlap']['chosen_on']} of 60 chosen on")
    assert verdict["sentence"].endswith(f"(documents: {verdict['mark']})")
    assert "took no part" not in heard.out + (tmp_path / "out/README.md").read_text()

    _, verdict, final, _ = outcome()
    assert (verdict["gain"]["n"], verdict["mark"]) == (20, "")


@pytest.mark.slow
def test_few_documents_are_measured_and_the_unknown_intervals_are_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    long = [text for text in HELD_OUT if len(text) > 3000][:7]
    data = write(tmp_path / "few.jsonl", long)
    code, heard = run(*AUTO, "--data", data, "-o", "out", "evaluate.items=1", capsys=capsys)
    assert code == 0, heard.err
    assert "no intervals (eight or more give them)" in heard.err
    assert "not known whether extending gains anything over truncation" in heard.out
    told = json.loads((tmp_path / "out.run/choice/choice.json").read_text())
    assert "give no interval, so that the start is written" in told["left_out"]["fit"]
