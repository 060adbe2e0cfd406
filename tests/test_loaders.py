"""The lookups of the loader table, and the possible values of a cell; measurements decide its
verdict."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import configs
import figures
import kit
import make_loaders
import pytest
from bases import FAMILIES as KIT
from bases import SIZES, keys_of

from ropext import families
from ropext.base.errors import NotExpressible, NotMeasured, UsageError
from ropext.families import loaders
from ropext.families.loaders import lookup, table
from ropext.families.loaders.table import span_of
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.planning.carrier import Carrier
from ropext.scaling.forms import Params
from scripts import make_tables

VERDICTS = {"same", "different", "ignored", "error", "not measured"}
ORIGINAL, FACTOR = 4096, 4.0
YARN_DEFAULT = 0.1 * math.log(4) + 1
LENGTHS = {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "rope_theta": 5e4}
UP = [1.0, 1.5, 2.0, 4.0]
LONGROPE = {"rope_type": "longrope", **LENGTHS, "short_factor": UP, "long_factor": UP}
DEFAULT_MSCALE = math.sqrt(1 + math.log(4) / math.log(ORIGINAL))
YARN = {"rope_type": "yarn", **LENGTHS}
DICTS = {
    "theta": {"rope_type": "default", "rope_theta": 2e5},
    "linear": {"rope_type": "linear", "rope_theta": 5e4, "factor": FACTOR},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5e4, "factor": FACTOR},
    "yarn": YARN,
    "yarn-custom": YARN
    | {
        "attention_factor": 1.0,
        "attn_factor": 1 / YARN_DEFAULT,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "longrope": LONGROPE | {"attention_factor": DEFAULT_MSCALE},
    "longrope-two-sets": LONGROPE | {"attention_factor": DEFAULT_MSCALE, "short_factor": [1.0] * 4},
    "longrope-custom": LONGROPE
    | {"attention_factor": 1.23, "short_mscale": 1.23, "long_mscale": 1.23},
    "llama3": {
        "rope_type": "llama3",
        **LENGTHS,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "v5-only": {"rope_type": "default", "rope_theta": 2e5},
}


def reading(loader: str, version: str, family: str, params: dict, **facts: object):
    name = f"{loader}=={version}" if version else loader
    (reader,) = loaders.select(name)
    listed = loaders.readers_for(family, facts.get("model_type"))
    rows = zip(loaders.readings(family, params, **facts), listed, strict=True)
    (found,) = [row for row, one in rows if one is reader]
    return found


@pytest.mark.parametrize("kind", sorted(set(DICTS) - {"v5-only"}))
def test_a_rope_dict_is_recognised_by_its_keys(kind: str):
    assert loaders.kinds_of(DICTS[kind])[0] == kind


def test_a_bare_rope_parameters_is_read_by_version_5_alone():
    for version, verdict in (("4.57", "different"), ("5.23", "same")):
        found = reading("transformers", version, "llama", DICTS["v5-only"], v5_only=True)
        assert found.verdict == verdict
    plain = reading("transformers", "4.57", "llama", DICTS["v5-only"])
    assert plain.verdict == "same"


def test_each_kind_has_a_cell_and_each_cell_a_known_kind():
    used = {k for r in loaders.readers() for cells in r.families.values() for k in cells}
    assert used == set(table.loader_table()["kinds"])
    for reader in loaders.readers():
        for cells in reader.families.values():
            for cell in cells.values():
                assert cell.verdict in VERDICTS
                assert cell.verdict == "same" or cell.why, "a difference says what it is"


@pytest.mark.parametrize("kind", ["theta", "yarn", "llama3", "longrope"])
def test_no_cell_for_a_family_that_was_not_run(kind: str):
    """Mixtral reads like Llama in the source of most loaders, built by transformers alone."""
    verdicts = {(r.loader, r.versions): r.verdict for r in loaders.readings("olmoe", DICTS[kind])}
    assert verdicts.pop(("transformers", "5.23")) == "same"
    assert verdicts.pop(("transformers", "4.51.3 and 4.57.6")) == "same"
    assert set(verdicts.values()) == {"not measured"}


def test_a_composite_is_not_measured_outside_transformers():
    rows = loaders.readings("llama", DICTS["yarn"], model_type="llava")
    assert rows[0].verdict == "same"
    assert {r.verdict for r in rows[1:]} == {"not measured"}


def test_a_measured_composite_has_its_own_cells():
    """Gemma 3 with its vision tower was read; another composite around the same text was not."""
    own = {"model_type": "gemma3"}
    assert reading("llama.cpp", "", "gemma3_text", DICTS["yarn"], **own).verdict == "same"
    assert reading("llama.cpp", "", "gemma3_text", DICTS["llama3"], **own).verdict == "ignored"
    other = {"model_type": "shieldgemma2"}
    found = reading("llama.cpp", "", "gemma3_text", DICTS["yarn"], **other)
    assert found.verdict == "not measured"
    found = reading("mlx", "", "gpt_oss", DICTS["yarn"])
    assert found.verdict == "not measured"
    assert "could not be run: " in found.why


def test_partial_reads_and_runs_are_reported_as_partial():
    for loader, family, kind in (("llama.cpp", "qwen3", "dynamic"), ("trt-llm", "llama", "yarn")):
        found = reading(loader, "", family, DICTS[kind])
        assert found.evidence == "source"
        assert "not run" in found.why
    assert reading("llama.cpp", "", "qwen2", DICTS["yarn"]).evidence == "engine"
    built = reading("transformers", "4.57", "olmoe", DICTS["yarn"])
    assert built.evidence == "function"
    assert "not the engine" in built.why


def test_the_helper_keys_decide_if_a_loader_reads_nothing_else():
    """Other people's dicts without attn_factor or short_mscale lose the attention factor there."""
    bare = {k: v for k, v in DICTS["yarn-custom"].items() if k != "attn_factor"}
    for loader, version in (("vllm", "0.11"), ("sglang", "0.5.23")):
        assert reading(loader, version, "llama", bare).verdict == "different"
    assert reading("vllm", "0.33", "llama", bare).verdict == "same"
    bare = {k: v for k, v in DICTS["longrope-custom"].items() if "mscale" not in k}
    for loader, version in (("vllm", "0.33"), ("sglang", "0.5.23")):
        assert reading(loader, version, "llama", bare).verdict == "different"
    assert reading("transformers", "5.23", "llama", bare).verdict == "same"


