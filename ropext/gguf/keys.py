"""The keys and tensors of a GGUF file that a plan changes."""

from collections.abc import Mapping
from typing import Any

from ropext.checkpoint import Snapshot
from ropext.errors import NotExpressible
from ropext.families import ABSENT, Edit
from ropext.gguf.file import FREQS, LONG, SHORT, GgufFile, known_key
from ropext.gguf.header import FLOAT32, STRING, UINT32
from ropext.loaders.gguf import (
    GgufRope,
    architecture,
    carry,
    is_given_scaling,
    keys_of,
    older_names,
)
from ropext.planning import Plan

Values = Mapping[str, tuple[int, Any]]  # of a file's keys: the kind and value of each
KINDS = {int: UINT32, float: FLOAT32, str: STRING}
ALWAYS = (".context_length", ".freq_base", ".yarn_beta_fast", ".yarn_beta_slow")


def changes(model: Snapshot, plan: Plan) -> tuple[Values, Mapping[str, tuple[float, ...]]]:
    """What llama.cpp needs to compute the plan's spectrum from this file: keys, and the tensors of
    divisors."""
    assert isinstance(model, GgufFile)  # nothing else has a container
    site = plan.main
    rope = carry(model.container, site.rope, site.wanted, site.params)
    if rope is None:  # the plan was made with this very question
        raise NotExpressible(f"a {model.container} GGUF does not carry this spectrum exactly")
    row, prefix = architecture(model.container), f"{model.container}.rope"
    present, theta_alone = {*model.head.entries}, rope.scaling == "none" and not rope.divisors
    if known_key(model.head, row, "attention.temperature_scale"):  # counts from the original
        theta_alone = False
    defaults = {"none", 1.0} | ({rope.original} if theta_alone else set())
    if is_given_scaling(model.container):
        present |= {f"{prefix}.scaling.type", f"{prefix}.scaling.factor"}
    keys: dict[str, tuple[int, Any]] = {
        key: (KINDS[type(value)], value)
        for key, value in keys_of(row.name, rope, plan.target).items()
        if key in present or value not in defaults or key.endswith(ALWAYS)
    }
    local = f"{prefix}.freq_base_swa"
    if site.rope.nested and rope.freq_base != site.rope.theta and not row.local:
        keys[local] = (FLOAT32, model.head.decimal(local) or site.rope.theta)
    old = f"{prefix}.scale_linear"  # read where scaling.factor is absent
    if old in model.head.entries:
        keys[old] = (FLOAT32, rope.factor)
    for name in older_names(row.name):
        value = known_key(model.head, row, name)
        if value is not None and f"{row.name}.{name}" not in present:
            keys.setdefault(f"{row.name}.{name}", (FLOAT32, value))
    return keys, _tensors(model, rope)


def _tensors(model: GgufFile, rope: GgufRope) -> dict[str, tuple[float, ...]]:
    """The divisors of this spectrum; those of another that are there already become ones."""
    present = [name for name in (FREQS, LONG, SHORT) if model.head.tensor(name)]
    out = {name: (1.0,) * len(model.head.floats(name)) for name in present}
    if rope.short:
        return out | {LONG: rope.divisors, SHORT: rope.short}
    if rope.divisors:  # a Step's row is as long as its windowed layers ask for, which read none
        more = len(rope.divisors) if architecture(model.container).halves else 0
        out[FREQS] = rope.divisors + (1.0,) * more
    return out


def key_edits(model: Snapshot, plan: Plan) -> tuple[Edit, ...]:
    """What a plan changes in the file, for people."""
    assert isinstance(model, GgufFile)
    keys, tensors = changes(model, plan)
    edits = []
    for key, (_, value) in keys.items():
        entry = model.head.entries.get(key)
        before = ABSENT if entry is None else entry.value
        if before != value:
            edits.append(Edit((key,), before, value))
    for name, values in tensors.items():
        known = model.head.floats(name)
        before = list(known) if known else ABSENT
        if before != list(values):
            edits.append(Edit((name,), before, list(values)))
    return tuple(edits)
