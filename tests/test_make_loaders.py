"""A fact about a loader has one place, outlives measurements, and is refused if one contradicts
it."""

import copy
import json

import configs
import make_loaders
import make_tables
import pytest

from ropext.base.errors import NotExpressible, NotMeasured
from ropext.families import loaders
from ropext.families.loaders import lookup, table
from ropext.families.loaders.table import NEVER, VersionSpan, span_of
from ropext.files import inspecting
from ropext.options.extend import Extend
from ropext.planning import make_plan

FACTS = json.loads(make_loaders.FACTS.read_text("utf-8"))
MEASURED = json.loads(make_loaders.MEASURED.read_text("utf-8"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
MISREAD = {"is": "different", "why": "a ramp of its own"}


def fact(**more):
    """Return someone's fact about MLX-LM: how it reads a yarn in SmolLM 3."""
    known = {"loader": "mlx", "versions": "0.30-", "evidence": "source", "families": ["smollm3"]}
    return known | {"origin": "mlx_lm/models/rope_utils.py", "cells": {"yarn": MISREAD}} | more


def merged(*facts, measured=MEASURED):
    """Return the table with these facts added to the known ones."""
    data = copy.deepcopy(FACTS)
    data["facts"] += facts
    return make_loaders.merge(data, measured)


def refusal(*facts, **more):
    with pytest.raises(make_loaders.Refused) as refused:
        merged(*facts, **more)
    return str(refused.value)


@pytest.fixture
def with_facts(monkeypatch):
    """Give the package a table that holds more facts."""

    table.readers()  # kept as it is for other tests

    def use(*facts):
        data = merged(*facts)
        monkeypatch.setattr(table, "loader_table", lambda: data)
        parsed = table.readers.__wrapped__()
        monkeypatch.setattr(lookup, "readers", lambda: parsed)
        files = table.readers("gguf_readers")
        monkeypatch.setattr(
            make_tables, "readers", lambda of="readers": files if of == "gguf_readers" else parsed
        )

    return use


def reading(family, name, params=YARN):
    """Return the verdict of the loader with this name on a dict."""
    rows = zip(loaders.readers_for(family), loaders.readings(family, params), strict=True)
    return [row for reader, row in rows if reader in loaders.select(name)]


def test_the_table_equals_the_builders_output():
    text = make_loaders.text_of(make_loaders.merge(FACTS, MEASURED))
    assert make_loaders.TABLE.read_text("utf-8") == text, "run scripts/make_loaders.py"


def test_a_fact_by_hand_about_a_measured_cell_is_used(with_facts):
    """It had no effect, and every test passed."""
    said = refusal(fact())
    assert "mlx MLX-LM 0.32.2, smollm3, yarn: a fact says different (a ramp of its own)" in said
    assert "MLX-LM 0.32.2 was measured to be same" in said
    with_facts(fact(cells={"yarn": MISREAD | {"over": "same"}}))
    (found,) = reading("smollm3", "mlx")
    assert (found.verdict, found.evidence) == ("different", "source")
    assert found.why == "a ramp of its own (read in its source, not run)"


def olmoe_in_mlx(measured):
    """Return the table's group of OLMoE in the newest MLX-LM, with a fact about it."""
    readers = merged(fact(families=["olmoe"]), measured=measured)["readers"]
    newest = next(reader for reader in readers if reader["loader"] == "mlx")
    return next(group for group in newest["groups"] if group["families"] == ["olmoe"])


def test_a_fact_outlives_a_measurement_until_that_contradicts_it():
    """The next measurement wrote it away."""
    fresh = copy.deepcopy(MEASURED)
    cells = {"theta": "same"}
    fresh["mlx MLX-LM 0.32.2"]["groups"].append({"families": ["olmoe"], "cells": cells})
    assert olmoe_in_mlx(fresh)["cells"]["yarn"] == MISREAD

    cells["yarn"] = {"is": "ignored", "why": "reads the model without its scaling"}
    said = refusal(fact(families=["olmoe"]), measured=fresh)
    assert 'write "over": "ignored" into its cell' in said

    cells["yarn"] = {"is": "different", "why": "log-probabilities differ by 0.2 in the mean"}
    group = olmoe_in_mlx(fresh)
    assert group["cells"]["yarn"] == MISREAD, "in the words of the fact"
    assert group["evidence"] == "engine", "it ran"


def test_a_fact_of_unmeasured_versions_gets_its_own_cell(with_facts):
    """A row for it once ended the pages half-way, and appeared in the plans of every other
    family."""
    with_facts(fact(versions="0.30-0.32.1", evidence="thread"))
    for page in make_tables.TABLES:
        assert make_tables.renewed(page)
    (old,) = reading("smollm3", "mlx==0.31")
    assert (old.versions, old.verdict) == ("0.30-0.32.1", "different")
    (new,) = reading("smollm3", "mlx")
    assert (new.versions, new.verdict) == ("MLX-LM 0.32.2", "same")
    assert "0.30-0.32.1" not in [row.versions for row in loaders.readings("llama", YARN)]
    assert reading("llama", "mlx==0.31") == []
    wish = Extend(factor=4.0, method="yarn", for_loaders=("mlx==0.31",))
    with pytest.raises(NotExpressible, match=r"how mlx==0\.31 reads yarn .* was not measured"):
        make_plan(configs.LLAMA, wish)
    served = inspecting.read_unchanged(inspecting.open_model("ropext://demo"))
    assert served is not None
    with pytest.raises(NotMeasured, match=r"mlx 0\.30-0\.32\.1: not measured"):
        inspecting.gate(served, ["mlx==0.31"]).raise_if_failed()


def test_a_fact_of_an_open_range_holds_for_versions_that_are_newer_than_every_column(with_facts):
    """It ended at the newest column, and a version released since was "not measured"."""
    with_facts(fact(families=["olmoe"], versions="0.32-"))
    for name in ("mlx", "mlx==0.32.2", "mlx==0.34", "mlx==1.0"):
        assert {row.verdict for row in reading("olmoe", name)} == {"different"}, name
    with pytest.raises(NotMeasured, match=r"0\.32-0\.32\.1, 0\.32\.3 or newer"):
        reading("olmoe", "mlx==0.1")
    assert [row.verdict for row in reading("smollm3", "mlx")] == ["same"]
    for page in make_tables.TABLES:
        assert make_tables.renewed(page)


def test_a_fact_of_some_versions_of_a_column_cuts_it(with_facts):
    """Of vLLM 0.32-0.33 the first was measured, which a fact about 0.33 does not contradict."""
    known = fact(loader="vllm", versions="0.33-")
    with_facts(known)
    assert [row.verdict for row in reading("smollm3", "vllm")] == ["different"]
    assert [row.verdict for row in reading("smollm3", "vllm==0.32")] == ["same"]
    labels = [reader.versions for reader in lookup.readers() if reader.loader == "vllm"]
    assert labels == ["0.33", "0.32", "0.8 and 0.11", "0.34 or newer"]
    assert "vllm 0.32-0.33, smollm3, yarn" in refusal(fact(loader="vllm", versions="0.32-"))


def test_a_program_that_runs_files_is_a_reader_of_the_same_table():
    """Its facts are of an architecture, of a type or of all; attn comes first, "*" last."""
    data = copy.deepcopy(FACTS)
    cells = {"attn": {"is": "not measured", "why": "not read"}, "yarn": "same", "*": MISREAD}
    facts = [{"families": ["mixtral"], "cells": cells}]
    data["programs"].append({"loader": "new", "label": "1", "evidence": "source", "facts": facts})
    reader = make_loaders.merge(data, MEASURED)["gguf_readers"][-1]
    groups = {name: group["cells"] for group in reader["groups"] for name in group["families"]}
    assert groups["llama"]["linear"] == groups["qwen2"]["yarn-attn"] == "same"
    assert groups["llama/mixtral"]["yarn"] == "same"
    assert groups["llama/mixtral"]["yarn-attn"] == cells["attn"]
    assert groups["llama/mixtral"]["freqs"] == MISREAD
    assert groups["gptoss"]["theta"]["why"] == "knows no architecture gptoss"


def test_two_facts_that_contradict_each_other_are_refused():
    said = refusal(fact(families=["llama"], versions="0.32.2", cells={"linear": MISREAD}))
    assert "mlx MLX-LM 0.32.2, llama, linear: one fact says different, another same" in said
    stands_over_nothing = fact(families=["olmoe"], cells={"yarn": MISREAD | {"over": "same"}})
    assert 'its "over": "same" stands over nothing' in refusal(stands_over_nothing)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"origin": ""}, "what was not run needs its origin"),
        ({"versions": "from 0.30 on"}, "is no range of versions, such as 0.30-0.33"),
        ({"versions": ""}, "it needs versions, such as 0.30-"),
        ({"loader": "mlx-lm"}, "no column is of this loader; there are ctranslate2, "),
        ({"cells": {"yarns": MISREAD}}, "no kind is called 'yarns'; there are theta, "),
        ({"cells": {"yarn": "different"}}, "yarn: different says why"),
        ({"cells": {"yarn": "diferent"}}, "yarn: is is one of same, different, "),
        ({"evidence": "hearsay"}, "nothing is known by 'hearsay'"),
        ({"since": "0.30"}, "unknown keys ['since']"),
    ],
)
def test_a_mistake_in_a_fact_is_one_sentence(more, said):
    told = refusal(fact(**more))
    assert told.startswith(f"a fact of {more.get('loader', 'mlx')} (smollm3): ")
    assert said in told