def test_an_attn_factor_alone_is_read_by_those_loaders_and_by_no_transformers():
    """DeepSeek's distilled models carry attn_factor without attention_factor."""
    params = DICTS["yarn"] | {"attn_factor": 0.878}
    assert loaders.kinds_of(params)[0] == "yarn"
    assert reading("vllm", "0.11", "llama", params).verdict == "different"
    assert reading("transformers", "5.23", "llama", params).verdict == "same"


def test_a_theta_of_gemma_4_is_a_theta():
    """Its full layers stay proportional; vLLM and SGLang lose the factor of those alone."""
    params = {"rope_type": "proportional", "rope_theta": 2e5, "partial_rotary_factor": 0.25}
    assert loaders.kinds_of(params | {"factor": 1.0}) == loaders.kinds_of(params) == ("theta",)
    for loader in ("vllm", "sglang"):
        own = {"model_type": "gemma4"}
        assert reading(loader, "", "gemma4_text", params, **own).verdict == "same"
        divided = params | {"factor": 4.0}
        assert reading(loader, "", "gemma4_text", divided, **own).verdict == "ignored"


def test_a_dict_of_two_kinds_takes_the_worse_verdict():
    both = DICTS["longrope-custom"] | {"short_factor": [1.0] * 4}
    assert set(loaders.kinds_of(both)) == {"longrope-two-sets", "longrope-custom"}
    assert reading("tgi", "", "llama", both).verdict == "different"
    assert reading("llama.cpp", "", "llama", both).verdict == "ignored"
    scaled = reading("llama.cpp", "", "llama", DICTS["longrope"], v5_only=True)
    assert scaled.verdict == "ignored", "reading rope_parameters does not carry a longrope"


