"""Warn of everything that a user must know before relying on a plan: its risks, and the measured
results of such a scaling without training.

Each warning is a function in a list. It returns its sentence, which begins with the name in
brackets, or "" if it does not apply.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ropext.families.loaders import WRONG, newest
from ropext.planning.plan import ASKED_UNTRAINED, Plan, serves_folded

# Angles are float32 in transformers and in llama.cpp: position * 2^-25 radians of rounding on the
# fast pairs, and more as the frequencies are rounded, too. From here on the error passes 1e-2.
FLOAT32_MATTERS = 2**18
EVEN_SO = "; extend needs --even-so, or --length-only, which raises only the stated length"
# vLLM 0.32 and 0.33 build these with a table of one position a token; of every other mRoPE they
# take four times the original length for the table, and so for the ramp of a yarn (0.11 to 0.33:
# its rotary code was run; 0.32 built the models, 0.33 was read).
VLLM_ONE_POSITION = ("qwen3_vl", "qwen3_5")


# Results of untrained scaling, which scripts/make_measured.py writes from benchmarks/results.
KNOWN = {"yarn": "YaRN"}  # the names of measured methods that a sentence spells otherwise
EQUAL = 0.005  # nats per token: differences below half a percent are noise
SHAPE = ("layers", "heads", "kv_heads", "head_dim")
FAR_UNTRAINED = 4  # times the context; from here on an untrained model loses as measured


def published(plan: Plan) -> str:
    """Warn of a plan that the model's authors do not publish: their recipe differs, or they publish
    none."""
    authors = plan.authors
    if authors is None or authors.agrees(plan):
        return ""
    return f"[published] {authors.against(plan)}"


def length_only(plan: Plan) -> str:
    """Warn of a plan with --length-only that it leaves the RoPE frequencies as they are."""
    return (
        "[length-only] the RoPE frequencies stay the same: only the stated length goes from "
        f"{plan.context:,} to {plan.target:,}, for a model that reads further than it states, or "
        "for a scaling that is set at run time"
    )


def nothing_moves(plan: Plan) -> str:
    """Warn of a plan whose method changes no RoPE frequency."""
    main = plan.main
    if plan.recipe.length_only or main.wanted.inv_freq != main.rope.spectrum.inv_freq:
        return ""
    return "[still] no frequency changes: only the stated length grows"


def pairs_stop(plan: Plan) -> str:
    """Warn of rotary pairs that the plan stops."""
    main = plan.main
    pairs = zip(main.wanted.inv_freq, main.rope.spectrum.inv_freq, strict=True)
    still = [i for i, (turn, before) in enumerate(pairs) if not turn and before]
    if not still:
        return ""
    if len(still) == main.rope.dim // 2:
        return (
            "[still] no rotary pair rotates any more: the model has no positions, like a model "
            "that DroPE trained without them"
        )
    named = ", ".join(map(str, still))
    return f"[still] rotary pairs {named} no longer rotate: they see no position"


def farther_than_anybody(plan: Plan) -> str:
    """Warn of a planned factor that nobody has reached."""
    if not plan.doubt:
        return ""
    return f"[too-far] {plan.doubt}"


def not_longer(plan: Plan) -> str:
    """Warn of a plan whose target is not above the model's context today."""
    if plan.target > plan.model.context:
        return ""
    return reached(plan.target, plan.model.context)


def reached(target: int, context: int) -> str:
    """Return a warning that a target from the original context is not above the model's present
    context."""
    if target == context:
        return (
            f"[not-longer] the target equals the context of {target} tokens that the model has "
            "today: this keeps its length and replaces its scaling"
        )
    return (
        f"[not-longer] the target of {target} tokens is below the context of {context} that the "
        "model has today: scaling from its original context makes it shorter"
    )