@pytest.mark.parametrize(
    "wrong",
    [
        {"families": ["qwen3"], "cells": {"yarn": MISREAD}, "loader": "mlx"},
        {"families": ["qwen33"], "cells": {"yarn": MISREAD}},
        {"families": ["qwen3"], "cells": {"yarn-custom": MISREAD}},
        {"families": ["qwen3"], "cells": {"yarn": "different"}},
    ],
)
def test_a_mistake_in_a_fact_of_a_program_is_refused(wrong):
    data = copy.deepcopy(FACTS)
    data["programs"][-1]["facts"].append(wrong)
    with pytest.raises(make_loaders.Refused, match=r"^a fact of jan"):
        make_loaders.merge(data, MEASURED)


def test_spans_of_parses_ranges_of_versions():
    spans = make_loaders.spans_of
    assert spans("0.32-0.33") == (VersionSpan((0, 32), (0, 34)),)
    assert spans("0.8, 0.11") == (VersionSpan((0, 8), (0, 9)), VersionSpan((0, 11), (0, 12)))
    assert spans("0.30-") == (VersionSpan((0, 30), NEVER),)
    assert make_loaders.label_of(spans("0.30-")) == "0.30 or newer"
    for span, others in ((spans("4.51-4.57")[0], "4 4.51 4.57.6"), (spans("0.32.2")[0], "0.32")):
        assert all(span.overlaps(span_of(other)) for other in others.split())
    assert not spans("4.51-4.57")[0].overlaps(span_of("4.58"))
    assert not spans("4.51-4.57")[0].overlaps(span_of("4.5"))
    assert make_loaders.label_of(spans("0.30-0.32.1, 0.33")) == "0.30-0.32.1, 0.33"


def program_with(*facts):
    data = copy.deepcopy(FACTS)
    program = data["programs"][-1]
    program["facts"] = [*program.get("facts", ()), *facts]
    return data


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([{"yarn": {"is": "same"}}, {"linear": {"is": "error", "why": "x"}}], "two facts about"),
        ([{"yarn": {"is": "ignored", "why": "x", "evidnce": "y"}}], "unknown"),
    ],
)
def test_no_fact_about_a_program_vanishes(cells, said):
    facts = [{"families": ["llama"], "cells": each} for each in cells]
    with pytest.raises(make_loaders.Refused, match=said):
        make_loaders.merge(program_with(*facts), MEASURED)


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ("serve_directories", {"announces": {"linear": "orignal length"}}),
        ("serve_directories", {"reading": "nobody"}),
        ("serve_files", {"loader": "nobody"}),
    ],
)
def test_a_serve_line_must_name_a_known_engine_and_key(row, more):
    data = copy.deepcopy(FACTS)
    data[row][0] |= more
    with pytest.raises(make_loaders.Refused, match=r"nobody|orignal"):
        make_loaders.merge(data, MEASURED)
