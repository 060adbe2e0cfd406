"""Write plans and inspections as plain text for a terminal."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base.jsontext import JsonObject
from ropext.base.narration import continued, join_for_shells
from ropext.base.table import WIDTH, columns, wrapped_line
from ropext.families import Model
from ropext.families.config import named
from ropext.files.checkpoint.provenance import scaling_in_words
from ropext.files.inspecting import Inspection, Served, open_model, read_unchanged
from ropext.planning import ExtensionPlan
from ropext.planning.carrier import Carrier, Words
from ropext.scaling.rope import ABSENT, SCHEMES, Edit, RopeSite, phase_ratio, turns
from ropext.scaling.tables import alike

if TYPE_CHECKING:
    from ropext.families.loaders import LoaderReading, Serving
    from ropext.files.checkpoint.writing import Written
    from ropext.files.schemes.inspection import PositionFacts


def bytes_text(count: float) -> str:
    """Write a size in bytes, such as the weights', in a line of a report or in a cell of its
    tables. Its unit (B to TiB) leaves one to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def theta_or_wavelength(value: float) -> str:
    """Write a theta or a wavelength for the report of `ropext inspect` with six digits. From a
    million on, write all digits before the point."""
    if math.isinf(value):
        return "inf"
    if value < 1e6:
        return f"{value:,.6g}"
    return f"{value:,.0f}"


def scaling_line(site: RopeSite, extended: str = "") -> str:
    """Write the config's current rope dict in a line of the report of `ropext inspect`. For a
    changed theta, write the method that changed it (`extended`)."""
    kind = site.params.get("rope_type", "default")
    if kind == "default":
        if extended and site.scaled:
            return f"in its theta: {extended}"
        return "none (plain RoPE)"
    keys = list[str]()
    for key, value in site.params.items():
        if key not in ("rope_type", "rope_theta") and isinstance(value, int | float):
            keys.append(f"{key} {value:g}")
    line = f"{kind} ({', '.join(keys)}); attention factor {site.rope.attention_factor:.6g}"
    if site.rope.softmax_factor != 1:
        line += f"; softmax factor {site.rope.softmax_factor:.6g}"
    return line


_TEMPERATURE = {
    "whole": "a method's temperature scales the whole attention logits",
    "rotated channels": "a method's temperature scales the part from rotated channels only",
    "cancelled": "a method's temperature has no effect (queries and keys are normalised "
    "after the rotation)",
}


def _model_facts(carrier: Carrier, limits: JsonObject) -> list[tuple[str, str]]:
    """Lay out a model in the report of `ropext inspect`: type, context, shape, KV cache, layers."""
    model = carrier.model
    kind = model.model_type
    if model.text_type != kind:
        kind += f" (text part: {model.text_type})"
    facts = [("type", kind), ("context", f"{model.context:,} tokens")]
    if model.stated_context != model.context:
        facts.append(("stated", f"{model.stated_context:,} tokens in max_position_embeddings"))
    facts.append(("shape", _model_shape_text(model)))
    per_token = model.kv_bytes_per_token
    rules = carrier.cache
    full = model.kv_bytes(model.context, step=rules.step, beside=rules.micro_batch)
    if per_token is not None and full is not None:
        facts.append(
            (
                "KV cache",
                f"{bytes_text(per_token)} per token (16-bit values); {bytes_text(full)} when full",
            )
        )
    if model.layer_types:
        counts = list[str]()
        for kind_of_layer, count in Counter(model.layer_types).items():
            counts.append(f"{count} {named(kind_of_layer)}")
        facts.append(("layers", ", ".join(counts)))
    if model.sliding_window:
        side = " to each side" if model.masked_lm else ""
        window = f"{model.sliding_window:,} tokens{side} in sliding-window layers"
        if model.reach:
            window += f"; no token sees further back than {model.reach:,}"
        facts.append(("window", window))
    if model.nope_layers:
        facts.append(("unrotated", f"{model.nope_layers} attention layers have no RoPE"))
    facts.append(
        ("rope types", f"{', '.join(model.forms)} (those that its class in transformers computes)")
    )
    facts.append(("temperature", _TEMPERATURE[model.temperature]))
    return facts + _limit_facts(limits)


def _model_shape_text(model: Model) -> str:
    """Write the known sizes of a model in a line of the report of `ropext inspect`."""
    sizes = {
        "layers": model.layers,
        "heads": model.heads,
        "key/value heads": model.kv_heads,
        "channels per head": model.head_dim,
    }
    known = list[str]()
    for what, count in sizes.items():
        if count:
            known.append(f"{count} {what}")
    return ", ".join(known)


