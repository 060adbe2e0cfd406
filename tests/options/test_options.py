"""The values that a recipe accepts and refuses; each refusal names the flag."""

import json
import math

import pytest
import torch

from ropext.base.errors import InputError, UsageError
from ropext.options import endpoint, extend
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.options.extend import Extend
from ropext.options.fields import (
    CONTENT,
    DECISIONS,
    NEUTRAL,
    NUMBERS,
    Content,
    Role,
    Served,
    Stored,
    option_role,
    value_kind,
    wanted,
)
from ropext.options.training import Finetune, Fit
from ropext.options.verify import Reference
from ropext.scaling import longrope


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"factor": 4.0, "target": 8192}, ["--factor", "--target", "one"]),
        ({"attention_factor": 1.0, "temperature": 1.0}, ["--attention-factor", "--temperature"]),
        ({"attention_factor": 0.0}, ["--attention-factor", "above 0"]),
        ({"temperature": math.nan}, ["--temperature"]),
        ({"method": "yran"}, ["yran", "yarn"]),
        ({"method": "unheard-of-xq"}, ["known are", "longrope"]),
        ({"context": 0}, ["--context"]),
        ({"facter": 4}, ["facter", "factor"]),
    ],
)
def test_contradictions_are_refused_by_name(options, words):
    with pytest.raises(UsageError) as caught:
        extend.parse_extend(options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0, 0.0, math.nan, math.inf, 1e9])
def test_a_factor_must_be_above_one_and_finite(factor):
    with pytest.raises(UsageError, match=r"--factor must be (above 1|finite)"):
        extend.resolve_target(Extend(factor=factor), 4096)


def test_a_target_must_be_above_the_context():
    for target in (4096, 100, -1):
        with pytest.raises(UsageError, match="4096"):
            extend.resolve_target(Extend(target=target), 4096)
    assert extend.resolve_target(Extend(target=4097), 4096) == 4097


@pytest.mark.parametrize("given", [131072, 131072.0, "131072", "128k", "0.125M", " 128K "])
def test_a_length_option_takes_a_number_or_128k(given):
    assert Extend(target=given, context=given).target == 128 * 1024
    fit = Fit(target=131072, strategy="pose", window=given, batch_tokens=given)
    assert fit.window == fit.batch_tokens == 128 * 1024


COUNTS = [
    (kind, name)
    for kind in (Extend, Fit, Finetune, Evaluate)
    for name, info in kind.model_fields.items()
    if value_kind(info)[:2] == (int, False)
]


@pytest.mark.parametrize(
    ("kind", "name"), COUNTS, ids=[f"{kind.__name__}.{name}" for kind, name in COUNTS]
)
def test_lengths_like_4k_are_accepted_where_flags_and_schema_declare_them(kind, name):
    try:
        kind(**{name: "4k"})
        reads = True
    except UsageError as error:
        reads = "must be a whole number" not in str(error)
    assert reads == (option_role(kind.model_fields[name]) is Role.TOKENS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "128kb"}, "--target '128kb' is not a number of tokens; write 4096, 4k or 1m"),
        ({"context": "1"}, "--context '1' must be a whole number of tokens, at least 2"),
        ({"context": "1e400"}, "--context '1e400' is not a number of tokens"),
        ({"original_context": "4096m"}, "--original-context must be at most 2147483647"),
        ({"target": True}, "--target must be a whole number, was True"),
    ],
)
def test_a_wrong_length_is_refused_with_its_flag(given, words):
    with pytest.raises(UsageError, match=words):
        Extend(**given)


def test_targets_beyond_32_bit_positions_are_refused():
    with pytest.raises(UsageError, match="out of range"):
        extend.resolve_target(Extend(target=2**31), 2**20)
    with pytest.raises(UsageError, match="out of range"):
        extend.resolve_target(Extend(factor=4096.0), 2**20)


