"""Methods ranked on documents: the numbers equal those of `ropext eval`, and the order can be
trusted."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run
from json_schema import check
from tiny_checkpoints import write_checkpoint, write_documents

import ropext
from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.base.jsontext import values_json
from ropext.base.narration import Call, Hooks
from ropext.cli import plan as plan_command
from ropext.cli.output import Out
from ropext.evaluation.corpus import Document
from ropext.evaluation.measured_plan import (
    MethodComparison,
    RankingRequest,
    closed_forms,
    measure,
    preferred_in_ties,
)
from ropext.evaluation.workload import NEXT_TOKEN, Workload
from ropext.files.checkpoint import open_snapshot
from ropext.options import extend
from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import Extend
from ropext.pipeline.public import evaluate
from ropext.planning import make_plan
from ropext.results.report.ranking import ranking_text
from ropext.scaling import METHODS

COMPETING = [method.name for method in METHODS.values() if method.competes]
DEMO = Path(ropext.__file__).parent / "demo"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured")
    torch.set_num_threads(1)
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    write_documents(path / "few.jsonl", count=7)
    return path


def request_of(model, data, factor=4.0, **more):
    return RankingRequest(str(model), str(data), Extend(factor=factor), **more)


@pytest.fixture(scope="session")
def found(place):
    said, shown = [], []
    hooks = Hooks(say=said.append, show=lambda *words: shown.append(words))
    done = measure(request_of(place / "model", place / "docs.jsonl"), Call(hooks))
    return done, said, shown


def test_the_numbers_of_plan_measure_equal_those_of_eval(place, found):
    ranking = found[0].ranking
    done = evaluate(
        str(place / "model"),
        data=str(place / "docs.jsonl"),
        lengths="256",
        method=",".join([*COMPETING, "self-extend"]),
        factor="4",
    )
    ranked = list(ranking.standing.behind)
    assert {*ranked} == {*COMPETING}
    assert {"pi", "yarn"} <= {*COMPETING}
    assert {"abf", "longrope"}.isdisjoint(COMPETING)
    assert list(ranking.beside) == ["self-extend"]  # measured, never taken
    for method in (*ranked, *ranking.beside):
        metrics = done.results["variants"][f"{method}-4x"]["metrics"]
        assert values_json(ranking.tail(method)) == metrics["tail@256"]
        assert values_json(ranking.tail_nll(method)) == metrics["tail_nll@256"]
        assert values_json(ranking.gain(method)) == metrics["gain@256"]
        assert values_json(ranking.short_tax(method)) == metrics["short_tax"]
        assert values_json(ranking.in_window) == metrics["in_window@256"]
    tails = [ranking.tail(method).value for method in ranked]
    assert tails == sorted(tails)


def test_the_cost_is_printed_before_the_start_and_equals_the_spent_one(found):
    done, said, shown = found
    # 9 documents: the methods and Self-Extend at 256 tokens, and 7 windows of 64 for the base.
    assert done.tokens == 9 * ((len(COMPETING) + 1) * 256 + 7 * 64)
    assert f"{done.tokens:,} forward tokens" in said[0]
    assert shown[0][1] == shown[-1][0] == shown[-1][1] == done.tokens


def test_memory_only_variants_are_listed_with_their_distance_to_the_lowest(place, found):
    ranking = found[0].ranking
    behind = ranking.beside["self-extend"].value
    apart = ranking.tail_nll("self-extend").value - ranking.tail_nll(ranking.best).value
    assert behind == pytest.approx(apart)
    said = ranking_text(ranking, found[0].plans, {})
    line = f"self-extend (only in memory): its loss differs by {behind:+.4f} nats per token"
    assert line in " ".join(said.split())
    assert "no checkpoint can store it (ropext serve, ropext.patch)" in " ".join(said.split())


def test_a_model_whose_attention_cannot_be_folded_is_ranked_all_the_same(place, tmp_path):
    write_checkpoint(tmp_path / "gemma2", kind="gemma2", sliding_window=512)
    done = measure(request_of(tmp_path / "gemma2", place / "few.jsonl"))
    assert done.ranking.standing.behind
    assert done.ranking.beside == {}
    assert done.tokens == 7 * (len(done.plans) * 256 + 7 * 64)


def demo_bench(documents=8, factor=4):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "checkpoint").eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "checkpoint")
    rows = (DEMO / "data" / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [tokenizer.encode(json.loads(row)["text"], verbose=False) for row in rows]
    long = [np.asarray(own, np.int32) for own in ids if len(own) >= 256 * factor][:documents]
    read = tuple(
        Document(own, token_bytes=np.ones(len(own)), name=f"{k}") for k, own in enumerate(long)
    )
    return model, Workload(NEXT_TOKEN.frame(256, (256 * factor,), 0), read)


@pytest.mark.slow
def test_a_spectrum_spoilt_on_purpose_ranks_last_and_the_model_comes_back_as_it_was():
    with torch.inference_mode(False):
        model, reads = demo_bench()
        snapshot = open_snapshot(str(DEMO / "checkpoint"))
        plans = {
            method: make_plan(
                snapshot.config, extend.parse_extend({"method": method, "factor": 4.0})
            )
            for method in ("yarn", "dynamic")
        }
        # Every pair slowed by its own odd factor, the fast ones most: no position stays known.
        spoilt = tuple(20.0 - i + (-1) ** i * 3 for i in range(16))
        wish = {"method": "longrope", "factor": 4.0, "pair_factors": spoilt}
        plans = {"spoilt": make_plan(snapshot.config, extend.parse_extend(wish))} | plans
        ids = torch.as_tensor(reads.documents[0].ids[:512], dtype=torch.long)[None]
        with torch.no_grad():
            before = model(ids).logits
        ranking = MethodComparison(snapshot, plans).rank(model, reads)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)
        model(ids, labels=ids).loss.backward()  # and it can be trained
    *_, last = ranking.standing.behind
    assert last == "spoilt"
    assert ranking.standing.behind[last].ci95[0] > 1
    assert ranking.taken != "spoilt"


def test_below_eight_documents_there_is_a_warning_and_no_interval(place):
    said = []
    call = Call(Hooks(say=said.append))
    done = measure(request_of(place / "model", place / "few.jsonl"), call)
    assert said[0].startswith("warning: [few-documents] only 7 documents reach 256 tokens")
    assert all(behind.ci95 is None for behind in done.ranking.standing.behind.values())
    assert done.ranking.taken == done.ranking.best


def test_only_forms_that_the_named_loaders_read_exactly_take_part(place):
    snapshot = open_snapshot(str(place / "model"))
    plans, left_out = closed_forms(
        snapshot, extend.parse_extend({"factor": 4.0, "for_loaders": ("ctranslate2",)})
    )
    assert "llama3" in left_out
    assert {"ntk", "dynamic"} <= set(plans)
    assert "ctranslate2" in left_out["llama3"]
    with pytest.raises(UsageError, match="--factor must be above 1"):
        closed_forms(snapshot, extend.parse_extend({"factor": 0.5}))


def test_the_named_method_takes_part_with_its_knobs(place):
    snapshot = open_snapshot(str(place / "model"))
    plans, left_out = closed_forms(
        snapshot, extend.parse_extend({"factor": 4.0, "method": "yarn", "beta_fast": 8.0})
    )
    assert plans["yarn"].knobs["beta_fast"] == 8.0
    assert plans["by-parts"].knobs["beta_fast"] == 32.0
    assert "abf" not in plans
    assert "abf" not in left_out


def test_a_tie_goes_to_the_form_that_more_loaders_read(place):
    snapshot = open_snapshot(str(place / "model"))
    order = preferred_in_ties(closed_forms(snapshot, extend.parse_extend({"factor": 4.0}))[0])
    assert order.index("ntk") < order.index("yarn")
    assert order.index("pi") < order.index("llama3")


def test_an_impossible_measurement_is_refused_by_name(place):
    from transformers import ModernBertConfig

    model = place / "model"
    docs = place / "docs.jsonl"
    with pytest.raises(InputError, match=r"reaches 64k tokens.*give a smaller --factor"):
        measure(request_of(model, docs, 1024.0))
    with pytest.raises(InputError, match=r"--measure .*no such file"):
        measure(request_of(model, place / "none.jsonl"))
    with pytest.raises(InputError, match=r"^--measure .*/my--data.jsonl: there is no such file"):
        measure(request_of(model, place / "my--data.jsonl"))  # a path is not changed
    with pytest.raises(InputError, match="there is no column body"):
        measure(request_of(model, docs, reading=DocumentOptions(column="body")))
    ModernBertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    ).save_pretrained(place / "bert")
    with pytest.raises(UnsupportedModel, match="masked language model"):
        measure(request_of(place / "bert", docs))


def test_plan_measure_ends_with_the_extend_line_of_the_taken_method(place, found, capsys):
    asked = ("plan", str(place / "model"), "--factor", "4", "--measure", str(place / "docs.jsonl"))
    code, said = run(*asked, capsys=capsys)
    assert code == 0
    taken = found[0].ranking.taken
    assert f"take {taken}: " in said.out
    command = f"ropext extend {place / 'model'} --method {taken} --factor 4 -o OUT"
    assert said.out.rstrip().endswith(command)
    assert "forward tokens" in said.err
    code, said = run(*asked, "--json", "--quiet", capsys=capsys)
    data = json.loads(said.out)
    check(data, "plan")
    assert data["method"] == taken
    assert data["measured"]["taken"] == taken
    assert len(data["measured"]["ranking"]) == len(COMPETING)
    assert data["measured"]["data"]["used"] == 9
    assert said.err == ""


def test_a_csv_of_the_ranking_has_its_numbers(found, capsys):
    ranking = found[0].ranking
    plan_command._print_ranking_table(Out(), found[0], "csv")
    said = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(said.out)))
    first = rows[0]
    assert first["method"].rstrip("*") == ranking.best
    assert float(first["tail"]) == ranking.tail(ranking.best).value
    assert len(rows) == len(COMPETING) + 2  # self-extend, and the base
    assert f"take {ranking.taken}: " in said.err


def test_plan_refuses_options_of_documents_without_measure(place, capsys):
    code, said = run(
        "plan", str(place / "model"), "--factor", "4", "--max-docs", "3", capsys=capsys
    )
    assert code == 2
    assert "--max-docs" in said.err
    assert "--measure" in said.err
