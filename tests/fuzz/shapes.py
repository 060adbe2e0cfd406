"""Documents of another shape, as hypothesis draws and shrinks them.

A value is gone, of another type, nested, doubled, huge, or taken from another place. A record
becomes part of a chain. At last come bytes that are no document.
"""

import copy
import json
from typing import Any

from fuzz import seeds
from hypothesis import strategies as st

Json = Any
Path = tuple[Any, ...]

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 4, 5, 7, 64, 127, 10**6, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**308),
    *(0.0, -0.0, 0.5, 1.0, 1.0000001, 1.5, 2.0, 1e-12, 1e-30, 5e-324, -1.5, 1e12, 1e30, 1.7e308),
)
WORDS = (
    *("", "4", "1e4", "NaN", "Infinity", "yarn", "linear", "longrope", "llama3", "default", "null"),
    *("dynamic", "proportional", "mrope", "su", "full_attention", "sliding_attention", "../../x"),
    *("é" * 5, "x" * 3000, "`x`|*y*"),
)
ROPE_KEYS = (
    *("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings", "head_dim"),
    *("original_max_position_embeddings", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("num_attention_heads", "hidden_size", "num_hidden_layers", "num_key_value_heads"),
    *("rotary_pct", "text_config", "model_type", "auto_map", "no_rope_layers", "qk_rope_head_dim"),
    *("kv_lora_rank", "rotary_emb_base", "rope_local_base_freq", "layer_rope_theta", "factor"),
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "per_layer_config"),
    *("quantization_config", "attention_chunk_size", "vocab_size", "model_max_length", "type"),
    *("rope_type", "mscale_all_dim"),
)
# What would act on a terminal, a page or an encoding.
HOSTILE = ("a\nforged line", "\x1b[31mred", "<script>alert(1)</script>", "\ud800")
SOME_WORDS = st.sampled_from(WORDS) | st.sampled_from(HOSTILE)
SOME_KEYS = st.sampled_from(ROPE_KEYS) | SOME_WORDS | st.text(max_size=8)


def _as_record(number: str) -> dict[str, str]:
    """Return a new object each time, because a later change may alter it."""
    return {"__float__": number}


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    SOME_WORDS,
    st.text(max_size=12),
    st.sampled_from(("Infinity", "NaN")).map(_as_record),
)


def _grown(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.lists(inner, max_size=4) | st.dictionaries(SOME_KEYS, inner, max_size=4)


VALUES = st.recursive(SCALARS, _grown, max_leaves=6)


KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "longrope")


