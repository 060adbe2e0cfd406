"""results.json keeps its keys and every digit through a `Measurement`.

The files in `recorded` were written before the fields of `Measurement` had types.
"""

import json
import re
from pathlib import Path

import pytest

from ropext.base.errors import InputError
from ropext.base.jsontext import write_json
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import EvaluationFacts, ModelNumbers, ModelSource
from ropext.results.perplexity import LossStatistics
from ropext.results.retrieval import HeatCell
from ropext.results.rundir import _read_measurement
from ropext.results.values import Bootstrap, Value

RECORDED = Path(__file__).with_name("recorded")
# Written only if an option or the kind of the model needs it.
RARE = {
    "mask_stride": {"mask_stride": 8},
    "lm_eval": {"lm_eval": {"yarn-4x": {"task": {"acc,none": 0.5, "alias": "task"}}}},
}


def in_order(path):
    """Return the text of a JSON file, each object in the order of its keys: only so 1 and 1.0
    differ."""
    return json.dumps(json.loads(path.read_text("utf-8")), sort_keys=True)


@pytest.mark.parametrize("name", ["eval", "protocol-yarn", "endpoint"])
def test_a_recorded_file_is_written_as_it_was_read(tmp_path, name):
    recorded = RECORDED / f"{name}.json"
    measured = _read_measurement(tmp_path, {}, json.loads(recorded.read_text("utf-8")))
    write_json(tmp_path / "results.json", measured.results)
    assert in_order(tmp_path / "results.json") == in_order(recorded)


@pytest.mark.parametrize("key", RARE)
def test_a_key_that_few_runs_have_is_kept(tmp_path, key):
    recorded = json.loads((RECORDED / "eval.json").read_text("utf-8"))
    assert key not in recorded
    assert key not in _read_measurement(tmp_path, {}, recorded).results
    written = _read_measurement(tmp_path, {}, recorded | RARE[key]).results
    assert written == recorded | RARE[key]
    assert _read_measurement(tmp_path, {}, written).results == written


def test_a_row_of_a_server_without_questions_keeps_its_empty_outcomes(tmp_path):
    """The row of a plain server, which read texts alone."""
    recorded = json.loads((RECORDED / "endpoint.json").read_text("utf-8"))
    recorded["variants"]["port"]["outcomes"] = []
    assert _read_measurement(tmp_path, {}, recorded).results == recorded


@pytest.mark.parametrize("key", ["lengths", "protocol", "variants"])
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    recorded = json.loads((RECORDED / "eval.json").read_text("utf-8"))
    del recorded[key]
    sentence = f"{tmp_path / 'results.json'} is damaged: the key '{key}' is missing; evaluate again"
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        _read_measurement(tmp_path, {}, recorded)


def test_a_key_that_a_model_or_an_answer_lacks_is_named_with_its_file(tmp_path):
    recorded = json.loads((RECORDED / "eval.json").read_text("utf-8"))
    (tmp_path / "items.jsonl").write_text('{"variant": "yarn-4x"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"items\.jsonl is damaged: the key 'task' is missing"):
        _read_measurement(tmp_path, {}, recorded)
    del next(iter(recorded["variants"].values()))["metrics"]
    with pytest.raises(InputError, match=r"results\.json is damaged: the key 'metrics' is missing"):
        _read_measurement(tmp_path, {}, recorded)


def test_results_json_keeps_infinity_and_nan(tmp_path):
    """JSON has neither infinity nor not-a-number."""
    exploded = Value(float("inf"), None, (1.0, float("inf")), 8)
    cell = HeatCell(64, None, exploded, float("nan"))
    numbers = ModelNumbers({"tail@64": exploded}, retrieval={"passkey": (cell,)})
    model = MeasuredModel(source=ModelSource(store="s"), numbers=numbers)
    frame = LossStatistics(64, (64,), 16, Bootstrap(3))
    measured = Measurement(frame, {"m": model}, facts=EvaluationFacts())
    again = _read_measurement(tmp_path, {}, measured.results)
    assert again.results == measured.results
    assert again.frame == frame
    read = again.values("m")["tail@64"]
    assert str(read.value) == "nan"
    assert read.ci95[0] == 1.0
    assert str(again.models["m"].numbers.retrieval["passkey"][0].answer_nll) == "nan"