def temperature(plan: Plan) -> str:
    """Warn of a planned attention factor that this family applies to a part of the logits, or not
    at all."""
    if plan.main.wanted.attention_factor == plan.main.rope.attention_factor:
        return ""
    if plan.model.temperature == "rotated channels":
        return (
            "[temperature] the attention factor acts only on the rotated channels, not on "
            "whole logits as in YaRN's paper: this family rotates a part of each head"
        )
    if plan.model.temperature == "cancelled":
        return (
            "[temperature] the attention factor has no effect: this family normalises queries "
            "and keys after the rotation"
        )
    return ""


def unknown_keys_of_yarn(plan: Plan) -> str:
    """Warn that transformers does not know attn_factor in a planned rope dict."""
    return _unknown_keys(plan, "attn_factor")


def unknown_keys_of_longrope(plan: Plan) -> str:
    """Warn that transformers does not know the mscales in a planned rope dict."""
    return _unknown_keys(plan, "short_mscale, long_mscale")


def _unknown_keys(plan: Plan, keys: str) -> str:
    """Return the warning of a plan about keys that transformers does not recognise. Return "" for a
    GGUF."""
    if not plan.carrier.in_transformers:
        return ""
    return (
        f"[unknown-keys] transformers will warn of unrecognized keys ({keys}), "
        "which other engines need for the attention factor"
    )


def form_of_mrope(plan: Plan) -> str:
    """Warn of a planned rope type under which vLLM and SGLang lose mRoPE."""
    if plan.main.params["rope_type"] in ("default", "yarn"):
        return ""
    return (
        "[mrope] vLLM and SGLang support mrope_section only with a theta or yarn: under "
        f"{plan.main.params['rope_type']} "
        "they rotate images as if they were text"
    )


def ramp_of_mrope(plan: Plan) -> str:
    """Warn that vLLM computes the ramp of a planned yarn under mRoPE from another length."""
    if plan.main.params["rope_type"] != "yarn":
        return ""
    if plan.model.text_type.startswith(VLLM_ONE_POSITION):
        return (
            "[mrope] under mRoPE, vLLM up to 0.30 counts yarn's ramp from 4× the original length, "
            "from 0.32 on as transformers does; it uses attn_factor up to 0.21, attention_factor "
            "from 0.30 on"
        )
    return (
        "[mrope] under this mRoPE, vLLM (0.11 to 0.33) counts yarn's ramp from 4× the original "
        "length, and no config key changes that; vLLM computes --method ntk exactly"
    )


def images_of_mrope(plan: Plan) -> str:
    """Warn that the planned factor counts positions, and that an image takes fewer positions than
    tokens."""
    if plan.target <= plan.context:
        return ""
    return (
        "[mrope] an image takes fewer positions than tokens in mRoPE, and the factor counts "
        "positions: with images a smaller factor reaches the same length (Qwen3-VL's authors "
        "use 3 for 262,144 -> 1,000,000 tokens)"
    )


def softmax(plan: Plan) -> str:
    """Warn of a plan that changes the softmax factor (DeepSeek's mscale_all_dim)."""
    main = plan.main
    before = next(s for s in plan.model.sites if s.label == main.label).rope.softmax_factor
    if before == main.wanted.softmax_factor:
        return ""
    return (
        f"[softmax] the softmax factor goes from {before:.6g} to "
        f"{main.wanted.softmax_factor:.6g} (mscale_all_dim {main.rope.mscale_all_dim:g})"
    )


def float32(plan: Plan) -> str:
    """Warn of a plan whose target is so long that float32 angles are inexact."""
    if plan.target <= FLOAT32_MATTERS:
        return ""
    program = "transformers" if plan.carrier.in_transformers else "llama.cpp"
    return (
        f"[float32] at {plan.target} tokens the float32 angles in {program} are off by "
        f"{plan.target * 2.0**-25:.1e} rad and more on the fast rotary pairs"
    )


