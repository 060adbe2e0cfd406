"""Plan as `--like DIR` requests: the extension of a directory, for the GGUF made of its base."""

import re

from ropext import families, scaling
from ropext.base.errors import InputError, UsageError
from ropext.base.narration import join_for_shells
from ropext.families.loaders.gguf import alike
from ropext.files.checkpoint import Snapshot, open_snapshot
from ropext.files.checkpoint.provenance import SAVED, TRAININGS, Record, read_record
from ropext.files.checkpoint.weights import (
    DECODED,
    Header,
    decoded,
    quantised_row,
    read_header,
    read_tensor,
)
from ropext.files.gguf.file import GgufFile
from ropext.files.gguf.geometry import part_with
from ropext.files.gguf.header import F32, TYPES, GgufHeader
from ropext.files.gguf.keys import close
from ropext.options.extend import KNOBS, Extend, knobs_for
from ropext.scaling import forms
from ropext.scaling.rope import Rope, divisors

NORM = re.compile(r"(?:.*\.)?layers\.(\d+)\.input_layernorm\.weight")
MATRICES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
MATRICES |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
MATRIX = re.compile(
    rf"(?!.*(?:vis|audio)).*\blayers\.(\d+)\.(?:self_attn|mlp)\.({'|'.join(MATRICES)})\.weight"
)
LEAST_BITS = 3  # per weight; with fewer, a row may differ more than the row of another model
_TRAINED = (TRAININGS[1], SAVED)


def request_like(model: Snapshot, request: Extend) -> Extend:
    """Return the request with the settings in ropext.json of `--like DIR`: one divisor per pair,
    the attention factor and both lengths."""
    if not isinstance(model, GgufFile):
        raise UsageError(f"--like DIR needs a GGUF file as MODEL, and {model.name} is not one")
    given = {key for key, value in request if value not in (None, (), False)} - {"like", "even_so"}
    if given - {"for_loaders"}:
        raise UsageError("--like DIR sets length and method; leave the options for these out")
    source = open_snapshot(str(request.like), weights=True)
    record = read_record(source.directory)
    if record is None:
        raise InputError(
            f"--like {request.like} has no ropext.json; name what `ropext extend` or `fit` wrote"
        )
    scaled = [site for site in record.sites if site.scaled]
    read = model.read(context=record.context)
    now = [site.rope.spectrum for site in read.scaled_sites]
    if len(now) != 1 or len(scaled) != 1 or len(now[0].inv_freq) != scaled[0].dim // 2:
        raise _differs(source, model, "its rotary embeddings")
    _check_same(source, model, record)
    wanted = scaled[0].wanted
    attention = wanted.attention_factor / now[0].attention_factor
    lengths = {"context": record.context, "target": record.target, "attention_factor": attention}
    simpler = _by_method(request.changed(**lengths), record, read.scaled_sites[0].rope)
    if simpler is not None:
        return simpler
    short = None
    if wanted.short_inv_freq:
        short = divisors(now[0].inv_freq, wanted.short_inv_freq)
    return request.changed(
        method="longrope",
        pair_factors=divisors(now[0].inv_freq, wanted.inv_freq),
        short_pair_factors=short,
        **lengths,
    )


def _by_method(request: Extend, record: Record, rope: Rope) -> Extend | None:
    """Return the request for a GGUF file by the method read from ropext.json of --like DIR, or None
    if that gives another spectrum. Some GGUF architectures can store it only in that method's own
    form."""
    if record.method not in scaling.METHODS or record.method == "longrope":
        return None
    knobs = {key: value for key, value in record.knobs.items() if key in KNOBS}
    trial = request.changed(method=record.method, **knobs)
    made = scaling.scale(
        rope, record.method, record.target, knobs_for(trial, record.method), trial.attention
    )
    scaled = [site for site in record.sites if site.scaled]
    if not forms.same(scaling.compose(rope, made, record.target), scaled[0].wanted):
        return None
    return trial


def _differs(source: Snapshot, model: GgufFile, what: str) -> InputError:
    """Return the error for a GGUF that was not converted from the directory of --like."""
    place = join_for_shells(source.name)
    return InputError(
        f"{model.name} was not converted from {source.name}: {what} differ, as after training; "
        f"convert it (python convert_hf_to_gguf.py {place} --outfile OUT.gguf), then `ropext "
        f"extend OUT.gguf --like {place} -o LONG.gguf`"
    )