def test_engines_read_a_length_left_at_the_original_by_their_version():
    at = {"length": ORIGINAL}
    verdicts = {
        ("transformers", "4.46"): "same",
        ("transformers", "4.57"): "different",
        ("transformers", "5.23"): "same",
        ("vllm", "0.11"): "same",
        ("vllm", "0.33"): "error",
        ("sglang", "0.5.23"): "different",
        ("exllamav3", ""): "ignored",
    }
    for (loader, version), verdict in verdicts.items():
        assert reading(loader, version, "llama", YARN, **at).verdict == verdict
    assert reading("vllm", "0.33", "llama", YARN, length=4 * ORIGINAL).verdict == "same"
    bare = {k: v for k, v in YARN.items() if "original" not in k}
    assert reading("llama.cpp", "", "llama", bare).verdict == "error"
    assert reading("mlx", "", "llama", bare).verdict == "different"


def test_flags_are_filled_in():
    linear = reading("vllm", "0.33", "llama", DICTS["linear"], target=16384)
    assert linear.flag == "--max-model-len 16384"
    assert reading("vllm", "0.33", "llama", YARN, target=16384).flag == ""
    gguf = reading("llama.cpp", "", "llama", DICTS["yarn-custom"])
    # 1/(0.1 ln 4 + 1) = 0.87825
    assert gguf.flag == (
        "--yarn-beta-fast 16 --yarn-beta-slow 2 "
        "--override-kv llama.rope.scaling.attn_factor=float:0.8782489"
    )


def test_a_family_whose_length_is_right_needs_no_flag():
    """Gemma 3 with linear announces its target in vLLM and SGLang; a Llama does not."""
    for loader, flag in (("vllm", "--max-model-len TARGET"), ("sglang", "--context-length TARGET")):
        assert reading(loader, "", "gemma3_text", DICTS["linear"]).flag == ""
        assert reading(loader, "", "qwen3", DICTS["linear"]).flag == flag
        lines = serving(
            served("out", "gemma3_text"),
            DICTS["linear"],
            context=1024,
            target=4096,
        )
        (mine,) = [line for line in lines if line.loader == loader]
        assert "is needed" not in mine.note


def are_exact(names, family, params, *, even_so=False, model_type=None):
    """Return what a plan for a model of this family decides about the loaders of --for."""
    llama = families.read(configs.LLAMA)
    model = replace(llama, text_type=family, model_type=model_type or family)
    site = replace(model.scaled_sites[0], params=params)
    return Carrier(model).are_exact(names, site, even_so=even_so)


def test_a_plan_is_exact_if_every_named_engine_reads_it_so():
    assert are_exact((), "llama", YARN)
    assert are_exact(("vllm", "llama.cpp"), "llama", YARN)
    assert not are_exact(("vllm", "llama.cpp"), "llama", DICTS["longrope"])
    assert not are_exact(("llama.cpp",), "llama", DICTS["longrope"], even_so=True)
    assert not are_exact(("vllm",), "olmoe", YARN)
    assert are_exact(("vllm",), "olmoe", YARN, even_so=True)
    assert not are_exact(("vllm",), "llama", YARN, model_type="llava")
    assert not are_exact(("transformers", "transformers==4.44"), "llama", YARN)


def test_measured_outcomes_have_the_shape_of_the_table():
    engines = json.loads(make_loaders.MEASURED.read_text("utf-8"))
    columns = {f"{reader.loader} {reader.versions}" for reader in loaders.readers()}
    assert engines.keys() <= columns
    for name, column in engines.items():
        by_function = name.startswith(("sglang", "exllamav3"))
        assert column["evidence"] == ("function" if by_function else "engine")
        seen = [family for group in column["groups"] for family in group["families"]]
        assert len(seen) == len(set(seen)) >= (5 if name.startswith("ctranslate2") else 12)
        assert not set(seen) & column["failed"].keys()
        for group in column["groups"]:
            for kind, cell in group["cells"].items():
                assert kind in table.loader_table()["kinds"]
                verdict, why = (
                    (cell, "") if isinstance(cell, str) else (cell["is"], cell.get("why"))
                )
                assert verdict in VERDICTS
                assert verdict == "same" or why