def two_sets(plan: Plan) -> str:
    """Warn of a planned longrope with two sets of pair factors."""
    if plan.main.wanted.short_inv_freq is None:
        return ""
    return (
        "[two-sets] two sets of factors: a sequence that grows past "
        f"{plan.main.params['original_max_position_embeddings']} tokens while K/V are cached "
        "mixes both; only models that refill the cache there (Phi-3) are right"
    )


def disputed(plan: Plan) -> str:
    """Warn of a plan for a model about whose scaling published sources contradict each other."""
    if plan.authors is None or not plan.authors.contradiction:
        return ""
    return f"[disputed] {plan.authors.contradiction}"


def composed(plan: Plan) -> str:
    """Warn that a plan writes two scalings together as a longrope that some engines misread. A
    temperature alone, or an unscaled embedding, composes nothing."""
    if plan.recipe.from_original or plan.recipe.length_only:
        return ""
    if plan.main.rope.is_geometric:
        return ""
    others = [f"{r.loader} ({r.verdict})" for r in newest(plan.readings) if r.verdict in WRONG]
    if not others:
        return ""
    in_one_step = ""
    if len(plan.ways) == 2 and plan.ways[1].form not in (None, "longrope"):
        in_one_step = f"; in one step, {plan.ways[1].condition}: {plan.ways[1].options}"
    return (
        "[composed] the model is scaled already, and both scalings together are written as rope "
        "type longrope, which these engines do not compute as planned: "
        f"{', '.join(others)}{in_one_step}"
    )


# In the order of printing, after the warnings that the config itself causes. Each value is a
# condition on the plan: a rope type, a key of its rope dict, or a word of `warnings_of`.
EVERY = ""
ROTARY: dict[Callable[[Plan], str], str] = {
    length_only: "length alone",
    nothing_moves: EVERY,
    pairs_stop: EVERY,
    farther_than_anybody: EVERY,
    not_longer: "from original",
    temperature: EVERY,
    unknown_keys_of_yarn: "attn_factor",
    unknown_keys_of_longrope: "short_mscale",  # a yarn of Phi-3.5-MoE has it, too
    form_of_mrope: "mrope",
    ramp_of_mrope: "mrope",
    images_of_mrope: "mrope",
    softmax: EVERY,
    float32: EVERY,
    two_sets: "longrope",
    disputed: "authors",
    composed: "longrope",
}


def warnings_of(plan: Plan) -> tuple[str, ...]:
    """Return the warnings of a plan for rotary embeddings, in the order of printing."""
    recipe = plan.recipe
    has = {EVERY, plan.main.params["rope_type"]}
    has.update(plan.main.params)
    if recipe.length_only:
        has.add("length alone")
    if recipe.from_original:
        has.add("from original")
    if plan.carrier.three_axes:
        has.add("mrope")
    sentences = list[str]()
    if plan.authors is not None:
        has.add("authors")
        sentences += filter(None, [published(plan)])
    sentences += plan.model.notes
    needed = EVEN_SO
    if recipe.even_so or recipe.length_only:
        needed = ""
    for obstacle in plan.model.obstacles:
        sentences.append(obstacle + needed)
    for warning, needs in ROTARY.items():
        if needs in has and (sentence := warning(plan)):
            sentences.append(sentence)
    return tuple(sentences)


@cache
def _measured_results() -> Mapping[str, Any]:
    """Return the content of measured.json, which warnings of a plan quote. It has results of
    untrained methods on one model."""
    content: Mapping[str, Any] = json.loads(
        (files(__package__) / "measured.json").read_text("utf-8")
    )
    return content


def _perplexity_percent(nats: float) -> str:
    """Return, for a plan's sentence, a difference of losses as percent of perplexity, in two
    digits."""
    percent = abs(math.expm1(nats)) * 100
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _perplexity_change(nats: float) -> str:
    """Return, for a plan's sentence, a difference of losses as "N % more" or "N % less"
    perplexity."""
    return f"{_perplexity_percent(nats)} {'more' if nats > 0 else 'less'}"