@pytest.mark.parametrize(
    ("context", "factor", "target"),
    [(4096, 4.0, 16384), (1000, 1.1, 1100), (1000, 1.0001, 1001), (2047, 2.5, 5118)],
)
def test_a_factor_that_gives_no_whole_number_is_rounded_up(context, factor, target):
    # 2047 * 2.5 = 5117.5; 1000 * 1.1 = 1100.0000000000002 in float64 and must stay 1100.
    assert extend.resolve_target(Extend(factor=factor), context) == target


def test_neither_factor_nor_target_names_the_options_to_give():
    with pytest.raises(UsageError, match="--factor 4, or --target 16384"):
        extend.resolve_target(Extend(), 4096)


def test_a_knob_of_another_method_is_refused_with_its_owner():
    with pytest.raises(UsageError, match="--beta-fast is a knob of by-parts and yarn"):
        extend.knobs_for(Extend(method="pi", beta_fast=16.0), "pi")
    with pytest.raises(UsageError, match="--theta is a knob of abf"):
        extend.knobs_for(Extend(method="ntk", theta=1e6), "ntk")
    assert extend.knobs_for(Extend(beta_fast=16.0), "yarn").beta_fast == 16.0


def test_temperature_is_one_over_the_square_of_the_attention_factor():
    # YaRN, eq. 22: sqrt(1/t) multiplies cos and sin.
    assert Extend(temperature=0.64).attention == pytest.approx(1.25, rel=1e-15)
    assert Extend(attention_factor=1.25).attention == 1.25
    assert Extend().attention is None


def test_a_list_in_one_text_has_no_empty_parts():
    from ropext.options.evaluate import Evaluate

    assert Evaluate(tasks="passkey, mkey, ").tasks == ("passkey", "mkey")
    assert Evaluate(tasks=["passkey", " "], depths="0.5,1,").depths == (0.5, 1.0)


def test_pair_factors_are_read_from_every_form():
    wanted = (1.0, 2.5, 4.0)
    for text in (
        "[1, 2.5, 4]",
        '{"pair_factors": [1, 2.5, 4]}',
        '{"long_factor": [1, 2.5, 4], "short_factor": [1, 2.5, 4]}',
        '{"rope_scaling": {"long_factor": [1, 2.5, 4]}}',
        "1, 2.5, 4\n",
        "1\n2.5\n4\n",
        # The released LongRoPE files repeat one row for every layer.
        "1,2.5,4\n" * 32,
    ):
        assert longrope.parse_pair_factors(text, "f") == (wanted, None, None), text
    both = '{"long_factor": [1, 2.5, 4], "short_factor": [1, 1, 1]}'
    assert longrope.parse_pair_factors(both, "f") == (wanted, (1.0, 1.0, 1.0), None)
    for says, attention in (
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": None}, None),
        ({"factor": 4.0, "original_max_position_embeddings": 16}, 1.5**0.5),
    ):
        text = json.dumps({"rope_scaling": {"long_factor": [1, 2.5, 4]} | says})
        assert longrope.parse_pair_factors(text, "f") == (wanted, None, attention)
        asked = extend.parse_extend({"pair_factors": "f"}, lambda _, text=text: text)
        assert asked.attention == attention
        flagged = extend.parse_extend(
            {"pair_factors": "f", "temperature": 4.0}, lambda _, t=text: t
        )
        assert flagged.attention == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("1,2\n1,3\n", "rows differ"),
        ("1,x,3", "not a number"),
        ("[1,", "not valid JSON"),
        ('{"factors": [1]}', "long_factor"),
        ('{"long_factor": 3}', "list of numbers"),
        ("[" * 100_000, "not valid JSON"),
        ('{"long_factor": [1], "attention_factor": "x"}', "not a number"),
        (
            '{"long_factor": [1], "factor": 2, "original_max_position_embeddings": 1}',
            "original_max_position_embeddings is 1",
        ),
    ],
)
def test_a_bad_pair_factors_file_is_one_sentence(text, words):
    with pytest.raises(InputError) as caught:
        longrope.parse_pair_factors(text, "factors.csv")
    assert words in str(caught.value)
    assert "--pair-factors factors.csv" in str(caught.value)