# gemma2, stablelm, gpt_neox: llama.cpp's converter drops theta; ministral3: vLLM does not scale the
# queries; gemma3n_text, exaone4_5: llama.cpp does not take a small one.
NO_COMMON_FORM = {"gemma2", "stablelm", "gpt_neox", "ministral3", "mistral3", "gemma3n_text"}
NO_COMMON_FORM |= {"exaone4_5"}


def test_most_cells_are_measured_by_engines_or_functions():
    found = figures.cells()
    known = {key: row for key, row in found.items() if figures.measured(row)}
    assert len(known) >= 0.9 * len(found)
    for loader, least in (("vllm", 12), ("llama.cpp", 10)):
        ran = {
            f for (name, f, _), row in known.items() if (name, row.evidence) == (loader, "engine")
        }
        assert len(ran) >= least


@pytest.mark.parametrize("family", list(KIT))
def test_for_vllm_and_llama_cpp_answers_for_each_family(family: str):
    """A form that both read exactly, or a measured reason why none does."""
    plain = {"model_type": family} | keys_of(family, SIZES, {})
    names = ("vllm", "llama.cpp")
    wish = Extend(factor=4, for_loaders=names)
    if family in NO_COMMON_FORM:
        with pytest.raises(NotExpressible, match=r"vllm|llama\.cpp") as refused:
            make_plan(plain, wish)
        assert "--method yarn cannot" not in str(refused.value), "nobody asked for a yarn"
        return
    plan = make_plan(plain, wish)
    model = families.read(plan.config)
    params = model.scaled_sites[0].params
    kinds = {"model_type": model.model_type, "length": model.stated_context}
    rows = {r.loader: r for r in reversed(loaders.readings(model.text_type, params, **kinds))}
    assert {rows[name].verdict for name in names} == {"same"}


def test_a_refusal_names_the_requested_form(monkeypatch):
    """Where a yarn is known to be misread, nobody asks how a longrope in its place is read."""
    (mlx,) = loaders.select("mlx")
    cells = {"yarn": table.TableCell("different", "by a ramp of its own")}
    old = replace(mlx, versions="0.31", spans=(span_of("0.31"),), families={"qwen3": cells})
    monkeypatch.setattr(lookup, "readers", lambda: (mlx, old))
    plain = {"model_type": "qwen3"} | keys_of("qwen3", SIZES, {})
    with pytest.raises(NotExpressible) as refused:
        make_plan(plain, Extend(factor=4, method="yarn", for_loaders=("mlx==0.31",)))
    said = str(refused.value)
    assert "mlx 0.31 reads yarn scaling in qwen3 otherwise (different: by a ramp of its own" in said
    assert "--even-so writes longrope scaling instead, which was not measured there" in said
    assert "how mlx==0.31 reads longrope" not in said


def test_gpt_oss_in_vllm_hangs_on_written_betas():
    plain = {"model_type": "gpt_oss"} | keys_of("gpt_oss", SIZES, {})
    params = families.read(kit.extended(plain, "yarn")).scaled_sites[0].params
    assert {"beta_fast", "beta_slow"} <= params.keys()
    bare = {key: value for key, value in params.items() if "beta" not in key}
    found = reading("vllm", "", "gpt_oss", bare)
    assert (found.verdict, "default or not" in found.why) == ("error", True)


def test_parse_for_reads_names_with_and_without_versions():
    assert loaders.parse_for(" vllm, llama.cpp,vllm ") == ("vllm", "llama.cpp")
    assert loaders.parse_for("transformers4,mlx-lm,vllm==0.11.0") == (
        "transformers4",
        "mlx-lm",
        "vllm==0.11.0",
    )
    assert loaders.select("transformers4")[0].versions == "4.51-4.57"
    assert loaders.select("transformers==4.57.6")[0].versions == "4.51-4.57"
    assert loaders.select("transformers")[0].versions == "5.0-5.23"
    with pytest.raises(UsageError, match="did you mean vllm"):
        loaders.parse_for("vlm")
    for name in ("vllm==0.10", "transformers==4.58", "transformers==4.35.9", "transformers==5.24"):
        with pytest.raises(NotMeasured, match="not measured; measured are"):
            loaders.select(name)


