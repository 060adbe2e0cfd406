"""What the fuzzer and the attacks found, each by itself."""

import copy
import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from configs import LLAMA
from fuzz import campaign, seeds

import ropext
from ropext import families, planning
from ropext.base.errors import InputError, NotExpressible, RopextError, UsageError
from ropext.base.inputs import read_text
from ropext.cli.output import as_json, visible
from ropext.files import inspecting
from ropext.files.checkpoint.card import BEGIN, END, Card, render
from ropext.files.checkpoint.provenance import lineage, read_record
from ropext.options.extend import parse_extend
from ropext.results.model_index import card_figures
from ropext.scaling import METHODS, forms
from ropext.verifying import verification
from ropext.verifying.verification import repair, verify

SMALL = seeds.SMALL_LLAMA


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "base"
    directory.mkdir()
    for name, content in seeds.good_files().items():
        (directory / name).write_bytes(content)
    return directory


def plan(config, **options):
    made = planning.make_plan(config, parse_extend(options))
    again = families.read(json.loads(json.dumps(made.config, allow_nan=False)))
    assert forms.same(again.scaled_sites[0].rope.spectrum, made.main.wanted)
    return made


@pytest.mark.parametrize("key", ["a\nb", "\x1b[2J", "\ud800", "x" * 300])
def test_keys_that_do_not_print_are_quoted_in_sentences(key):
    nested = {"rope_scaling": {key: {"factor": "x"}}}
    with pytest.raises(InputError, match="is nested") as caught:
        families.read(SMALL | nested)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    for problem in families.check_spellings(
        SMALL | {"rope_parameters": {"a": 1, key: {"factor": 4}}}
    ):
        assert problem.sentence.isprintable()
    with pytest.raises(InputError) as caught:
        families.read(SMALL | {"model_type": key})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_terminal_is_shown_no_control_character():
    assert visible("a\x1b[31m\u202eb\ud800\n\tc é") == "a\\x1b[31m\\u202eb\\ud800\n\tc é"
    data = {"k\x9b": ["\ud800", math.inf, "é"]}
    printed = as_json(data)
    assert printed.replace("\n", "").isprintable()
    assert json.loads(printed) == {"k\x9b": ["\ud800", None, "é"]}
    assert "é" in as_json({"k": "é"})


def test_two_sets_of_factors_survive_the_record(checkpoint, tmp_path):
    factors = {"long_factor": [1.5] * 16, "short_factor": [1.1] * 16}
    (tmp_path / "factors.json").write_text(json.dumps(factors))
    done = ropext.extend(
        str(checkpoint),
        tmp_path / "out",
        no_verify=True,
        method="longrope",
        factor=4.0,
        pair_factors=str(tmp_path / "factors.json"),
    )
    record = read_record(tmp_path / "out")
    assert record is not None
    assert record.sites[0].wanted == done.plan.main.wanted
    assert record.sites[0].wanted.short_context == 2048


@pytest.mark.parametrize(
    ("key", "value"), [("context", 0), ("target", 0), ("context", 10**400), ("target", 2**63)]
)
def test_a_record_with_an_impossible_length_is_damaged(checkpoint, key, value):
    content = copy.deepcopy(seeds.records()[0]) | {key: value}
    (checkpoint / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"damaged: {key}"):
        verify(checkpoint)


DAMAGE = {
    "inv_freq": ["x", None, [1, "a"], {"a": 1}, [10**400], [True]],
    "attention_factor": ["x", None, [1.0], 10**400, True],
    "factor": ["x", None, {"a": 1}, 10**400],
    "rope": ["x", None, [1], {"rope_type": 3}],
    "label": [None, 3, ["full_attention"]],
    "scaled": [1, "yes"],
    "context": [0, -1],
    "target": [0, 10**400],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(k, v) for k, values in DAMAGE.items() for v in values],
    ids=lambda v: str(v)[:20],
)
def test_a_damaged_plan_is_reported(checkpoint, tmp_path, monkeypatch, key, value):
    made = inspecting.plan(str(checkpoint), factor=4.0).to_json()
    made["sites"][0][key] = value
    made[key] = value
    (tmp_path / "plan.json").write_text(json.dumps(made))
    monkeypatch.setattr(
        "ropext.verifying.proof.build", lambda *a, **k: pytest.fail("not worth a build")
    )
    with pytest.raises(InputError, match="damaged"):
        verify(checkpoint, against=str(tmp_path / "plan.json"))