@st.composite
def rope_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a rope dict that is right or nearly right."""
    kind = draw(st.sampled_from(KINDS))
    out: dict[str, Any] = {draw(st.sampled_from(("rope_type", "type"))): kind}
    keys: dict[str, tuple[Any, ...]] = {"rope_theta": (1.0001, 2.0, 1e4, 10000, 5e5, 1e12, 1e29)}
    if kind != "default":
        keys["factor"] = (1.0, 1.0001, 2.0, 4, 8.0, 40.0, 1000.0, 4096.0)
    if kind in ("yarn", "llama3", "longrope"):
        keys["original_max_position_embeddings"] = (1, 2, 256, 4096, 8192)
    if kind == "llama3":
        keys["low_freq_factor"] = (1.0, 1, 4.0, 1e-6)
        keys["high_freq_factor"] = (4.0, 4, 1.0, 1.0000001, 1e9)
    if kind == "yarn":
        keys["beta_fast"] = (32.0, 1.0, 0, 1e-9, 1e9)
        keys["beta_slow"] = (1.0, 32.0, 0, 1e-9)
        keys["attention_factor"] = (1.0, 1.2, 0.0, 1e9)
        keys["mscale"] = (1.0, 0.707, 0)
        keys["mscale_all_dim"] = (1.0, 0.707, 0)
        keys["truncate"] = (False, True)
    for key, values in keys.items():
        rare = key in ("rope_theta", "mscale", "mscale_all_dim", "truncate") or "beta" in key
        if draw(st.sampled_from((True, False) if rare else (True, True, True, True, False))):
            out[key] = draw(st.sampled_from(values))
    if kind == "longrope":
        pairs = draw(st.sampled_from((16, 16, 16, 12, 8, 1, 64)))  # most seeds have 16
        step = draw(st.sampled_from((0, 0.5, 1e9)))
        out["long_factor"] = [1 + i * step for i in range(pairs)]
        short = (out["long_factor"], [1.0] * pairs, [1.0] * (pairs + 1))
        out["short_factor"] = draw(st.sampled_from(short))
    return out


def places(value: Json, path: Path = ()) -> list[Path]:
    """Return the path of every value inside a document; a long list gives only its first ones."""
    found: list[Path] = []
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value[:8])
    for key, inner in pairs:
        found.append((*path, key))
        found += places(inner, (*path, key))
    return found


def at(document: Json, path: Path) -> Json:
    for key in path:
        document = document[key]
    return document


# --- one change ---

OTHERS = (
    *("typed", "typed", "number", "rope", "list", "object", "twice", "text", "empty"),
    *("elsewhere", "elsewhere", "deep", "huge"),
)
CHANGES = ("other", "other", "other", "other", "gone", "added", "name")
HUGE = (1000, 70_000)  # items of a list
DEEP = (10, 60, 70, 400)  # levels of a value


def nested(value: Json, levels: int, key: str = "a") -> Json:
    for level in range(levels):
        value = [value] if level % 2 else {key: value}
    return value


@st.composite
def _other(draw: st.DrawFn, document: Json, value: Json) -> Json:
    """Draw a replacement for a value."""
    if isinstance(value, str) and draw(st.booleans()):
        return draw(SOME_WORDS)
    paths = places(document)
    kind = draw(st.sampled_from(OTHERS))
    if kind == "typed":
        return draw(VALUES)
    if kind == "number":
        return draw(st.sampled_from(NUMBERS))
    if kind == "rope":
        return draw(rope_dicts())
    if kind == "list":
        return [value]
    if kind == "object":
        return {draw(SOME_KEYS): value}
    if kind == "twice":
        return value + value if isinstance(value, list) else [value, value]
    if kind == "text":
        return json.dumps(value)
    if kind == "empty":
        return {} if isinstance(value, list) else []
    if kind == "elsewhere":
        return copy.deepcopy(at(document, draw(st.sampled_from(paths))))
    if kind == "deep":
        return nested(value, draw(st.sampled_from(DEEP)))
    if places(value):
        return [value] * 10
    return [value] * draw(st.sampled_from(HUGE))


@st.composite
def reshaped(draw: st.DrawFn, document: Json) -> Json:
    """Draw a copy with one to three values of another shape, at any depth."""
    out = copy.deepcopy(document)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        paths = places(out)
        if not paths:
            return out
        path = draw(st.sampled_from(paths))
        holder = at(out, path[:-1])
        key = path[-1]
        change = draw(
            st.sampled_from(("other", "other", "other", "other", "gone", "added", "name"))
        )
        if change == "gone":
            del holder[key]
        elif change == "added":
            target = out if draw(st.booleans()) or isinstance(holder, list) else holder
            target[draw(SOME_KEYS)] = draw(VALUES | rope_dicts())
        elif change == "name" and isinstance(holder, dict):
            holder[draw(SOME_KEYS)] = holder.pop(key)
        else:
            holder[key] = draw(_other(out, holder[key]))
    return out


@st.composite
def plannable(draw: st.DrawFn, config: Json) -> Json:
    """Draw a copy of a config that most often can be extended."""
    out = copy.deepcopy(config)
    parts = [out] + [part for part in out.values() if isinstance(part, dict)]
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        holder = draw(st.sampled_from(parts)) if draw(st.integers(0, 3)) == 3 else out
        change = draw(st.sampled_from(("theta", "length", "scaled", "unknown", "two")))
        if change == "theta":
            holder[draw(st.sampled_from(("rope_scaling", "max_position_embeddings")))] = None
            holder["rope_theta"] = draw(st.sampled_from((1.5, 500.0, 10000.0, 1e6, 1e8)))
        elif change == "length":
            lengths = (1, 2, 3, 64, 512, 4096, 131072, 10**6)
            holder["max_position_embeddings"] = draw(st.sampled_from(lengths))
        elif change == "scaled":
            key, other = draw(st.permutations(("rope_scaling", "rope_parameters")))
            holder.pop(other, None)
            holder[key] = draw(rope_dicts())
        elif change == "unknown":
            holder[draw(st.sampled_from(WORDS[1:]))] = draw(VALUES)
        else:
            holder["rope_theta"] = draw(st.sampled_from((10000.0, 10001.0, 20000)))
            holder["rope_parameters"] = draw(rope_dicts())
            holder["rope_scaling"] = draw(st.none() | rope_dicts())
    return out


@st.composite
def records(draw: st.DrawFn) -> Json:
    """Draw a record of another shape, which may be in a long chain of its own links."""
    record = draw(reshaped(draw(st.sampled_from(seeds.records()))))
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 3, 40)))):
        base = record.get("base") if isinstance(record, dict) else None
        if not isinstance(base, dict):
            return record
        link = {key: record[key] for key in seeds.LINK if key in record}
        record = copy.deepcopy(draw(st.sampled_from(seeds.records())))
        record["base"]["extended"] = link
    return record


# --- text and bytes ---

PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"1e999", b"9" * 5000),
    *(b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b",,", b'"a":1,"a":2,', b"\n" * 50),
    *(b"\xed\xa0\x80", b"//x\n", b"0x10", b"1e-400"),
)
NO_DOCUMENTS = (
    *(b"", b" ", b"null", b"[]", b"3", b'"x"', b"{}", b"{", b"\xff\xfe{\0}\0", b"[" * 200_000),
    *(b"PK\x03\x04", b"\x80\x04.", b'{"model_type":', b"[" + b"0," * 100_000 + b"0]"),
)


def encoded(document: Json) -> bytes:
    """Return the document as JSON text; Infinity and NaN as Python spells them, lone surrogates as
    escapes."""
    return json.dumps(document, indent=2).encode()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw bytes that are cut, hold something foreign, state a key twice, or are no document at
    all."""
    kind = draw(st.sampled_from(("cut", "piece", "piece", "key twice", "none")))
    if kind == "none":
        return draw(st.sampled_from(NO_DOCUMENTS))
    if kind == "key twice":
        end = data.find(b",")
        return data[:end] + b"," + data[1 : end + 1] + data[end + 1 :] if end > 0 else data * 2
    place = draw(st.integers(0, len(data)))
    if kind == "cut":
        return data[:place]
    piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4))
    return data[:place] + piece + data[place + draw(st.integers(0, 1)) :]