def _compared_with_truncation(worse: Mapping[str, float]) -> str:
    """Return, for a plan, the measured perplexity of each kind of text, compared with truncated
    text's."""
    kinds = list[str]()
    for kind, nats in worse.items():
        amount = _perplexity_change(nats)
        than = "than"
        if abs(nats) < EQUAL:
            amount = "the same"
            than = "as"
        whole = "" if kinds else f" perplexity {than} truncated text"
        kinds.append(f"{amount}{whole} on {kind}")
    return ", ".join(kinds)


def _measured_model(plan: Plan) -> str:
    """Return the model of measured.json, and whether the planned model is the same."""
    model = plan.model
    known = _measured_results()["model"]
    rope = model.scaled_sites[0].rope
    shape = [getattr(model, size) for size in SHAPE]
    is_alike = shape == [known[size] for size in SHAPE] and rope.theta == known["theta"]
    if not is_alike:
        return f"{known['name']} (not this model)"
    if _letters_of_name(known["name"]) in _letters_of_name(plan.name):
        return f"{known['name']} (this model, by its name and shape)"
    return f"{known['name']} (this model has its shape)"


def _letters_of_name(name: str) -> str:
    """Return the letters and digits of a model's name, by which a plan compares it with the model
    of measured.json."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def untrained_results(plan: Plan) -> str:
    """Return the sentence of a plan on the measured results of its method at 2 times the context;
    on YaRN's if the method was not measured. Return "" from 4 times on, which the warning [far] is
    about, if a training follows, or if scaling cannot help."""
    if not 1 < plan.untrained_factor < FAR_UNTRAINED or plan.obstacles:
        return ""
    method = plan.method
    methods = _measured_results()["factors"]["2"]
    unknown = ""
    if method not in methods:
        unknown = f" ({method} was not measured)"
        method = "yarn"
    seen = methods[method]
    scaling = f"untrained {KNOWN.get(method, method)} at 2×{unknown}"
    parts = [_compared_with_truncation(seen["worse"])]
    if "found" in seen:
        share = f"{seen['found'] * 100:.0f} %"
        parts.append(f"{share} of the needles found that truncation cuts off")
    inside = max(seen["inside"].values())
    parts.append(f"up to {_perplexity_percent(inside)} more perplexity inside the context")
    return f"on {_measured_model(plan)}, {scaling}: {'; '.join(parts)}"


def farther() -> str:
    """Return YaRN's measured results at 4 and 8 times the context, as the end of a plan's
    warning."""
    results = _measured_results()
    four, eight = (results["factors"][factor]["yarn"] for factor in ("4", "8"))
    novels = [_perplexity_change(seen["worse"]["novels"]) for seen in (four, eight)]
    share = f"{four['found'] * 100:.0f} %"
    return (
        f"on {results['model']['name']}, YaRN has {novels[0]} perplexity on novels than truncated "
        f"text at 4× and {novels[1]} at 8×, and finds {share} of the needles at 4×"
    )


def far(plan: Plan) -> str:
    """Warn of a plan whose factor is too large for a model without training. It does not apply to a
    plan that trains the model."""
    factor = plan.untrained_factor
    if factor < FAR_UNTRAINED:
        return ""
    asked = ""
    if factor >= ASKED_UNTRAINED and not plan.recipe.untrained:
        asked = "; extend needs --untrained here"
    measured = ""
    if plan.method != "yarn":
        measured = f" (measured for YaRN, not for {plan.method})"
    trained = plan.trained_on or "the context"
    instead = ""
    if plan.training:
        instead += f"{plan.training}, "
    if serves_folded(plan.carrier):
        instead += "use Self-Extend (ropext serve --method self-extend), "
    if instead:
        instead += "or "
    return (
        f"[far] {factor:g}× {trained} without training: {farther()}{measured}. No authors publish "
        f"an untrained factor above 4. Instead: {instead}take a smaller factor "
        f"(docs/choose-a-method.md){asked}"
    )