def test_nearest_exact_gives_the_options_that_an_engine_reads():
    composed = DICTS["longrope-custom"]
    cold = LONGROPE | {"attention_factor": 1.0, "short_mscale": 1.0, "long_mscale": 1.0}
    near = loaders.nearest_exact
    assert near("llama.cpp", "llama", composed) == "--method yarn"
    assert (
        near("llama.cpp", "llama", cold, start="--from-original ")
        == "--from-original --method llama3"
    )
    # llama3 is ignored for Qwen 2 there.
    assert (
        near("llama.cpp", "qwen2", cold, start="--from-original ")
        == "--from-original --method yarn"
    )
    assert near("ctranslate2", "llama", composed) == "--method ntk"
    assert near("vllm", "olmoe", composed) == ""


def served(name: str, model_type: str) -> loaders.ServedDirectory:
    return loaders.ServedDirectory(name, families.read({"model_type": model_type}))


def serving(
    directory: loaders.ServedDirectory, params: Params, *, context: int, target: int
) -> tuple[loaders.Serving, ...]:
    """Return how to run a directory whose dict each engine reads as the table says."""
    known = loaders.readings(
        directory.model.text_type,
        params,
        model_type=directory.model.model_type,
        length=target,
        target=target,
    )
    return loaders.serving_lines(directory, known, params, context=context, target=target)


def lines(kind: str, family: str = "llama", **facts: object) -> dict[str, loaders.Serving]:
    given = {"context": ORIGINAL, "target": 16384} | facts
    out = serving(served("out/dir", family), DICTS[kind], **given)
    return {line.loader: line for line in out}


def test_serving_lines_of_a_yarn():
    found = lines("yarn")
    assert list(found) == ["transformers", "vllm", "sglang", "llama.cpp", "lm-eval"]
    assert found["vllm"].command == "vllm serve out/dir --max-model-len 16384"
    assert found["sglang"].command.endswith("--model-path out/dir --context-length 16384")
    assert found["llama.cpp"].command == (
        "python convert_hf_to_gguf.py out/dir --outfile dir.gguf\n"
        "llama-server -m dir.gguf -c 16384 -np 1"
    )
    assert "pretrained=out/dir,max_length=16384" in found["lm-eval"].command
    assert not any(line.note for line in found.values())


def test_serving_lines_name_the_servers_own_limit():
    assert "65536 tokens" in lines("linear")["vllm"].note
    assert "65536 tokens" in lines("linear")["sglang"].note
    assert "4096 tokens" in lines("longrope")["vllm"].note
    assert lines("longrope")["sglang"].note == ""


def test_serving_lines_give_a_sentence_if_a_loader_differs():
    gguf = lines("longrope")["llama.cpp"]
    assert "ropext extend dir.gguf --like out/dir" in gguf.command  # its converter ignores it
    gguf = lines("longrope", family="qwen2")["llama.cpp"]  # which has no divisors
    assert gguf.command == ""
    assert gguf.note.startswith("llama.cpp ignores the scaling")
    assert lines("longrope-custom")["sglang"].command
    (sglang,) = [
        line
        for line in serving(served("d", "gemma2"), YARN, context=ORIGINAL, target=16384)
        if line.loader == "sglang"
    ]
    assert sglang.command == ""
    assert sglang.note.startswith("sglang ignores the scaling")
    flags = lines("yarn-custom")["llama.cpp"].command
    assert "--yarn-beta-fast 16 --yarn-beta-slow 2" in flags


def test_serving_lines_name_unmeasured_engines():
    out = serving(served("d", "olmoe"), YARN, context=ORIGINAL, target=16384)
    (vllm,) = [line for line in out if line.loader == "vllm"]
    assert vllm.command
    assert "not measured" in vllm.note


