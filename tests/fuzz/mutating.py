"""Ways to spoil a file, from a value of another type down to single bytes.

Every choice comes from one `random.Random`, so that a seed names an input and hypothesis can shrink
one (its `randoms()` strategy is such a source).
"""

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Json = Any
INFINITY = {"__float__": "Infinity"}

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 4, 5, 7, 64, 127, 10**6, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**308),
    *(0.0, -0.0, 0.5, 1.0, 1.0000001, 1.5, 2.0, 1e-12, 1e-30, 5e-324, -1.5, 1e12, 1e30, 1.7e308),
)
WORDS = (
    *("", "4", "1e4", "NaN", "Infinity", "yarn", "linear", "longrope", "llama3", "default", "null"),
    *("dynamic", "proportional", "mrope", "su", "full_attention", "sliding_attention", "../../x"),
    *(
        "a\nforged line",
        "\x1b[31mred",
        "<script>alert(1)</script>",
        "\ud800",
        "é" * 5,
        "x" * 3000,
        "`x`|*y*",
    ),
)
GARBAGE = (
    *(None, True, False, [], {}, [[]], {"": {}}, [None], [1, "a"], {"a": [1, {"b": None}]}),
    *([1.0] * 300, [INFINITY] * 4, INFINITY, {"__float__": "NaN"}, [0] * 5000),
)
ROPE_KEYS = (
    *("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings", "head_dim"),
    *("original_max_position_embeddings", "partial_rotary_factor", "sliding_window", "layer_types"),
    *(
        "num_attention_heads",
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "rotary_pct",
    ),
    *(
        "text_config",
        "model_type",
        "auto_map",
        "no_rope_layers",
        "qk_rope_head_dim",
        "kv_lora_rank",
    ),
    *(
        "rotary_emb_base",
        "rope_local_base_freq",
        "layer_rope_theta",
        "use_sliding_window",
        "factor",
    ),
    *("max_window_layers", "sliding_window_pattern", "per_layer_config", "quantization_config"),
    *(
        "attention_chunk_size",
        "vocab_size",
        "model_max_length",
        "type",
        "rope_type",
        "mscale_all_dim",
    ),
)


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a document."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value[:8])
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def _holder(document: Json, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def anything(random: Random) -> Json:
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind == 1:
        return random.choice(WORDS)
    if kind == 2:
        return copy.deepcopy(random.choice(GARBAGE))
    return rope_dict(random)


def rope_dict(random: Random) -> dict[str, Any]:
    """A rope dict that is mostly right, or nearly."""
    kind = random.choice(("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
    out: dict[str, Any] = {random.choice(("rope_type", "type")): kind}
    if kind != "default" and random.random() < 0.95:
        out["factor"] = random.choice((1.0, 1.0001, 2.0, 4, 8.0, 40.0, 1000.0, 4096.0))
    if random.random() < 0.5:
        out["rope_theta"] = random.choice((1.0001, 2.0, 1e4, 10000, 5e5, 1e12, 1e29))
    if kind in ("yarn", "llama3", "longrope") and random.random() < 0.8:
        out["original_max_position_embeddings"] = random.choice((1, 2, 3, 256, 512, 4096, 8192))
    if kind == "llama3":
        out["low_freq_factor"] = random.choice((1.0, 1, 4.0, 1e-6))
        out["high_freq_factor"] = random.choice((4.0, 4, 1.0, 1.0000001, 1e9))
    if kind == "yarn":
        for key, values in (
            ("beta_fast", (32.0, 1.0, 0, 1e-9, 1e9)),
            ("beta_slow", (1.0, 32.0, 0, 1e-9)),
            ("attention_factor", (1.0, 1.2, 0.0, 1e9)),
            ("mscale", (1.0, 0.707, 0)),
            ("mscale_all_dim", (1.0, 0.707, 0)),
            ("truncate", (False, True)),
        ):
            if random.random() < 0.25:
                out[key] = random.choice(values)
    if kind == "longrope":
        pairs = random.choice((1, 8, 16, 32, 64))
        out["long_factor"] = [1 + i * random.choice((0, 0.5, 1e9)) for i in range(pairs)]
        out["short_factor"] = random.choice(
            (out["long_factor"], [1.0] * pairs, [1.0] * (pairs + 1))
        )
    return out


# Each changes the document in place; the first ones keep most documents plannable.
def _sane(document: Json, random: Random) -> None:
    document[random.choice(("rope_theta", "rope_scaling", "max_position_embeddings"))] = None
    document["rope_theta"] = random.choice((1.5, 500.0, 10000.0, 1e6, 1e8))


def _length(document: Json, random: Random) -> None:
    document["max_position_embeddings"] = random.choice((1, 2, 3, 64, 512, 4096, 131072, 10**6))


def _scaled(document: Json, random: Random) -> None:
    key = random.choice(("rope_scaling", "rope_parameters"))
    document.pop("rope_parameters" if key == "rope_scaling" else "rope_scaling", None)
    document[key] = rope_dict(random)


def _unknown_key(document: Json, random: Random) -> None:
    document[random.choice(WORDS) or "extra"] = anything(random)


def _drop(document: Json, random: Random) -> None:
    path = random.choice(list(places(document)) or [()])
    if path:
        del _holder(document, path)[path[-1]]


def _replace(document: Json, random: Random) -> None:
    path = random.choice(list(places(document)) or [()])
    if path:
        _holder(document, path)[path[-1]] = anything(random)


def _number(document: Json, random: Random) -> None:
    found = [p for p in places(document) if type(_holder(document, p)[p[-1]]) in (int, float)]
    if found:
        path = random.choice(found)
        _holder(document, path)[path[-1]] = random.choice(NUMBERS)


def _as_text(document: Json, random: Random) -> None:
    path = random.choice(list(places(document)) or [()])
    if path:
        holder = _holder(document, path)
        holder[path[-1]] = json.dumps(holder[path[-1]])


def _rope_key(document: Json, random: Random) -> None:
    document[random.choice(ROPE_KEYS)] = anything(random)


def _second_spelling(document: Json, random: Random) -> None:
    document["rope_theta"] = random.choice((10000.0, 10001.0, 20000))
    document["rope_parameters"] = rope_dict(random)
    document["rope_scaling"] = rope_dict(random) if random.random() < 0.5 else None


def _deep(document: Json, random: Random) -> None:
    value: Json = 1
    for _ in range(random.choice((10, 60, 70, 300))):
        value = [value] if random.random() < 0.5 else {"a": value}
    document[random.choice(ROPE_KEYS)] = value


def _long(document: Json, random: Random) -> None:
    item = random.choice((1, 1.0, "full_attention", None, {}))
    document[random.choice(ROPE_KEYS)] = [item] * random.choice((1000, 1000, 1000, 70000))


def _strange_key(document: Json, random: Random) -> None:
    inner = document.setdefault("rope_parameters", {})
    if isinstance(inner, dict):
        inner[random.choice(WORDS)] = anything(random)


MILD: tuple[Callable[[Json, Random], None], ...] = (_sane, _length, _scaled, _unknown_key)
HARSH: tuple[Callable[[Json, Random], None], ...] = (
    *(_drop, _replace, _number, _as_text, _rope_key, _second_spelling, _strange_key, _rope_key),
    *(_drop, _replace, _number, _deep, _long),
)


def spoiled(document: Json, random: Random, mild: float = 0.4) -> Json:
    """A copy with one to three changes; `mild` of them leave most configs plannable."""
    out = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        holders = [out, *(v for v in out.values() if isinstance(v, dict))]
        holder = random.choice(holders) if random.random() < 0.3 else out
        random.choice(MILD if random.random() < mild else HARSH)(holder, random)
    return out


def reshaped(document: Json, random: Random) -> Json:
    """A copy in which values at any depth have another shape: gone, of another type, inside of a
    list or an object, twice, or what stands elsewhere in the document."""
    out = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 4))):
        paths = list(places(out))
        if not paths:
            return out
        path = random.choice(paths)
        holder, key = _holder(out, path), path[-1]
        value = holder[key]
        other = random.choice(paths)
        others = (
            None,
            [value],
            {"a": value},
            [value, value],
            json.dumps(value),
            copy.deepcopy(_holder(out, other)[other[-1]]),
            anything(random),
            {} if isinstance(value, list) else [],
        )
        if random.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(random.choice(others))
    return out