def test_a_theta_that_float32_cannot_hold_is_not_written():
    """Stock raises theta to a power in float32; ntk on a dim of 4 squares the factor."""
    tiny = SMALL | {"head_dim": 4, "rope_theta": 9e29}
    made = plan(tiny, method="ntk", factor=4096.0)
    assert made.main.params["rope_type"] == "longrope"
    with pytest.raises(UsageError, match="below 1e"):
        plan(SMALL, method="abf", factor=4.0, theta=1e300)


def test_heads_of_a_million_channels_are_refused():
    """450 bytes of config would make every method compute half a million pairs."""
    with pytest.raises(InputError, match="even number of 2 to 8192"):
        families.read(SMALL | {"head_dim": 10**6})
    assert families.read(SMALL | {"head_dim": 8192}).sites[0].rope.dim == 8192


def test_a_whole_number_that_rounds_up_to_the_bound_is_refused():
    with pytest.raises(InputError, match="below 1e"):
        families.read(SMALL | {"rope_theta": 10**30})


def test_a_temperature_over_a_large_theta_reads_back():
    """The ramp that is moved beyond the last pair has ends near 1/theta^2."""
    made = plan(SMALL | {"rope_theta": 1e12}, method="ntk", factor=4096.0, attention_factor=1.25)
    assert made.main.params["rope_type"] == "yarn"
    assert made.main.params["beta_slow"] < 1e-12


def test_a_channel_that_never_turns_is_written_into_the_record(checkpoint, tmp_path):
    """LFM3 turns half of its channels; composed, the others have factors of infinity."""
    text = next(c for c in seeds.rotary_configs() if c["model_type"] == "lfm3")
    (checkpoint / "config.json").write_text(json.dumps(text))
    done = ropext.extend(
        str(checkpoint), tmp_path / "out", no_verify=True, method="yarn", factor=4, even_so=True
    )
    assert math.inf in done.plan.main.params["long_factor"]
    record = read_record(tmp_path / "out")
    assert record is not None
    assert {"__float__": "Infinity"} in next(s for s in record.sites if s.scaled).params[
        "long_factor"
    ]