def _check_same(source: Snapshot, model: GgufFile, record: Record) -> None:
    """Open a GGUF file and the checkpoint of --like, and read their headers and tensors. Raise
    InputError if geometry, norms or rows of matrices differ. A quantiser leaves norms in
    float32."""
    theirs = families.as_read(source.config)
    ours = model.as_read()
    if not alike(model.architecture, theirs.text_type):
        raise _differs(source, model, "their types")
    for key in ("layers", "hidden_size", "heads", "kv_heads", "vocab_size"):
        if getattr(theirs, key) != getattr(ours, key):
            raise _differs(source, model, key.replace("_", " "))
    length = model.config["max_position_embeddings"]
    if length not in (record.context, record.target):
        raise _differs(source, model, "the lengths that they were trained for")
    # An adapter does not change the norms. But a GGUF converted from DIR states the new length.
    if any(record.more.get(key) for key in _TRAINED) and length != record.target:
        raise _differs(source, model, "weights")
    _check_norms(source, model)
    for file in source.weight_files:
        header = read_header(source.path(file))
        for key in header.tensors:
            match = MATRIX.fullmatch(key)
            if match is None:
                continue
            name = f"blk.{match[1]}.{MATRICES[match[2]]}.weight"
            part = part_with(model.parts, name)
            if part is not None and not _same_rows(part, name, header, key):
                raise _differs(source, model, f"the numbers of {name}")


def _check_norms(source: Snapshot, model: GgufFile) -> None:
    """Read every norm that a GGUF file has in float32, and its twin in the checkpoint of --like.
    Raise InputError if two differ, or if there is none."""
    places = dict[str, tuple[str, str]]()  # if two keys have one layer number, the last counts
    for file in source.weight_files:
        for key in read_header(source.path(file)).tensors:
            match = NORM.fullmatch(key)
            if match is not None:
                places[f"blk.{match[1]}.attn_norm.weight"] = (file, key)
    compared = 0
    for name, (file, key) in places.items():
        part = part_with(model.parts, name)
        if part is None or not _is_float32(part, name):
            continue
        ours = part.floats(name, signed=True)
        theirs = _floats(source, file, key)
        more_by_one = [value + 1.0 for value in theirs]  # Gemma's converter adds one to each
        if not close(ours, theirs) and not close(ours, more_by_one):
            raise _differs(source, model, f"the numbers of {name}")
        compared += 1
    if not compared:
        raise InputError(
            f"{model.name} has no norm in float32 that could be compared with {source.name}, so "
            "whether both are one model is not known"
        )


def _is_float32(part: GgufHeader, name: str) -> bool:
    """Return whether a GGUF's header lists this tensor as float32, so that --like can compare
    it."""
    tensor = part.tensor(name)
    return tensor is not None and tensor.kind == F32


def _same_rows(part: GgufHeader, name: str, header: Header, key: str) -> bool:
    """Read a matrix's first and last row in a GGUF and in a safetensors file. Return True if they
    agree except for the quantisation. No converter moves these two rows. llama.cpp's converter
    permutes the others of q and k."""
    held = part.tensor(name)
    source = header.tensors[key]
    assert held is not None
    kind, count, size = TYPES.get(held.kind, ("", 1, 0))
    # Measured on seven quantisations of SmolLM2: the error is less than half of this.
    allowed = min(0.4, max(0.01, 8 * 2 ** (-8 * size / count)))
    if held.shape[::-1] != source.shape or 8 * size < LEAST_BITS * count:
        return True
    if source.dtype not in DECODED:
        return True  # packed by a quantiser
    start, end = header.part(key)
    width = held.size // source.shape[0]
    step = (end - start) // source.shape[0]
    for row in (0, source.shape[0] - 1):
        raw = part.read(part.data + held.offset + row * width, width)
        if kind not in DECODED:
            a = quantised_row(raw, held.kind)
        else:
            a = decoded(raw, kind)
        with header.path.open("rb") as stream:
            stream.seek(start + row * step)
            b = decoded(stream.read(step), source.dtype)
        if a is not None and ((a - b) ** 2).sum() > allowed**2 * (b**2).sum():
            return False
    return True


def _floats(source: Snapshot, file: str, key: str) -> list[float]:
    """Return the numbers of a row in a safetensors file, or none if it is quantised."""
    raw, tensor = read_tensor(source.path(file), key)
    if tensor.dtype not in DECODED:
        return []
    numbers: list[float] = decoded(raw, tensor.dtype).tolist()
    return numbers