def _limit_facts(limits: JsonObject) -> list[tuple[str, str]]:
    """Lay out the limits that other files of a model state, for the report of `ropext inspect`."""
    facts = list[tuple[str, str]]()
    for key, limit in limits.items():
        if limit is not None:
            facts.append((key, named(str(limit))))
    return facts


def _site_facts(site: RopeSite, model: Model, extended: str = "") -> list[tuple[str, str]]:
    """Lay out one rotary embedding in the report of `ropext inspect`."""
    rope = site.rope
    dim = f"{rope.dim} channels"
    if model.head_dim and rope.dim <= model.head_dim:  # some families have wider heads elsewhere
        dim = f"{rope.dim} of {model.head_dim} channels"
    layout = "interleaved" if model.interleaved else "split in halves"
    pairs = rope.dim // 2
    still = rope.spectrum.inv_freq.count(0)
    count = f"{pairs} rotary pairs"
    if still:
        count = f"{pairs - still} of {pairs} rotary pairs rotate"
    facts = [
        ("rotary dim", f"{dim} ({count}, {layout})"),
        ("theta", theta_or_wavelength(rope.theta)),
        ("scaling", scaling_line(site, extended)),
    ]
    if rope.original_context != rope.context and not model.asks_original:
        facts.append(("original", f"{rope.original_context:,} tokens before that scaling"))
    if not site.scaled:
        facts.append(("extension", "does not change these layers"))
    return facts


