"""Self-Extend in memory equals the paper's two score matrices, computed on channels that stock has
not turned yet."""

import importlib
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from command_line import run
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache

from ropext import evaluate
from ropext.base.errors import UnsupportedModel, UsageError
from ropext.evaluation.measured_plan import memory_only_variants
from ropext.files.checkpoint import open_snapshot
from ropext.files.inspecting import plan_config
from ropext.models.patching import attending, patch, self_extend, unpatch
from ropext.options.extend import parse_extend
from ropext.pipeline.saving import save
from ropext.planning import make_plan
from ropext.results.report import text
from ropext.scaling.self_extend import EXCEPTION, Fold, FoldOptions

CONTEXT, WINDOW, GROUP, LENGTH = 64, 24, 8, 200
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": 0}
SHARED = {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
KINDS = {
    "llama": SHARED,
    "qwen3": SHARED,
    "gemma3_text": SHARED | WINDOWED,
    "mistral": SHARED | {"sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.5},
    "cohere": SHARED,
}


def tiny(kind, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind] | more))
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    return model


def spectrum(model):
    """Return the frequencies of the layers that see all text."""
    rotary = next(
        part
        for part in model.modules()
        if hasattr(part, "attention_scaling")
        or any(name.endswith("inv_freq") for name in part._buffers)
    )
    name = "full_attention_inv_freq" if "full_attention_inv_freq" in rotary._buffers else "inv_freq"
    return rotary._buffers[name].tolist()


@pytest.fixture(params=KINDS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def ids():
    return torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **more):
    with torch.no_grad():
        return model(ids, **more).logits


def folded(model, window=WINDOW, group=GROUP, by_paper=False):
    fold = Fold(CONTEXT, window, group, (tuple(spectrum(model)),), by_paper)
    self_extend.apply_fold(model, fold)
    return model


def turned(states, positions, rates, interleaved):
    """Rotate by RoFormer, eq. 34, at one position a token."""
    out = states.clone()
    for pair, rate in enumerate(rates):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(rates))
        cos, sin = (positions * rate).cos(), (positions * rate).sin()
        out[..., a] = states[..., a] * cos - states[..., b] * sin
        out[..., b] = states[..., b] * cos + states[..., a] * sin
    return out