def test_the_theta_that_a_composite_hides_is_a_conflict():
    """GLM-ASR's config class fills in a whole rope dict, which hides a top-level theta."""
    text = {k: v for k, v in SMALL.items() if k != "rope_theta"}
    glm = {"model_type": "glmasr", "text_config": text}
    assert families.read(glm).sites[0].rope.theta == 10000.0
    text["rope_theta"] = 12345.0
    with pytest.raises(InputError, match="12345"):
        families.read(glm)
    text["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert families.read(glm).sites[0].rope.theta == 12345.0


def check_told_on_one_line(text):
    """Check that the forgery is printed, and begins no line."""
    assert "license      free" in text
    assert not [line for line in text.splitlines() if line.startswith("license")]


def test_a_line_cannot_be_forged_by_the_name_of_a_layer(checkpoint):
    from ropext.results.report import text

    config = SMALL | {"layer_types": ["full\nlicense      free", "full_attention"]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    seen = inspecting.inspect(str(checkpoint))
    told = text.inspection_text(seen)
    check_told_on_one_line(told)
    scaled = {"type": "linear", "factor": 2.0, "a\nlicense      free": 1}
    (checkpoint / "config.json").write_text(json.dumps(SMALL | {"rope_scaling": scaled}))
    shown = text.plan_details(
        inspecting.plan(str(checkpoint), factor=4.0, method="pi", context=2048)
    )
    check_told_on_one_line(shown)


def test_a_line_cannot_be_forged_by_a_limit(checkpoint):
    from ropext.results.report import text

    (checkpoint / "generation_config.json").write_text('{"max_length": "1\\nlicense      free"}')
    seen = inspecting.inspect(str(checkpoint))
    told = text.inspection_text(seen)
    check_told_on_one_line(told)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3n_text", "olmo3"])
def test_a_type_that_transformers_5_does_not_see_is_refused(kind):
    """It lays rope_scaling over a dict whose rope_type is "default"; transformers 4 read `type`."""
    from transformers import CONFIG_MAPPING

    scaled = {"type": "yarn", "factor": 4.0}
    stock = CONFIG_MAPPING[kind](rope_scaling=dict(scaled))
    assert stock.rope_parameters["full_attention"]["rope_type"] == "default"
    config = SMALL | {"model_type": kind, "num_hidden_layers": 8, "rope_scaling": scaled}
    with pytest.raises(InputError, match="write rope_type"):
        families.read(config)
    named = config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    types = {site.label: site.params["rope_type"] for site in families.read(named).sites}
    assert types["full_attention"] == "yarn"


CORNERS = [
    {"head_dim": 2},
    {"head_dim": 4},
    {"rope_theta": 1.0000001},
    {"rope_theta": 1e12},
    {"rope_theta": 9e29},
    {"max_position_embeddings": 1},
    {"max_position_embeddings": 2},
    {"max_position_embeddings": 3},
    {"max_position_embeddings": 524288},
]
REQUESTS = [{"factor": 1.0001}, {"factor": 4096.0}, {"factor": 3.7}, {"target": 2**31 - 1}]


@pytest.mark.parametrize("corner", CORNERS, ids=str)
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_corners_are_exact_or_refused(corner, request_):
    planned = 0
    for method in (row.name for row in METHODS.values() if not row.needs):
        for extra in ({}, {"attention_factor": 1.5}):
            try:
                made = plan(SMALL | corner, method=method, **request_, **extra)
            except RopextError:
                continue
            planned += 1
            spectrum = made.main.wanted
            assert all(0 < f < math.inf for f in spectrum.inv_freq)
            json.loads(as_json(made.to_json()), parse_constant=pytest.fail)
    context = corner.get("max_position_embeddings", 2048)
    target = request_.get("target", context * request_.get("factor", 1))
    possible = target <= min(4096 * context, 2**31 - 1)
    assert bool(planned) == possible


@pytest.mark.parametrize("head_dim", [1, 3, 5, 63])
def test_odd_dims_are_refused(head_dim):
    with pytest.raises(InputError, match="even number"):
        families.read(SMALL | {"head_dim": head_dim})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"factor": "4"}, "--factor must be a number, was '4'"),
        ({"factor": True}, "--factor must be a number"),
        ({"target": 8192.5}, "--target must be a whole number"),
        ({"target": "x" * 5000}, "--target '" + "x" * 60 + "' is not a number of tokens"),
        ({"method": ["yarn"]}, "--method must be a text"),
        ({"method": "x" * 5000}, "is not a method"),
        ({"even_so": 1}, "--even-so must be true or false"),
        ({"for_loaders": 3}, "--for must be a list"),
        ({"method": "longrope", "pair_factors": [1, "a"]}, "--pair-factors must be a number"),
        ({"context": 10**300}, "--context must be"),
        ({"theta": 10**400, "method": "abf", "factor": 2}, "--theta"),
        ({"__class__": "x"}, "unknown option"),
        ({"!!python/object": "os.system"}, "unknown option"),
    ],
)
def test_recipes_of_the_wrong_types_are_refused(options, words):
    with pytest.raises((UsageError, InputError)) as caught:
        planning.make_plan(LLAMA, parse_extend(options))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_whole_numbers_may_be_written_as_floats():
    assert parse_extend({"target": 8192.0, "factor": None}).target == 8192
    assert parse_extend({"factor": 4}).factor == 4.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        '{"pair_factors": "os.system"}',
        '{"__class__": "x", "long_factor": {"a": 1}}',
        "!!python/object/apply:os.system [x]",
        "[1" + "0" * 400 + "]",
        "x" * 100_000,
        "[" * 100_000,
    ],
)
def test_factor_files_hold_numbers_and_nothing_else(tmp_path, text):
    (tmp_path / "f").write_text(text)
    with pytest.raises(InputError) as caught:
        parse_extend({"pair_factors": str(tmp_path / "f")}, read_text)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    assert str(caught.value).isprintable()


def test_a_nested_stranger_in_a_rope_dict_is_kept():
    config = SMALL | {"rope_scaling": {"type": "default", "other": {"a": 1}}}
    made = plan(config, method="ntk", factor=4.0)
    assert made.config["rope_scaling"]["other"] == {"a": 1}