def fact_lines(facts: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Lay out the facts of a report one below the other, their names in a column. It serves `ropext
    inspect` and `ropext plan`."""
    rest = f"{indent}{'':13}"
    return "\n".join(wrapped_line(value, f"{indent}{name:<12} ", rest) for name, value in facts)


def pair_table(site: RopeSite, target: int) -> str:
    """Return the table of `ropext inspect --pairs` with a row for every pair: wavelength, turns
    inside the context, and how far the target exceeds its largest angle of training."""
    spectrum = site.rope.spectrum
    ratios = phase_ratio(site.rope, spectrum, target)
    rows = []
    for i, (wave, seen, ratio) in enumerate(
        zip(spectrum.wavelengths, turns(spectrum, site.rope.context), ratios, strict=True)
    ):
        needs = f"{ratio:.3g}× the largest angle of training" if ratio > 1.001 else ""
        rows.append([str(i), theta_or_wavelength(wave), f"{seen:.4g}", needs])
    turned = f"rotations in {site.rope.context:,} tokens"
    return columns(["pair", "wavelength", turned, f"at {target:,} tokens without scaling"], rows)


def _unseen_angles_text(site: RopeSite, target: int) -> str:
    """Write in the report of `ropext inspect` how many pairs reach angles at the target that
    training never showed."""
    ratios = phase_ratio(site.rope, site.rope.spectrum, target)
    count = sum(ratio > 1.001 for ratio in ratios)
    line = f"{count} of {len(ratios)} pairs reach angles that training never showed"
    if count:
        line += f", up to {max(ratios):.3g}× the largest"
    return f"{line} (--pairs lists them)"


def inspection_text(seen: "Inspection | PositionFacts", pairs: bool = False) -> str:
    """Write the report of `ropext inspect` as text; with `pairs`, a row for each pair."""
    if not isinstance(seen, Inspection):
        return _unrotated_text(seen)
    model = seen.model
    parts = [seen.name, fact_lines(_model_facts(seen.carrier, seen.limits))]
    for site in model.sites:
        title = "rotary embedding"
        if site.label:
            title += f" of {site.label}"
        facts = _site_facts(site, model, seen.extended)
        if site.scaled and not pairs:
            facts.append((f"at {seen.target:,}", _unseen_angles_text(site, seen.target)))
        parts.append(f"\n{title}\n{fact_lines(facts, '  ')}")
        if site.scaled and pairs:
            parts.append(f"\n{pair_table(site, seen.target)}")
    for note in model.notes + model.obstacles:
        parts.append("\n" + wrapped_line(f"note: {note}"))
    name = join_for_shells(seen.name)
    following = f"verify {name}" if seen.extended else f"plan {name} --target {seen.target}"
    parts.append(f"\nnext: ropext {following}")
    return "\n".join(parts)


def _unrotated_text(seen: "PositionFacts") -> str:
    """Write the report of `ropext inspect` for a model without a rotary embedding."""
    scheme = seen.positions
    kind = scheme.model_type
    if scheme.text_type != kind:
        kind += f" (text part: {scheme.text_type})"
    facts = [("type", kind), ("positions", SCHEMES[scheme.kind])]
    if scheme.carried and not scheme.tensors:
        facts.append(
            ("distances", f"all the same from {alike(scheme)} on; {scheme.key} {scheme.context}")
        )
    elif scheme.context:
        facts.append(("context", f"{scheme.context:,} tokens"))
    if scheme.tensors:
        rows_text = f"{scheme.rows:,}"
        if scheme.offset:
            rows_text += f", {scheme.offset} in front of the first position"
        facts.append(("rows", f"{rows_text}; {scheme.key} {scheme.rows - scheme.beyond}"))
    for table in seen.tables:
        rows, width = table.shape
        facts.append(("table", f"{table.name} in {table.file}: {rows} x {width}, {table.dtype}"))
    facts += _limit_facts(seen.limits)
    end = f"next: ropext plan {join_for_shells(seen.name)} --factor 2"
    if seen.advice:
        end = wrapped_line(f"note: {seen.advice}")
    return f"{seen.name}\n{fact_lines(facts)}\n\n{end}"


def loader_lines(readings: Iterable["LoaderReading"]) -> str:
    """Lay out each engine's verdict about the written config in the report of `ropext plan
    --details`. Engines with the same verdict share a line; misreading engines come first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for reading in readings:
        group = (reading.verdict, _loader_note(reading))
        groups.setdefault(group, []).append(f"{reading.loader} {reading.versions}")
    last = {"same": 1, "not measured": 2}
    rows = list[tuple[str, str]]()
    for verdict, note in sorted(groups, key=lambda group: last.get(group[0], 0)):
        rows.append((verdict, "; ".join(groups[verdict, note]) + note))
    return columns((), rows)


def _loader_note(reading: "LoaderReading") -> str:
    """Write the note after an engine's name in the report of `ropext plan --details`. It is its
    flag, or the reason why it reads otherwise."""
    if reading.verdict == "not measured":
        return ""
    if reading.flag:
        return f": {reading.flag}"
    if not reading.why:
        return ""
    if not reading.has_reason:
        return f" {reading.why}"
    return f": {reading.why}"


READ = 'what each engine computes ("same": what the plan states)'


def config_value_text(item: Any) -> str:
    """Write a value of config.json for a report, short enough for one line of its diff."""
    if isinstance(item, dict):
        entries = [f"{named(key)}: {config_value_text(held)}" for key, held in item.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(item, list) and len(item) > 4:
        first, second, last = map(config_value_text, (item[0], item[1], item[-1]))
        return f"[{first}, {second}, ... {last}] ({len(item)} values)"
    if isinstance(item, float) and item.is_integer():
        return f"{item:.1f}"
    if isinstance(item, float):
        return f"{item:.8g}"
    if isinstance(item, str):
        return repr(item)
    return str(item)


def config_diff(edits: Iterable[Edit]) -> str:
    """Lay out the diff of config.json in a report: old lines with -, new lines with +. It serves
    `plan --details` and `verify`."""
    lines = []
    for edit in edits:
        key = ".".join(map(named, edit.path))
        if edit.before is not ABSENT:
            lines.append(wrapped_line(f"- {key}: {config_value_text(edit.before)}"))
        if edit.after is not ABSENT:
            lines.append(wrapped_line(f"+ {key}: {config_value_text(edit.after)}"))
    return "\n".join(lines)


WITHOUT_COPY = "or without a copy: serve the original weights with these settings"


def plan_headlines(made: ExtensionPlan) -> list[str]:
    """Lay out the first lines of a plan's report: the old and new context, the method and the
    factor. The reason comes before them if `extend` refuses the plan."""
    head = f"{made.name}: {made.context:,} -> {made.target:,} tokens by {made.method} at "
    head += f"{made.factor:g}×"
    if made.recipe.from_original:
        head += " from its original RoPE frequencies"
    if made.refusal is not None:
        return [wrapped_line(str(made.refusal)), "", f"with {made.consent}: {head}"]
    return [head]


def plan_details(made: ExtensionPlan) -> str:
    """Write the report of `ropext plan --details` as text."""
    parts = plan_headlines(made)
    facts = made.facts()
    methods = made.compare_methods()
    if made.kv_cache_bytes is not None:
        facts.append(("KV cache", kv_cache_text(made.kv_cache_bytes, made.target)))
    if facts:
        parts.append(fact_lines(facts))
    if methods.rows:
        parts += ["", columns(methods.header, methods.rows)]
        parts += methods.note.splitlines()
    words = made.words
    parts += ["", words.edited, config_diff(made.edits)]
    if made.readings:
        parts += ["", READ, loader_lines(made.readings)]
    for remark in made.remarks():
        parts.append("\n" + wrapped_line(remark))
    if nearest := made.nearest_by_options():
        rows = list[tuple[str, str]]()
        for options, loaders in nearest.items():
            rows.append((f"  {options}", ", ".join(loaders)))
        parts += ["\nthe nearest settings that other engines compute exactly", columns((), rows)]
    if lines := made.serving(words.name):
        parts += [
            "",
            f"to serve the result (OUT = the {words.output} you write)",
            serving_text(lines),
        ]
    if lines := made.overrides():
        parts += ["", f"{WITHOUT_COPY}{model_placeholder_note(lines)}"]
        if words.without_copy:
            parts.append(words.without_copy)
        parts.append(serving_text(lines))
    return "\n".join(parts)


def serving_text(lines: Iterable["Serving"]) -> str:
    """Lay out the command that serves a model in each engine, for a report. Without one, write the
    sentence that says why."""
    out = list[str]()
    indent = " " * 15
    for line in lines:
        rows = list[str]()
        for command in line.command.splitlines():
            rows += continued(command, WIDTH - len(indent))
        if line.note:
            first_note, *notes = line.note.splitlines()
            if rows:
                first_note = f"({first_note})"
            rows += wrapped_line(first_note, indent, indent).splitlines()
            rows += notes
        begin = f"  {line.loader:<12} "
        for row in rows:
            out.append(begin + row.strip())
            begin = indent
    return "\n".join(out)


def extension_text(made: ExtensionPlan, written: "Written", every: bool = False) -> str:
    """Write the report of `extend`: the files, the verification and the next step. It says how to
    serve them in `every` engine or in one."""
    out = join_for_shells(str(written.output))
    parts = [f"wrote {written.output}: {made.context:,} -> {made.target:,} tokens by {made.method}"]
    parts.append(_written_files_text(written.files))
    parts.append(_proof_sentence(written.proof, out))
    first_try = made.words.first_try
    if first_try and made.kv_cache_bytes:
        taken = kv_cache_text(made.kv_cache_bytes, made.target)
        parts.append(f"KV cache: {taken}; to try it, {first_try}")
    for note in written.notes:
        parts.append(f"note: {note}")
    for name, reason in written.left.items():
        if name != "README.md":
            parts.append(f"left out: {name}: {reason}")
    parts = list(map(wrapped_line, parts))
    if lines := made.serving(str(written.output)):
        if every:
            parts += ["", "to serve it", serving_text(lines)]
        else:
            parts += ["", _serving_section(written.output, usual_serving_lines(lines, made.words))]
        if made.log:
            parts.append(wrapped_line(f"to check it: {made.log}"))
    if made.sites:
        parts += ["", *map(wrapped_line, _quality_lines(made, written, out))]
    return "\n".join(parts)


def _quality_lines(made: ExtensionPlan, written: "Written", out: str) -> list[str]:
    """Write in the report of `extend` that no number is known of the output. Add the numbers that
    such a scaling gave on the measured model."""
    begin = "Quality was not measured"
    if written.proof:
        begin = f"The {made.words.output} was verified; quality was not measured"
    lines = [f"{begin}. To measure it: ropext eval {out} --data TEXTS"]
    if made.measured:
        lines.append(f"Measured {made.measured}.")
    return lines


def model_placeholder_note(lines: Iterable["Serving"]) -> str:
    """Write the remark of a plan's report about the placeholder MODEL. It is "" unless commands use
    MODEL for a base without a path here."""
    if any("MODEL" in line.command for line in lines):
        return " (MODEL = their path)"
    return ""


def serving_commands(output: Path) -> str:
    """Write the section below a result's report: the commands that serve a finished output. They
    are for the program that most users have; "" if the model does not rotate."""
    read = read_unchanged(open_model(output))
    if read is None:
        return ""
    return _serving_section(output, usual_serving_lines(read.serving, read.carrier.words))


def usual_serving_lines(lines: Sequence["Serving"], words: Words) -> Sequence["Serving"]:
    """Return the commands that most users need: the first engine's alone, or another engine's if
    that one has none. Without a first engine, return every command without its notes."""
    if words.first_engine:
        return [min(lines, key=lambda line: (not line.command, line.loader != words.first_engine))]
    return [replace(line, note="") if line.command else line for line in lines]


def _serving_section(output: Path, usual: Iterable["Serving"]) -> str:
    """Lay out the section of a report with the commands that serve a result."""
    others = f"for other engines: ropext plan {join_for_shells(str(output))}"
    return f"to serve it ({others})\n{serving_text(usual)}"


NAMED_FILES = 16  # files of an output named in full; a large model has hundreds of weight files


def _written_files_text(names: Sequence[str]) -> str:
    """Write the names of an output's files in a line of the report of `ropext extend`."""
    shown = ", ".join(names[:NAMED_FILES])
    if len(names) > NAMED_FILES:
        shown += f" and {len(names) - NAMED_FILES} more"
    return f"files: {shown}"


def kv_cache_text(count: int, target: int) -> str:
    """Write in a line of a plan's report how much memory one sequence of the target length
    takes."""
    return f"{bytes_text(count)} for one sequence of {target:,} tokens (16-bit values)"


def _proof_sentence(proof: JsonObject | None, out: str) -> str:
    """Write the verified facts in a line of the report of `ropext extend`. A forward pass that did
    not agree has its own sentence."""
    if not proof:
        return f"not verified (--no-verify); to do it later: ropext verify {out}"
    if "ggml" in proof:
        return (
            f"verified: file read back; {proof['tensors']} tensors ({bytes_text(proof['bytes'])}) "
            f"unchanged; RoPE frequencies match the plan (largest relative error "
            f"{proof['error']:.1e})"
        )
    done = f"verified with transformers {proof['transformers']}: it loads "
    done += f"{proof['tensors_compared']} tensors"
    if proof["tensors_not_compared"]:
        done += f" ({proof['tensors_not_compared']} packed ones not compared)"
    if "rows_bit_exact" in proof:
        if proof["rows_bit_exact"]:
            done += f"; {proof['rows_bit_exact']:,} old rows are unchanged, bit for bit"
        return f"{done}; {proof['forward']}"
    modules = proof["rotary_modules"] + proof["attention_modules"]
    error = proof["worst"]["error"]
    done += f"; the RoPE and attention settings of {modules} modules match the plan (largest "
    done += f"relative error {error:.1e})"
    if proof["forward_agrees"]:
        return f"{done}; a forward pass matches, too"
    if proof["forward"]:
        return f"{done}; {proof['forward']}"
    return done


def served_headline(read: Served) -> str:
    """Write the first line of the report of a model that is extended already. `ropext plan` shows
    how far, and by which method."""
    head = f"{read.directory}: {read.model.context:,} tokens"
    if read.record:
        head += f", extended from {read.record.context:,} by {read.record.method}"
    elif scaled := scaling_in_words(read.model):
        head += f", {scaled}"
    return head


def served_details(read: Served, verdict: str = "") -> str:
    """Write the report of `ropext plan --details` for an extended model. It has the verdict of its
    gate, and each engine's reading of the config."""
    head = served_headline(read)
    readers = loader_lines(read.readings)
    lines = serving_text(read.serving)
    first = f"{head}\n{verdict}" if verdict else head
    return "\n".join([first, "", READ, readers, "", "to serve it", lines])


def verification_text(verdict: str, checks: Iterable[tuple[bool | None, str, str]]) -> str:
    """Write the report of `ropext verify` as text: the verdict and the findings. `ropext plan DIR`
    names the engines that read the model."""
    states = {True: "ok", False: "WRONG", None: "NOT KNOWN"}
    rows = [(states[passed], what, sentence) for passed, what, sentence in checks]
    return f"{verdict}\n\n{columns(['', 'what', 'found'], rows)}"


def evaluation_costs_text(counts: Any) -> str:
    """Lay out the report of `ropext eval --dry-run` as text: a table of passes and tokens, the
    bytes, and how each document is read."""
    read = "each document in one pass"
    if counts.chunk:
        read = f"in chunks of {counts.chunk} tokens with a KV cache"
        if counts.cache_bytes is not None:
            read += f" of {bytes_text(counts.cache_bytes)}"
    if counts.columns is None:
        read += f", logits in slices of {counts.slice_tokens} tokens"
    else:
        read += f", logits in tiles {counts.columns} entries of the vocabulary wide"
    rows = [(part.what, str(part.passes), str(part.tokens)) for part in counts.work]
    return "\n".join(
        [
            columns(("work", "passes", "tokens per pass"), rows),
            "",
            f"passes   {counts.passes}",
            f"tokens   {counts.tokens:,}",
            f"weights  {bytes_text(counts.weight_bytes)}",
            f"read     {read}",
        ]
    )
