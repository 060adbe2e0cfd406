"""What is written beside the weights about a plan: the record's content and the card's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ropext import families
from ropext.checkpoint import Snapshot, card, provenance
from ropext.checkpoint.card import Card, Table
from ropext.checkpoint.provenance import Record, SiteRecord
from ropext.families import Model
from ropext.planning import Plan

READ_FROM = "read_from"  # section of a record that was read from a config


def record_of(plan: Plan, base: Mapping[str, Any], command: Sequence[str] = ()) -> Record:
    """The plan as ropext.json keeps it; the weights and the proof are filled in when written."""
    return Record(
        base=base,
        method=plan.method,
        knobs=plan.knobs,
        context=plan.context,
        target=plan.target,
        sites=tuple(
            SiteRecord(
                label=site.label,
                dim=site.rope.dim,
                context=site.rope.context,
                base=site.rope.spectrum,
                spectrum=site.wanted,
                params=site.params,
                scaled=site.scaled,
            )
            for site in plan.sites
        ),
        edits=_config_edits(plan.edits),
        recipe={key: value for key, value in dict(plan.recipe).items() if value not in (None, ())},
        command=provenance.clean_command(command) if command else (),
        versions=provenance.versions(),
    )


def scaled_by_config(model: Model) -> str:
    """How far a directory without a record is scaled, as its config alone says; "" where it is not,
    or where the config leaves open from how many tokens."""
    original = model.scaled_sites[0].rope.original_context
    if model.asks_original or original >= model.context:
        return ""
    return f"scaled {model.context / original:g}x from {original:,} by its config; no record"


def record_of_config(snapshot: Snapshot) -> Record | None:
    """The scaling that a config names as a record of it, for a directory that has none (another
    program saved it); None where `scaled_by_config` says nothing."""
    config = snapshot.config
    model = families.read(config)
    if not scaled_by_config(model):
        return None
    context = model.scaled_sites[0].rope.original_context
    plain = {
        site.label: {"rope_type": "default", "rope_theta": site.rope.theta}
        for site in model.scaled_sites
    }
    sites = tuple(
        SiteRecord(
            label=site.label,
            dim=site.rope.dim,
            context=site.rope.original_context,
            base=site.rope.original().spectrum if site.scaled else site.rope.spectrum,
            spectrum=site.rope.spectrum,
            params=site.params,
            scaled=site.scaled,
        )
        for site in model.sites
    )
    return Record(
        base=provenance.base_of(snapshot),
        method=model.scaled_sites[0].params["rope_type"],
        knobs={},
        context=context,
        target=model.context,
        sites=sites,
        edits=_config_edits(families.diff(families.write(config, model, plain, context), config)),
        more={READ_FROM: "config.json"},
    )


def _config_edits(edits: Iterable[families.Edit]) -> tuple[dict[str, Any], ...]:
    return tuple({"file": "config.json"} | edit.to_json() for edit in edits)


def card_of(plan: Plan, snapshot: Snapshot, title: str, proof: Mapping[str, Any] | None) -> Card:
    """The model card's section, as plain strings."""
    base = snapshot.short_name
    summary = [
        f"The context of {base} was extended from {plan.context:,} to {plan.target:,} tokens by "
        f"{plan.method} (factor {plan.factor:g}).",
        "The weights are those of the base; config.json alone says what changed.",
    ]
    if proof:
        summary.append(
            f"transformers {proof['transformers']} built the model from it without its weights: "
            f"{proof['rotary_modules']} rotary and {proof['attention_modules']} attention modules "
            f"and {proof['tensors_compared']} tensors were as planned; {proof['forward']}."
        )
    else:
        summary.append("It was not proved with stock transformers (--no-verify).")
    facts = [
        ("method", plan.method),
        *((name, value) for name, value in plan.knobs.items() if not isinstance(value, tuple)),
        ("context", plan.context),
        ("target", plan.target),
        ("attention factor", f"{plan.main.wanted.attention_factor:.6g}"),
        ("written as", plan.main.params["rope_type"]),
        ("spectrum (SHA-256)", plan.main.wanted.digest()),
    ]
    rows = tuple((r.loader, r.versions, r.verdict, r.flag or r.why) for r in plan.readings)
    nearest = tuple(
        f"Not read as planned by {', '.join(who)}: the nearest form they read exactly is that of "
        f"{options}."
        for options, who in plan.nearest_by_options().items()
    )
    return Card(
        title=title,
        base=base,
        base_is_hub_id=snapshot.hub_id is not None,
        summary=tuple(summary),
        facts=card.facts(facts),
        readings=Table(("loader", "versions", "reads it", "note"), rows),
        serving=tuple((line.loader, line.command) for line in plan.serving(title) if line.command),
        warnings=(*plan.warnings, *nearest),
    )