def test_an_original_of_one_token_is_no_longrope():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1}
    assert families.read(SMALL | {"rope_scaling": yarn}).context
    longrope = yarn | {"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16}
    with pytest.raises(InputError, match="at least 2"):
        families.read(SMALL | {"rope_scaling": longrope})


def test_a_plan_of_other_peoples_text_is_shown_safely(checkpoint):
    from ropext.results.report import text

    config = SMALL | {
        "layer_types": ["\x1b]0;x\x07"] * 2,
        "quantization_config": {"quant_method": "\x1b"},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    seen = inspecting.inspect(str(checkpoint))
    assert "\x1b" not in visible(text.inspection_text(seen))
    assert replace(seen, target=5).to_json()["target"] == 5


def test_a_class_that_takes_plain_rope_alone_is_given_a_theta():
    """Cosmos 3 Edge's validator refuses every other type."""
    config = {"model_type": "cosmos3_edge_text", "hidden_size": 128, "num_attention_heads": 4}
    assert families.read(config).forms == ("default",)
    assert plan(config, method="ntk", factor=4.0).main.params["rope_type"] == "default"
    with pytest.raises(NotExpressible, match="ntk"):
        planning.make_plan(config, parse_extend({"method": "yarn", "factor": 4.0}))


@pytest.mark.slow
def test_sinusoids_that_are_added_are_no_rotary_embedding():
    """Voxtral Realtime embeds times with a buffer of the same name, and keeps no config there."""
    from torch import nn, zeros

    from ropext.verifying.proof.child import rotary_numbers

    class TimeEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", zeros(4))

    class VisionlessRotaryEmbedding(TimeEmbedding):
        pass

    modules = [("time_embedding", TimeEmbedding()), ("rotary_emb", VisionlessRotaryEmbedding())]
    assert [found["module"] for found in rotary_numbers(modules)] == ["rotary_emb"]


class ListsOneModel(BaseHTTPRequestHandler):
    """A server that is there."""

    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "attacker/evil-kernel"},
        {"transformers_weights": "zz.safetensors"},
        {"vision_config": {"model_args": {"checkpoint_path": "/x"}}},
    ],
)
def test_a_saved_plan_asks_no_more_of_stock_than_a_config_may(
    checkpoint, tmp_path, monkeypatch, asked
):
    """The key is one of its edits, so the config before them is the model's."""
    monkeypatch.setattr(verification, "require_server", lambda url: None)
    made = inspecting.plan(str(checkpoint), factor=4.0).to_json()
    made["config"] |= asked
    made["edits"] += [{"key": key, "after": value} for key, value in asked.items()]
    (tmp_path / "plan.json").write_text(json.dumps(made))
    with HTTPServer(("127.0.0.1", 0), ListsOneModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(InputError, match="remove the key"):
            verify(tmp_path / "plan.json", endpoint=url)
        server.shutdown()
    made["config"] = dict(SMALL)
    made["edits"] = [{"key": key, "before": value} for key, value in asked.items()]
    (tmp_path / "plan.json").write_text(json.dumps(made))
    with pytest.raises(InputError, match="remove the key"):  # the base by its edits
        verify(checkpoint, against=str(tmp_path / "plan.json"))


def test_marks_without_an_end_are_looked_for_once():
    """A megabyte of them took hours by a regular expression."""
    card = Card(title="x", base="y", base_is_hub_id=False, summary=())
    with campaign.guarded():
        assert BEGIN * 2 in render(card, BEGIN * 40_000)
        assert BEGIN * 2 not in render(card, (BEGIN + END) * 20_000)
    both = f"a\n{BEGIN}b{END}\n\nc\n{BEGIN}{BEGIN}d{END}e\n{BEGIN}"
    assert render(card, both).endswith(f"\na\nc\ne\n{BEGIN}\n")
    assert "b<!--" not in render(card, both)


@pytest.mark.parametrize("damage", [{"base": {"extended": "pi"}}, {"edits": [{}]}])
def test_an_altered_record_is_one_sentence_of_every_command(checkpoint, damage):
    """It was a traceback of some, and passed over in silence by others."""
    content = copy.deepcopy(seeds.records()[0])
    content["base"] |= damage.get("base", {})
    (checkpoint / "ropext.json").write_text(
        json.dumps(content | damage | {"base": content["base"]})
    )
    for command in (
        lambda: inspecting.inspect(checkpoint),
        lambda: inspecting.plan(checkpoint, factor=2.0),
        lambda: inspecting.plan(checkpoint, factor=2.0, from_original=True),
        lambda: inspecting.read_unchanged(inspecting.open_model(checkpoint)),
        lambda: ropext.extend(checkpoint, checkpoint.parent / "out", factor=2.0, no_verify=True),
        lambda: verify(checkpoint),
    ):
        with pytest.raises(InputError, match=r"ropext\.json is damaged"):
            command()


def test_a_line_cannot_be_forged_by_a_method_of_a_record(checkpoint):
    """Found by the campaign of 27 November: in a warning of a plan."""
    content = copy.deepcopy(seeds.chained(SMALL))
    content["base"]["extended"]["method"] = "a\nlicense      free"
    (checkpoint / "config.json").write_text(json.dumps(content["base"]["config"]))
    (checkpoint / "ropext.json").write_text(json.dumps(content))
    made = inspecting.plan(str(checkpoint), factor=2.0)
    assert any("license" in warning for warning in made.warnings)
    assert all(warning.isprintable() for warning in made.warnings)
    campaign.check_text(campaign.text.inspection_text(inspecting.inspect(str(checkpoint))))


@pytest.mark.parametrize("schema", ["a\nforged line", "\x1b[31m", "\ud800", "x" * 3000, [None] * 9])
def test_a_schema_that_does_not_print_is_quoted(checkpoint, schema):
    """Found by the campaign of 28 November: a line break in a record's schema."""
    content = seeds.records()[0] | {"schema": schema}
    (checkpoint / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="has schema ") as caught:
        read_record(checkpoint)
    campaign.check_sentence(str(caught.value))


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"evaluation": {"variants": []}}},
        {"run": {"evaluation": {"variants": {"a": 1}, "tail_tokens": 4}}},
        {"run": {"evaluation": {"variants": {"a": {"metrics": []}}}}},
        {"finetune": {"numbers": {"tuned": {}}, "overlap": {"documents": "x"}}},
        {"finetune": {"numbers": {"tuned": {"tail@64": {"value": "x"}}}}},
    ],
)
def test_numbers_of_an_altered_record_are_one_sentence(checkpoint, sections):
    """Of `push`, which puts them on the card."""
    content = seeds.records()[0] | sections
    (checkpoint / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="damaged"):
        card_figures(checkpoint)