def literal(rates, local, interleaved, window, group, begins=CONTEXT):
    """Return attention by the paper's algorithm 1; queries before `begins` see no groups."""

    def attend(module, q, k, v, mask, scaling, **rest):
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        p = torch.arange(q.shape[2])
        near = rest.get("sliding_window")
        own = rates if near is None else local
        q0, k0 = (turned(states, p.float(), own, interleaved) for states in (q, k))
        scores = q0 @ k0.transpose(2, 3)
        distance = p[:, None] - p
        if near is None:
            size = group or 10**9  # ReRoPE: all far keys are in one group
            at = (p // size + window - window // size).float()
            neighbours = turned(q, at, own, interleaved)
            grouped = turned(k, (p // size).float(), own, interleaved)
            far = (distance >= window) & (p[:, None] >= begins)
            scores = torch.where(far, neighbours @ grouped.transpose(2, 3), scores)
        hidden = (distance < 0) | (distance >= (near or LENGTH))
        weights = (scores * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize(
    ("window", "group", "by_paper"),
    [(WINDOW, GROUP, False), (32, 3, False), (WINDOW, 0, False), (32, 3, True), (WINDOW, 0, True)],
)
def test_logits_are_those_of_the_papers_two_matrices(
    model, ids, window, group, by_paper, monkeypatch
):
    base = logits(model, ids)
    mine = logits(folded(model, window, group, by_paper), ids)
    begins = window if by_paper else CONTEXT
    assert (mine[:, :begins] - base[:, :begins]).abs().max() < 1e-5 * base.abs().max()
    assert by_paper or torch.equal(mine[:, :CONTEXT], base[:, :CONTEXT])
    assert (mine[:, begins + 1 :] - base[:, begins + 1 :]).abs().amax(-1).min() > 1e-3
    rates = spectrum(model)
    self_extend.remove_fold(model)
    assert torch.equal(logits(model, ids), base)
    kind = model.config.model_type
    part = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(part, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    local = [10_000.0 ** (-2 * pair / 16) for pair in range(8)]
    attend = literal(rates, local, kind == "cohere", window, group, begins)
    AttentionInterface.register("literal", attend)
    model.set_attn_implementation("literal")
    assert (logits(model, ids) - mine).abs().max() < 1e-5 * mine.abs().max().clamp(min=1)


def test_a_cache_padding_or_whole_scores_change_no_logit_of_self_extend(model, ids, monkeypatch):
    whole = logits(folded(model), ids)
    close = 1e-5 * whole.abs().max().clamp(min=1)
    cache = DynamicCache(config=model.config)
    pieces = [0, 50, 90, 150, *range(151, LENGTH + 1)]
    parts = [
        logits(model, ids[:, start:end], past_key_values=cache) for start, end in pairwise(pieces)
    ]
    assert (torch.cat(parts, 1) - whole).abs().max() < close
    shown = torch.ones(2, LENGTH + 9, dtype=torch.long)
    shown[0, :9] = shown[1, :4] = 0
    padded = torch.zeros(2, LENGTH + 9, dtype=torch.long)
    padded[0, 9:], padded[1, 4 : LENGTH + 4] = ids[0], ids[1]
    where = (shown.cumsum(1) - 1).clamp(min=0)
    mine = logits(model, padded, attention_mask=shown, position_ids=where)
    assert (mine[0, 9:] - whole[0]).abs().max() < close
    assert (mine[1, 4 : LENGTH + 4] - whole[1]).abs().max() < close
    monkeypatch.setattr(attending, "in_blocks", attending.in_scores)
    assert (logits(model, ids) - whole).abs().max() < close


@pytest.mark.parametrize("learns", [False, True])
def test_rows_that_all_end_in_padding_read_as_they_do_alone(ids, learns):
    model = folded(tiny("llama"))
    lengths, width = (180, 30), 260
    padded = torch.zeros(2, width, dtype=torch.long)
    shown = torch.zeros(2, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        padded[row, :length] = ids[row, :length]
        shown[row, :length] = 1
    counted = shown.cumsum(1) - 1
    for where in (None, counted, counted * shown):
        with torch.set_grad_enabled(learns):
            both = model(padded, attention_mask=shown, position_ids=where).logits
        for row, length in enumerate(lengths):
            alone = logits(model, ids[row : row + 1, :length])[0]
            assert (both[row, :length] - alone).abs().max() < 1e-5 * alone.abs().max()


@pytest.mark.parametrize("learns", [False, True])
def test_documents_packed_into_a_row_read_as_they_do_alone(ids, learns):
    model = folded(tiny("llama"))
    sizes = (110, 20, 70)
    where = torch.cat([torch.arange(size) for size in sizes])[None]
    with torch.set_grad_enabled(learns):
        packed = model(ids[:1], position_ids=where, use_cache=False).logits[0]
    alone = [logits(model, part) for part in ids[:1].split(sizes, 1)]
    alone = torch.cat(alone, 1)[0]
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()


def random_case(draw):
    """Positions and a mask as programs make them, and worse: padding on either side, documents in
    one row, gaps, rows that begin late; which queries are real."""
    rows, count = 2, 60
    steps = torch.ones(rows, count, dtype=torch.long)
    if draw.random() < 0.5:  # gaps
        steps[:, draw.sample(range(count), 5)] += draw.randrange(1, 40)
    positions = steps.cumsum(1) - 1 + draw.choice([0, 0, 37])
    shown = torch.ones(rows, count, count, dtype=torch.bool).tril()
    real = torch.ones(rows, count, dtype=torch.bool)
    kind = draw.choice(["plain", "left", "right", "packed", "packed", "random"])
    for row in range(rows):
        cut = draw.randrange(5, count - 5)
        if kind == "left":
            real[row, :cut] = False
            if draw.random() < 0.5:
                positions[row] = (positions[row] - positions[row, cut]).clamp(min=0)
        elif kind == "right":
            real[row, cut:] = False
            if draw.random() < 0.5:
                positions[row, cut:] = draw.choice([0, 1])
        elif kind == "packed":
            positions[row, cut:] -= positions[row, cut].item()
            shown[row, cut:, :cut] = False
        elif kind == "random":
            shown[row] &= (torch.rand(count, count) < 0.5) | torch.eye(count, dtype=torch.bool)
    shown &= real[:, None]
    return positions, None if shown.equal(torch.ones_like(shown).tril()) else shown[:, None], real


@pytest.mark.parametrize("seed", range(40))
def test_any_mask_and_any_positions_by_the_literal_rule(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    positions, mask, real = random_case(draw)
    fold = Fold(24, draw.choice([1, 7, 23]), draw.choice([0, 1, 4]), (), draw.random() < 0.3)
    rates = torch.tensor([1.0, 0.3, 0.05])
    count = positions.shape[1]
    q, k, v = (torch.randn(2, heads, count, 8).double() for heads in (4, 2, 2))
    at = positions[:, None].double()
    # The rule, pair by pair, in float64.
    size = fold.group or 10**9
    far_at = positions // size + fold.window - fold.window // size
    distance = positions[:, :, None] - positions[:, None]
    is_far = distance >= fold.window
    if not fold.literal:
        is_far &= positions[:, :, None] >= fold.context
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    near = turned(q, at, rates, False) @ turned(keys, at, rates, False).transpose(2, 3)
    grouped = turned(keys, (positions // size)[:, None].double(), rates, False)
    far = turned(q, far_at[:, None].double(), rates, False) @ grouped.transpose(2, 3)
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1) if mask is None else ~mask
    scores = torch.where(is_far[:, None], far, near) * 8**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
    expected = (weights @ values).transpose(1, 2)
    # As stock hands it over: queries and keys turned already, in float32.
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    reading = self_extend.Folding(fold)
    vars(module)[self_extend.FOLD] = (reading, self_extend.Rotation(rates, False, True))
    states = [turned(q, at, rates, False).float(), turned(k, at, rates, False).float(), v.float()]
    for learns in (False, True):
        reading.begin(positions)
        states[0].requires_grad_(learns)
        mine, _ = self_extend._folded_attention(module, *states, mask, scaling=8**-0.5)
        assert (mine - expected)[real].abs().max() < 2e-5
        assert mine.isfinite().all()
    mine[real].sum().backward()
    assert states[0].grad.isfinite().all()


def test_a_row_with_gaps_continues_in_its_cache(ids):
    model = folded(tiny("llama"))
    where = torch.arange(LENGTH)[None] + 40 * (torch.arange(LENGTH) > 50)
    whole = logits(model, ids[:1], position_ids=where)  # without a cache stock sees two documents
    close = 1e-5 * whole.abs().max()
    cache = DynamicCache(config=model.config)
    for start, end in pairwise([0, 90, 150, 151, 152]):
        row, at = ids[:1, start:end], where[:, start:end]
        part = logits(model, row, position_ids=at, past_key_values=cache)
        assert (part - whole[:, start:end]).abs().max() < close
    unknown = DynamicCache(config=model.config)
    self_extend.remove_fold(model)
    logits(model, ids[:, :90], past_key_values=unknown)
    with pytest.raises(UnsupportedModel, match="positions of the keys in this cache are unknown"):
        logits(folded(model), ids[:, 90:95], past_key_values=unknown)


def test_generate_gives_the_same_text_with_and_without_a_cache(ids):
    model = folded(tiny("llama"))
    asked = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    said = model.generate(ids, use_cache=False, **asked)
    assert torch.equal(model.generate(ids, use_cache=True, **asked), said)
    assert torch.equal(model.generate(ids, cache_implementation="static", **asked), said)


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2}, "sees all text"),
        ("qwen3", {}, "how its attention rotates"),
    ],
)
def test_layers_that_cannot_be_folded_are_named_and_unchanged(kind, more, why, ids):
    model = tiny(kind, **more)
    base = logits(model, ids)
    spectra = (tuple(0.5**pair for pair in range(8)),)
    with pytest.raises(UnsupportedModel, match=why):
        self_extend.apply_fold(model, Fold(CONTEXT, WINDOW, GROUP, spectra))
    assert torch.equal(logits(model, ids), base)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
TWO_SETS = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
TWO_SETS |= {"original_max_position_embeddings": 32}
TWO_SETS |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "follows the length .dynamic"),
        ("llama", {"rope_parameters": TWO_SETS}, "follows the length .longrope"),
        ("cohere2", {"layer_types": WINDOWED["layer_types"]}, "have no positions"),
        ("qwen3_vl_text", {}, "several axes"),
    ],
)
def test_a_spectrum_that_does_not_hold_is_refused_before_a_model_is_read(kind, more, why):
    config = AutoConfig.for_model(kind, **(SIZES | SHARED | more)).to_dict()
    with pytest.raises(UnsupportedModel, match=why):
        plan_config(config, parse_extend({"method": "self-extend", "factor": 2}))


def test_layers_with_their_window_in_the_mask_stay_unchanged():
    model = tiny("llama")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    folded(model)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert self_extend.FOLD not in vars(first)
    assert self_extend.FOLD in vars(second)


def test_self_extend_passes_gradients(ids):
    model = tiny("llama")
    without = logits(folded(model), ids)
    with_them = model(ids).logits
    assert (with_them - without).abs().max() < 1e-5 * without.abs().max()
    with_them.logsumexp(-1).sum().backward()
    assert all(part.grad is not None and part.grad.abs().sum() > 0 for part in model.parameters())


@pytest.mark.slow
def test_a_compiled_model_reads_as_it_does_without(ids):
    model = folded(tiny("llama"))
    shown = torch.ones_like(ids)
    shown[0, 150:] = shown[1, 90:] = 0
    whole = logits(model, ids, attention_mask=shown)
    compiled = logits(torch.compile(model, backend="eager"), ids, attention_mask=shown)
    assert (compiled - whole)[shown.bool()].abs().max() < 1e-5 * whole.abs().max()


def test_self_extend_refuses_eager_attention():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match="sdpa"):
        folded(model)