def test_a_masked_model_is_served_by_transformers_alone():
    masked = served("my dir", "modernbert")
    (line,) = serving(masked, DICTS["theta"], context=1024, target=4096)
    assert line.command.endswith(
        """"from transformers import pipeline; pipe = pipeline('fill-mask', 'my dir')\""""
    )


NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def test_the_loaders_page_counts_the_engines_of_each_rope_type():
    page = (Path(__file__).parents[1] / "docs/loaders.md").read_text("utf-8")
    section = page.partition("## Which rope type most engines compute")[2]
    newest = {reader.loader: reader for reader in reversed(loaders.readers())}
    readers = {}
    for kind in set(DICTS) - {"v5-only"}:
        cells = [reader.families["llama"][kind] for reader in newest.values()]
        readers[kind] = NUMBERS[[cell.verdict for cell in cells].count("same")]
    assert readers["theta"] == NUMBERS[len(newest)]
    for row, kind in {
        "theta alone (`ntk`, `abf`, `dynamic`) | all": "theta",
        "linear |": "linear",
        "llama3 (`by-parts`, `llama3`) |": "llama3",
        "yarn with its default attention factor |": "yarn",
        "longrope with one set of factors |": "longrope",
        "yarn with a custom attention factor |": "yarn-custom",
        "longrope with a custom attention factor |": "longrope-custom",
    }.items():
        assert re.search(rf"^\| {re.escape(row)} {readers[kind]}\b", section, re.M), row


def test_the_rendered_table_equals_the_lookups():
    rendered = make_tables.loaders()
    row = next(line for line in rendered.splitlines() if line.startswith("| vllm 0.32-0.33 "))
    assert row.count("same") == 8
    assert row.count("**ignored**") == 1
    for kind in table.loader_table()["kinds"]:
        assert f"| `{kind}` |" in rendered
    assert "`<target>`" not in rendered
    assert "--max-model-len <target>" in rendered


def test_a_major_version_alone_names_all_of_it():
    """Whoever writes 5 means any 5.x that was measured."""
    assert [reader.versions for reader in lookup.select("transformers==5")] == ["5.0-5.23"]
    assert len(lookup.select("transformers==4")) == 3
    assert [reader.versions for reader in lookup.select("transformers==5.7.1")] == ["5.0-5.23"]
    for unknown in ("transformers==6", "transformers==5.24", "transformers==3"):
        with pytest.raises(NotMeasured, match="was not measured"):
            lookup.select(unknown)


def test_the_error_and_the_page_list_the_same_names():
    page = (Path(__file__).parents[1] / "docs/loaders.md").read_text("utf-8")
    told = page.partition("Names for `--for`:")[2].partition("A bare name")[0]
    listed = re.findall(r"`([^`]+)`", told.replace("(as `llama.cpp`)", ""))
    with pytest.raises(UsageError) as caught:
        lookup.select("nobody")
    assert str(caught.value).endswith(f"known are {', '.join(lookup.names_for())}")
    assert sorted(listed) == sorted(lookup.names_for())


def test_a_refusal_says_which_half_is_unknown():
    """gpt-oss in vLLM: its plain yarn was measured, a ramp without rounding in a Llama alone."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    said = lookup.unmeasured("vllm", "gpt_oss", rope | {"truncate": False})
    assert said.startswith("vllm 0.32-0.33: of gpt_oss, yarn with truncate: false was not run")
    assert "its plain yarn was (same)" in said
    said = lookup.unmeasured("vllm", "olmoe", rope)
    assert said == "vllm 0.32-0.33: olmoe was not run in it, of a llama it is read (same)"
    config = configs.LLAMA | {"model_type": "gpt_oss", "head_dim": 64}
    config |= {"rope_scaling": {**rope, "truncate": False}, "max_position_embeddings": 16384}
    wish = {"from_original": True, "factor": 8.0, "method": "yarn", "truncate": False}
    with pytest.raises(NotExpressible, match=r"\(vllm .*truncate: false was not run.*; --even-so"):
        make_plan(config, Extend(**wish, for_loaders=("vllm",)))
