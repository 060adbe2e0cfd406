"""KL divergence and agreement of next tokens equal a computation from whole logits; so does a
rounded cache's row."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from command_line import in_two_processes
from json_schema import check_file
from small_models import CONTEXT, tiny
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropext.base.errors import OutputExists, UnsupportedModel, UsageError
from ropext.base.narration import NOBODY
from ropext.base.workdir import OURS
from ropext.evaluation.forward import tiled_divergence
from ropext.evaluation.request import EvaluationRequest
from ropext.models.patching import patch, unpatch
from ropext.models.patching.rounding import cache_rounded
from ropext.options.cache import StoredCache
from ropext.options.evaluate import Evaluate
from ropext.pipeline.public import evaluate, extend
from ropext.results.gates import parse_gate
from ropext.results.rundir import judge_gates, read_run

DOCUMENTS = 9
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("divergence")
    torch.set_num_threads(1)
    write_checkpoint(path / "model", **HEADS)
    write_documents(path / "docs.jsonl", DOCUMENTS)
    return path


def asked(place, **changes):
    known = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "kl": True}
    return known | {"method": "yarn", "factor": "4"} | changes


@pytest.fixture(scope="module")
def whole(place):
    return evaluate(str(place / "model"), place / "whole", **asked(place, kv="q4_0"))


def documents(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for line in (place / "docs.jsonl").read_text("utf-8").splitlines():
        yield torch.tensor(tokenizer(json.loads(line)["text"])["input_ids"][:256])


def probabilities(model, ids):
    """Return log-probabilities of the token at each place from 1 on, in float64."""
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)


def of_base(model, ids):
    """Return the base's log-probabilities at each place, from windows of the context that advance
    by half a context."""
    rows = torch.empty(len(ids) - 1, model.config.vocab_size, dtype=torch.float64)
    half = CONTEXT // 2
    for begin in range(0, len(ids) - CONTEXT + 1, half):
        window = ids[begin : begin + CONTEXT].clone()
        window[0] = ids[0]  # its BOS
        first = 1 if begin == 0 else half
        rows[begin + first - 1 : begin + CONTEXT - 1] = probabilities(model, window)[first - 1 :]
    return rows


def by_hand(model, place, length, tail, reading):
    sums = np.zeros(2)
    count = 0
    for ids in documents(place):
        base = of_base(model, ids)
        with reading(model):
            other = probabilities(model, ids)
        tokens = slice(length - tail - 1, length - 1)
        kl = (base.exp() * (base - other)).sum(-1)[tokens]
        same = (base.argmax(-1) == other.argmax(-1))[tokens]
        sums += [float(kl.sum()), float(same.sum())]
        count += len(kl)
    return sums / count


class Patched:
    """The model by YaRN, with a rounded cache if one is given."""

    def __init__(self, cache=None):
        self.cache = cache

    def __call__(self, model):
        self.model = model
        return self

    def __enter__(self):
        patch(self.model, method="yarn", factor=4)
        if self.cache is not None:
            self.rounded = cache_rounded(self.model, self.cache)
            self.rounded.__enter__()

    def __exit__(self, *error):
        if self.cache is not None:
            self.rounded.__exit__(*error)
        unpatch(self.model)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize(
    ("label", "reading"),
    [
        ("yarn-4x", Patched()),
        ("yarn-4x+kv-q4_0", Patched(StoredCache("q4_0", "q4_0"))),
    ],
)
def test_divergence_equals_a_computation_from_both_rows_of_logits(
    place, whole, length, label, reading
):
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    kl, same = by_hand(model, place, length, whole.frame.tail, reading)
    values = whole.values(label)
    assert kl > 0.01
    assert values[f"kl@{length}"].value == pytest.approx(kl, abs=2e-5)
    assert values[f"agreement@{length}"].value == pytest.approx(same, abs=1e-9)


def test_the_untouched_model_is_the_base_inside_its_window(whole):
    values = whole.values("untouched")
    assert values["kl@64"].value == pytest.approx(0, abs=1e-6)
    assert values["agreement@64"].value == 1
    assert values["kl@256"].value > 0.01
    assert not any(name.startswith(("kl@", "agreement@")) for name in whole.values("base"))


def test_the_cost_of_rounding_is_paired(whole):
    check_file(whole.path / "results.json")
    rounded = whole.values("yarn-4x+kv-q4_0")
    plain = whole.values("yarn-4x")
    difference = rounded["tail_nll@256"].value - plain["tail_nll@256"].value
    assert rounded["rounding@256"].value == pytest.approx(difference, abs=1e-9)
    assert rounded["rounding@256"].value != 0
    assert "rounding@256" not in plain


def test_divergence_is_read_back_and_a_run_resumes(place, whole):
    again = read_run(place / "whole")
    assert again.results == whole.results
    for label, model in whole.models.items():
        if model.divergence is not None:
            for length, arrays in model.divergence.passes.items():
                np.testing.assert_array_equal(
                    np.array(again.models[label].divergence.passes[length]), np.array(arrays)
                )
    for file in (place / "whole").glob("variants/yarn-4x-*/kl-*/*.npy"):
        file.unlink()
        break
    done = evaluate(str(place / "model"), place / "whole", **asked(place, kv="q4_0"))
    assert done.results == whole.results
    assert done.resumed == 4 * DOCUMENTS - 1


def test_stored_files_are_known_by_name_and_an_edit_is_refused(place, tmp_path):
    output = tmp_path / "run"
    evaluate(str(place / "model"), output, **asked(place, kv="q4_0", max_docs=8))
    for path in output.rglob("*"):
        name = path.relative_to(output).as_posix()
        assert path.is_dir() or OURS.fullmatch(name), name
    (array,) = [*output.glob("variants/yarn-4x-*/kl-*/*.npy")][:1]
    np.save(array, np.load(array) * 10)
    with pytest.raises(OutputExists, match=array.parent.name):
        evaluate(str(place / "model"), output, **asked(place, kv="q4_0", max_docs=8))


@pytest.mark.parametrize(
    ("gate", "models"),
    [
        ("rounding@256.value > 9", ["yarn-4x+kv-q4_0"]),
        ("tail@256.value < 0", ["yarn-4x"]),
        ("yarn-4x+kv-q4_0:kl@256.value < 0", ["yarn-4x+kv-q4_0"]),
    ],
)
def test_a_gate_reads_rounded_rows_if_it_names_them(whole, gate, models):
    outcomes = judge_gates(whole, [parse_gate(gate)])
    assert [outcome.variant for outcome in outcomes] == models
    assert all(outcome.passed for outcome in outcomes)


def test_without_the_option_nothing_is_kept(place, tmp_path):
    done = evaluate(str(place / "model"), tmp_path / "run", **asked(place, kl=False))
    assert not any("kl@" in name for name in done.values("yarn-4x"))
    assert not list((tmp_path / "run").glob("variants/*/states-*"))


def test_the_divergence_of_a_written_checkpoint_equals_the_patched_models(place, tmp_path):
    """A written checkpoint, whose head is its own, is as far from the base as the patched model."""
    extend(place / "model", tmp_path / "long", method="yarn", factor=4)
    known = asked(place)
    del known["method"], known["factor"]
    done = evaluate(str(tmp_path / "long"), **known, base=str(place / "model"))
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    kl, same = by_hand(model, place, 256, done.frame.tail, Patched())
    values = done.values("extended")
    assert values["kl@256"].value == pytest.approx(kl, abs=2e-5)
    assert values["agreement@256"].value == pytest.approx(same, abs=1e-9)


@pytest.mark.slow
def test_two_processes_read_the_same(place, whole):
    model = str(place / "model")
    call = partial(evaluate, model, place / "two", **asked(place, kv="q4_0"))
    for code, said in in_two_processes(call, place):
        assert code == 0, said
    results = (place / "two" / "results.json").read_bytes()
    assert results == (place / "whole" / "results.json").read_bytes()


def test_the_tiles_of_half_precision():
    """Wide logits in bfloat16, in tiles that do not divide the vocabulary."""
    torch.manual_seed(0)
    heads = [torch.nn.Linear(32, 100).bfloat16() for _ in range(2)]
    states = [torch.randn(7, 32).bfloat16() * 9 for _ in range(2)]
    with torch.no_grad():
        found, same = tiled_divergence(heads[0], states[0], heads[1], states[1], 33)
        logs = [
            head(rows).double().log_softmax(-1) for head, rows in zip(heads, states, strict=True)
        ]
    truth = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    torch.testing.assert_close(found.double(), truth, atol=1e-4, rtol=1e-4)
    assert torch.equal(same, logs[0].argmax(-1) == logs[1].argmax(-1))


def count_job(model, **options):
    """Return the counts of --dry-run."""
    request = EvaluationRequest(str(model), Evaluate(**options))
    with request.prepared(None, NOBODY) as job:
        return job.counts()


def test_a_dry_run_refuses_a_cache_of_latent_vectors(place, tmp_path):
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 2}
    widths = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    rows = len(AutoTokenizer.from_pretrained(place / "model"))
    shutil.copytree(place / "model", tmp_path / "latent")
    tiny("deepseek_v3", vocab_size=rows, **ranks, **widths).save_pretrained(tmp_path / "latent")
    plain = asked(place) | {"kl": False}
    assert count_job(tmp_path / "latent", **plain).passes
    with pytest.raises(UnsupportedModel, match="latent"):
        count_job(tmp_path / "latent", **plain, kv="fp8")


def test_comparisons_that_cannot_be_measured_are_refused(place, tmp_path):
    write_checkpoint(tmp_path / "capped", **HEADS)
    rows = len(AutoTokenizer.from_pretrained(place / "model"))
    model = tiny("gemma2", final_logit_softcapping=5.0, vocab_size=rows, **HEADS)
    model.save_pretrained(tmp_path / "capped")
    with pytest.raises(UnsupportedModel, match="more than a matrix"):
        evaluate(str(tmp_path / "capped"), **asked(place))
    with pytest.raises(UnsupportedModel, match="more than a matrix"):
        count_job(tmp_path / "capped", **asked(place))
    with pytest.raises(UsageError, match="give --data"):
        evaluate(str(place / "model"), **asked(place, data=None, tasks="copy"))
    with pytest.raises(UsageError, match="--kv names q8_0 twice"):
        evaluate(str(place / "model"), **asked(place, kv="q8_0,q8/q8"))
    with pytest.raises(UsageError, match="read anyway"):
        evaluate(str(place / "model"), **asked(place, kv="f16"))
