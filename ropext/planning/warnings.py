"""What a user must know before relying on a plan."""

from collections.abc import Iterable, Iterator

from ropext.families import Model
from ropext.loaders import Reading
from ropext.options.extend import Extend
from ropext.planning.carrying import method_row
from ropext.planning.plan import WRONG, PlannedSite, newest

# Angles are float32 in stock transformers: position * 2^-24 radians of rounding on the fastest
# pair. From here on the error passes 1e-2 (measured: 2.5e-2 at 1M positions).
FLOAT32_MATTERS = 2**18


def composed(
    model: Model,
    recipe: Extend,
    main: PlannedSite,
    method: str,
    target: int,
    readings: Iterable[Reading],
) -> Iterator[str]:
    """That two scalings together become a longrope, who does not read that, and the one-step way.

    A temperature alone, or a plain embedding, is composed with nothing.
    """
    others = [f"{r.loader} ({r.verdict})" for r in newest(readings) if r.verdict in WRONG]
    composes = main.params["rope_type"] == "longrope" and not main.rope.is_geometric
    if recipe.from_original or not composes or not others:
        return
    sentence = (
        "the model is scaled already, and both scalings together are written as a longrope, "
        f"which not every loader reads as planned: {', '.join(others)}"
    )
    wish = recipe.changed(from_original=True, factor=None, target=target)
    for name in (method, "yarn"):
        row = method_row(model, name, method, target, wish)
        if row.form not in (None, "longrope"):
            length = " --original-context N" if model.asks_original else ""
            sentence += (
                f"; in one step, where its weights were not trained since that scaling: "
                f"--from-original{length} --target {target} --method {name}"
            )
            break
    yield sentence


def warnings_of(
    model: Model, recipe: Extend, sites: tuple[PlannedSite, ...], context: int, target: int
) -> tuple[str, ...]:
    """What a user must know before relying on the result; each a sentence."""
    main = next(site for site in sites if site.scaled)
    anyway = "" if recipe.even_so else "; extend and its like ask for --even-so"
    out = [*model.notes, *(obstacle + anyway for obstacle in model.obstacles)]
    if main.wanted.inv_freq == main.rope.spectrum.inv_freq:
        out.append("no pair moves: only the stated length grows")
    if recipe.from_original and target <= model.context:
        out.append(
            f"the target of {target} tokens is not above the {model.context} that the model reads "
            "today: from its original context this is a shorter window"
        )
    if main.wanted.attention_factor != main.rope.attention_factor:
        if model.temperature == "rotated channels":
            out.append(
                "the temperature acts on the rotated channels only, not on whole logits as in "
                "YaRN's paper: this family rotates a part of each head"
            )
        if model.temperature == "cancelled":
            out.append(
                "the temperature has no effect: this family normalises queries and keys after "
                "the rotation"
            )
    for keys in (("attn_factor",), ("short_mscale", "long_mscale")):
        if keys[0] in main.params:
            out.append(
                f"transformers will warn of unrecognized keys ({', '.join(keys)}), under which "
                "other loaders read the attention factor"
            )
    softmax = model.site(main.label).rope.softmax_factor
    if softmax != main.wanted.softmax_factor:
        out.append(
            f"the softmax factor goes from {softmax:.6g} to "
            f"{main.wanted.softmax_factor:.6g} (mscale_all_dim {main.rope.mscale_all_dim:g})"
        )
    if target > FLOAT32_MATTERS:
        out.append(
            f"at {target} tokens the float32 angles of stock transformers are off by up to "
            f"{target * 2.0**-25:.1e} rad on the fastest pair"
        )
    if main.wanted.short_inv_freq is not None:
        out.append(
            "two sets of factors: a sequence that grows past "
            f"{main.params['original_max_position_embeddings']} tokens while keys are cached mixes "
            "both; only models that refill the cache there (Phi-3) are right"
        )
    return tuple(out)
