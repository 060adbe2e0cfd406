"""What the first screen says of quality, against the published tables and README."""

import json
import math
import re
import runpy
from pathlib import Path

import configs
import pytest

from ropext.files.inspecting import with_untrained_results
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.planning.warnings import farther

ROOT = Path(__file__).parents[1]
MEASURED = json.loads((ROOT / "ropext/planning/measured.json").read_text("utf-8"))
# The config of HuggingFaceTB/SmolLM2-135M-Instruct, as far as a plan reads it.
SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "vocab_size": 49152,
}  # fmt: skip


def table(heading):
    """Return the rows of a table of benchmarks/results, by their first cell."""
    page = (ROOT / "benchmarks/results/real-model-2026-11-26.md").read_text("utf-8")
    begin = page.index(f"| {heading} |")
    rows = page[begin:].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: others for first, *others in cells}


def test_the_measured_numbers_equal_those_of_the_script(tmp_path):
    make = runpy.run_path(str(ROOT / "scripts/make_measured.py"), run_name="make")
    assert make["measured"]() == MEASURED


@pytest.mark.parametrize("method", ["yarn", "llama3", "ntk", "dynamic", "pi"])
def test_the_numbers_are_those_of_the_published_table(method):
    """benchmarks/real_model.py wrote that table, by its own sums over the same tokens."""
    seen = MEASURED["factors"]["2"][method]
    for heading, what, sign in (("far half", "worse", -1), ("short tax", "inside", 1)):
        for kind, cell in zip(("novels", "code", "manuals"), table(heading)[method], strict=True):
            if not cell:
                assert kind not in seen[what]
                continue
            printed = float(cell.split()[0])
            assert seen[what][kind] == pytest.approx(sign * printed, abs=6e-4)


def test_readme_and_the_page_on_gguf_have_the_same_numbers():
    yarn = MEASURED["factors"]["2"]["yarn"]
    readme = (ROOT / "README.md").read_text("utf-8").replace("−", "-")
    (row,) = re.findall(r"\| YaRN, untrained .*", readme)
    _, novels, code, manuals, needles, tax = [cell.strip() for cell in row.strip(" |").split("|")]
    for kind, cell in (("novels", novels), ("code", code), ("manuals", manuals)):
        assert float(cell) == pytest.approx(-yarn["worse"][kind], abs=6e-4)
    assert needles == f"{yarn['found'] * 100:.0f} %"
    inside = sorted(yarn["inside"].values())
    assert [float(one) for one in tax.split(" to ")] == pytest.approx(
        [inside[0], inside[2]], abs=6e-4
    )
    page = " ".join((ROOT / "docs/gguf.md").read_text("utf-8").split())
    assert f"novels {yarn['worse']['novels']:.3f} nats per token worse" in page
    assert f"code {yarn['worse']['code']:.3f} worse" in page
    assert f"finds {yarn['found'] * 100:.0f} % of the facts" in page


def planned(config, name="MODEL", **options):
    return with_untrained_results(make_plan(config, Extend(**{"factor": 2.0} | options), name))


def test_this_model_is_known_by_its_shape_and_name():
    named = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for name in (named, "SmolLM2-135M-Instruct.Q4_1.gguf", "models/smollm2_135m_instruct"):
        assert planned(SMOLLM2, name).measured.startswith(
            "on SmolLM2-135M-Instruct (this model, by its name and shape), untrained YaRN at 2×: "
        )
    alike = planned(SMOLLM2, "SmolLM2-135M").measured
    assert alike.startswith("on SmolLM2-135M-Instruct (this model has its shape), ")
    other = planned(configs.LLAMA, named).measured
    assert other.startswith("on SmolLM2-135M-Instruct (not this model), ")
    assert planned(SMOLLM2 | {"rope_theta": 10000.0}, named).measured == other


def test_the_line_of_a_plan_has_the_measured_numbers():
    said = planned(SMOLLM2).measured
    percent = math.expm1(MEASURED["factors"]["2"]["yarn"]["worse"]["novels"]) * 100
    assert f": {percent:.2g} % more perplexity than truncated text on novels, " in said
    assert "the same on manuals; 15 % of the needles found that truncation cuts off; " in said
    pi = planned(SMOLLM2, method="pi").measured
    assert "untrained pi at 2×: 142 % more perplexity" in pi
    assert "needles" not in pi
    assert "untrained YaRN at 2× (by-parts was not measured): 3.2 %" in (
        planned(SMOLLM2, method="by-parts").measured
    )


def test_training_and_far_targets_get_other_advice():
    assert planned(SMOLLM2, finetune="books.jsonl").measured == ""
    assert planned(SMOLLM2, length_only=True).measured == ""
    assert planned(SMOLLM2, factor=3.9).measured
    assert planned(SMOLLM2, factor=4.0).measured == ""  # [far] says it
    far = MEASURED["factors"]
    for factor in ("4", "8"):
        percent = math.expm1(far[factor]["yarn"]["worse"]["novels"]) * 100
        assert f"{percent:.0f} % more" in farther()
    # The published table of 22 to 26 November, by hand: 0.175 and 0.597 nats, 3 of 30 needles.
    assert [far[factor]["yarn"]["worse"]["novels"] for factor in ("4", "8")] == [0.175, 0.5967]
    assert far["4"]["yarn"]["found"] == 0.1