@pytest.mark.parametrize("value", ["x", {"a": 1}, [1], ["x"]])
def test_a_rope_dict_of_an_altered_record_is_one_sentence(checkpoint, value):
    """Of `verify --fix`, which writes from it."""
    content = copy.deepcopy(seeds.records()[0])
    for key in content["sites"][0]["params"]:
        if key != "rope_type":
            content["sites"][0]["params"][key] = value
    (checkpoint / "ropext.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="damaged: ropext does not write such a rope dict"):
        repair(checkpoint)


def test_a_null_that_an_extension_takes_away_is_no_size():
    """Found by a fuzzed config: the plan's override asked for the key that is gone."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    thetas = {"local_rope_theta": 4321.0, "global_rope_theta": 12345.0, "rope_scaling": None}
    config = {"model_type": "modernbert-decoder", "max_position_embeddings": 1} | sizes | thetas
    made = plan(config, method="dynamic", factor=4.0)
    for line in made.overrides():
        assert "rope_scaling" not in (line.hf_overrides or {})


def test_the_record_of_the_deepest_allowed_config_is_read(checkpoint):
    deepest = 1
    for _ in range(63):
        deepest = {"deeper": deepest}
    (checkpoint / "config.json").write_text(json.dumps(SMALL | {"model_max_length": deepest}))
    once, twice = checkpoint.parent / "once", checkpoint.parent / "twice"
    ropext.extend(str(checkpoint), once, factor=2, no_verify=True)
    ropext.extend(str(once), twice, factor=4, again=True, no_verify=True)
    assert read_record(once) is not None
    assert len(lineage(read_record(twice))) == 2