def encoded(document: Json) -> bytes:
    """As JSON text; Infinity and NaN as Python spells them, lone surrogates as escapes."""
    return json.dumps(document, indent=2).encode()


# Byte-level damage.
PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"1e999", b"9" * 5000),
    *(b"[" * 3000, b'{"a":' * 3000, b'"', b"\\", b",,", b'"a":1,"a":2,', b"\n" * 50),
    *(b"\xed\xa0\x80", b"//x\n"),
)
TOKENS = (b"NaN", b"Infinity", b"1e400", b"-1", b'"1"', b"0x10", b"1" * 400, b"1e-400")
OTHERS = (
    *(b"", b" ", b"null", b"[]", b"3", b'"x"', b"{}", b"{", b"\xff\xfe{\0}\0", b"[" * 200_000),
    *(b"PK\x03\x04", b"\x80\x04.", b'{"model_type":', b"[" + b"0," * 100_000 + b"0]"),
)


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _flip(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def _insert(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(PIECES) + data[at:]


def _token(data: bytes, random: Random) -> bytes:
    """One digit in the text becomes something else."""
    digits = [i for i, c in enumerate(data) if 48 <= c <= 57]
    at = random.choice(digits) if digits else 0
    return data[:at] + random.choice(TOKENS) + data[at + 1 :]


def _twice(data: bytes, random: Random) -> bytes:
    """The first key of the outer object again."""
    end = data.find(b",")
    return data[:end] + b"," + data[1 : end + 1] + data[end + 1 :] if end > 0 else data * 2


def _other(data: bytes, random: Random) -> bytes:
    return random.choice(OTHERS)


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (_cut, _flip, _insert, _token, _twice, _other)


def damaged(data: bytes, random: Random) -> bytes:
    return random.choice(BYTES)(data, random)