def test_patch_takes_factor_window_and_group_and_unpatch_takes_them_back(ids, tmp_path):
    model = tiny("llama")
    base, mine = (
        logits(model, ids),
        logits(folded(model, 32, 5), ids),
    )  # 1.5 * (128 - 32) / (64 - 32)
    close = 1e-5 * mine.abs().max()  # stock's spectrum is float32
    assert (logits(patch(model, method="self-extend", factor=2), ids) - mine).abs().max() < close
    other = logits(folded(model, 24, 0), ids)
    again = patch(model, method="self-extend", factor=2, window=24, group=0)
    assert (logits(again, ids) - other).abs().max() < close
    with pytest.raises(UnsupportedModel, match=r"ropext\.patch.*eval MODEL"):
        save(model, tmp_path / "out")
    assert torch.equal(logits(unpatch(model), ids), base)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": CONTEXT}, "window=64 must be from 1 to 63"),
        ({"group": -1}, "--group must be at least 0, was -1"),
        ({"attention_factor": 1.0}, "--attention-factor is not for self-extend"),
        ({"method": "yarn", "window": 8}, "are of method self-extend"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        patch(tiny("llama"), **({"method": "self-extend", "factor": 2} | options))


def test_a_directory_by_this_method_is_refused_with_advice():
    config = tiny("llama").config.to_dict()
    with pytest.raises(UsageError, match=r"ropext\.patch"):
        make_plan(config, parse_extend({"method": "self-extend", "factor": 2}))


def test_eval_measures_it_with_nothing_paid_inside_the_context():
    asked = {"method": ("self-extend",), "factor": (2.0,), "max_docs": 1, "lengths": "256,512"}
    found = evaluate("ropext://demo", data="ropext://held-out", **asked).results["variants"]
    mine, base = (found[name]["metrics"] for name in ("self-extend-2x", "untouched"))
    assert mine["tail_nll@256"]["value"] == pytest.approx(base["tail_nll@256"]["value"], abs=1e-6)
    assert mine["tail_nll@512"]["value"] < base["tail_nll@512"]["value"] - 0.5


def test_the_papers_rule_is_for_queries_inside_the_context_too(ids):
    """Below the window nothing is far, so that only there the logits are the base's."""
    model = tiny("llama")
    base = logits(model, ids)
    both = {"method": "self-extend", "factor": 2, "window": WINDOW, "group": GROUP}
    ours = logits(patch(model, **both), ids)
    papers = logits(patch(model, literal=True, **both), ids)
    close = 1e-5 * base.abs().max()
    assert (papers[:, :WINDOW] - base[:, :WINDOW]).abs().max() < close
    inside = slice(WINDOW + 1, CONTEXT)
    assert (papers[:, inside] - base[:, inside]).abs().amax(-1).min() > 1e-3
    assert torch.equal(ours[:, :CONTEXT], base[:, :CONTEXT])
    longest = logits(folded(model, WINDOW, GROUP), ids)
    alone = self_extend.Fold(CONTEXT, WINDOW, GROUP, (tuple(spectrum(model)),), literal=True)
    self_extend.apply_fold(model, alone)
    assert (logits(model, ids) - papers).abs().max() < close
    assert not torch.equal(longest, papers)


def test_the_exception_of_self_extend_is_one_sentence_everywhere():
    made = make_plan(open_snapshot("ropext://demo").config, parse_extend({"factor": 2.0}))
    assert EXCEPTION in text.plan_details(made).replace("\n" + " " * 13, " ")
    for page in ("README.md", "docs/methods.md"):
        assert EXCEPTION in (Path(__file__).parents[1] / page).read_text("utf-8")


def test_rows_name_the_requested_settings(capsys):
    words = ["eval", "ropext://demo", "--data", "ropext://held-out", "--lengths", "256,512"]
    words += ["--factor", "2", "--max-docs", "1", "--method"]
    folds = ["--window", "64", "--group", "0", "--literal"]
    code, heard = run(*words, "self-extend,pi", *folds, "--dry-run", capsys=capsys)
    assert (code, "self-extend-literal-w64-g0-2x" in heard.out) == (0, True)
    code, heard = run(*words, "pi", *folds, "--dry-run", capsys=capsys)
    assert code == 2
    assert "--window, --group and --literal are of --method self-extend" in heard.err
    code, heard = run("plan", "ropext://demo", "--factor", "2", "--window", "64", capsys=capsys)
    assert code == 2
    assert "--window belongs to self-extend; add --measure DATA" in heard.err


def test_a_measured_plan_reads_the_model_with_the_given_options():
    recipe = parse_extend({"factor": 2.0})
    snapshot = open_snapshot("ropext://demo")
    (asked,) = memory_only_variants(snapshot, recipe, FoldOptions(64, 3, literal=True))
    assert asked.label == "self-extend-literal-w64-g3"
    fold = asked.beside.fold
    assert (fold.window, fold.group, fold.literal) == (64, 3, True)
    (plain,) = memory_only_variants(snapshot, recipe)
    assert plain.label == "self-extend"
    with pytest.raises(UsageError, match="window=256 must be from 1 to 255"):
        memory_only_variants(snapshot, recipe, FoldOptions(window=256))