def test_a_path_for_pair_factors_is_read_when_the_recipe_is_built():
    built = extend.parse_extend(
        {"method": "longrope", "pair_factors": "f.csv"}, read_file=lambda path: "1,2,3,4"
    )
    assert built.pair_factors == (1.0, 2.0, 3.0, 4.0)


class Later(Evaluate):
    """Options of a later version: one of the new ones names its decision."""

    new: int = 1
    place: Content[str] = "here"


def test_an_option_without_a_mark_decides_the_numbers():
    options = Later(data="a.txt", device="cpu", new=2, place="there")
    numbers, content = options.deciding(NUMBERS), options.deciding(CONTENT)
    assert (numbers["new"], content["place"], content["data"]) == (2, "there", "a.txt")
    assert options.deciding(NEUTRAL)["device"] == "cpu"


def test_an_option_at_its_default_is_in_no_key():
    """A folder from before the option was added resumes with it."""
    before = Evaluate(data="a.txt", seed=3)
    assert before.deciding(NUMBERS) == {"seed": 3}
    for word in DECISIONS:
        assert Later(data="a.txt", seed=3, new=1).deciding(word) == before.deciding(word)


def test_types_of_weights_have_the_names_that_other_programs_give_them():
    for short, whole in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        assert Evaluate(data="d", dtype=short) == Evaluate(data="d", dtype=whole)
    assert Finetune(dtype="bf16").dtype == Fit(dtype="bf16").dtype == "bfloat16"
    with pytest.raises(UsageError, match="dtype"):
        Finetune(dtype="fp16")


def test_documents_that_ropext_wrote_are_read_without_the_users_format_options():
    class Skipping(Evaluate):
        skip_first: Stored[int] = wanted(3, "tokens")

    assert Skipping.unstored() == Evaluate.unstored() | {"skip_first": 3}
    assert Evaluate.unstored().keys() == {"column", "split", "data_revision", "split_documents"}
    assert Fit.unstored().keys() == {"column", "split", "split_documents"}


def test_an_option_of_a_running_server_is_marked_in_its_type(monkeypatch):
    given = {"endpoint": "http://localhost:1", "skip_first": 1}
    for kind, heeded in ((int, False), (Served[int], True)):
        fields = {"__annotations__": {"skip_first": kind}, "skip_first": wanted(3, "tokens")}
        monkeypatch.setattr(
            endpoint, "EndpointOptions", type("Ask", (endpoint.EndpointOptions,), fields)
        )
        if heeded:
            assert endpoint.port_options(given).skip_first == 1
        else:
            with pytest.raises(UsageError, match="--skip-first is about a model that ropext loads"):
                endpoint.port_options(given)


def test_a_depth_named_twice_is_refused():
    with pytest.raises(UsageError, match=r"--depths names 0.5 twice; name each depth once"):
        Evaluate(tasks="passkey", depths="0.5,0.5,1")


def test_changed_options_keep_the_options_that_were_not_given():
    asked = Evaluate(data="held-out", items=3)
    again = asked.changed(max_docs=2)
    assert (again.items, again.max_docs, again.lengths) == (3, 2, ())
    assert again.model_fields_set == {"data", "items", "max_docs"}


@pytest.mark.parametrize("kind", [Evaluate, Reference])
@pytest.mark.parametrize(
    "name", ["gpu", "CPU", " cpu", "cuda:", "cuda:x", "cuda:01", "xpu", "meta"]
)
def test_a_device_that_is_none_is_refused_with_the_known_ones(kind, name):
    with pytest.raises(UsageError) as caught:
        kind(device=name)
    assert str(caught.value) == f"--device is one of auto, cpu, cuda, cuda:N, mps, was {name!r}"


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "mps"])
def test_a_device_that_torch_may_have_is_taken(name):
    assert DocumentOptions(device=name).device == Reference(device=name).device == name
    torch.device(name.replace("auto", "cpu"))
