"""The position schemes other than rotation: the rows of each family, and the key for its distances.

Taken from stock transformers: the tensors that grow with the length key, and the row that a
position reads.
"""

from dataclasses import dataclass, replace
from typing import Any

from ropext.base.errors import ConfigError
from ropext.families.config import LONGEST_LIST, REFUSALS, Dict, locate, shown, text_part
from ropext.scaling.rope import SCHEMES, Positions


@dataclass(frozen=True)
class TableRows:
    """One entry: how a family keeps its learned table."""

    tensors: tuple[str, ...] = ("position_embeddings.weight",)  # how their names end
    key: str = "max_position_embeddings"
    context: int = 512  # the value if the key is absent
    offset: int = 0  # rows in front of position 0's row
    beyond: int = 0  # number of rows minus the value of the key
    pad: int | None = None  # positions start behind pad_token_id, whose default this is
    # A key, and the value at which the family has a learned table at all.
    gate: tuple[str, object] = ("position_embedding_type", "absolute")
    causal: bool = False  # predicts the next token, whatever `is_decoder` says


BERT = TableRows()
ROBERTA = TableRows(pad=1)
CLIP = TableRows(tensors=("position_embedding.weight",), context=77)
GPT = TableRows(tensors=("wpe.weight",), key="n_positions", context=1024, causal=True)
BART = TableRows(tensors=("embed_positions.weight",), context=1024, offset=2, beyond=2)
BLENDERBOT = replace(BART, context=512, offset=0, beyond=0)


def _rows(names: str, row: TableRows) -> dict[str, TableRows]:
    """Return a dict that gives each of these model types the same learned table. They do not
    rotate. `names` is one text."""
    return dict.fromkeys(names.split(), row)


TABLES: dict[str, TableRows] = {
    **_rows(
        "albert align_text_model bert bert-generation blip_text_model chinese_clip_text_model "
        "convbert dpr electra ernie flava_text_model fnet layoutlm lxmert "
        "megatron-bert mobilebert rembert roc_bert splinter squeezebert",
        BERT,
    ),
    # If they have sinusoids, they store them, too: rows like others.
    **_rows("distilbert flaubert xlm", BERT),
    "big_bird": replace(BERT, context=4096),
    "git": replace(BERT, context=1024),
    "tapas": replace(BERT, context=1024),
    "vilt": replace(BERT, context=40),
    "visual_bert": replace(
        BERT, tensors=("position_embeddings.weight", "visual_position_embeddings.weight")
    ),
    **_rows("nystromformer yoso", replace(BERT, offset=2, beyond=2, context=4096)),
    **_rows(
        "camembert data2vec-text longformer roberta roberta-prelayernorm xlm-roberta xmod",
        ROBERTA,
    ),
    **_rows(
        "altclip_text_model bridgetower_text_model xlm-roberta-xl", replace(ROBERTA, context=514)
    ),
    "mpnet": replace(BERT, offset=2),  # whatever its pad_token_id
    "markuplm": replace(ROBERTA, pad=0),
    "lilt": replace(
        ROBERTA, pad=0, tensors=("position_embeddings.weight", "box_position_embeddings.weight")
    ),
    **_rows(
        "aimv2_text_model clip_text_model clipseg_text_model groupvit_text_model "
        "metaclip_2_text_model xclip_text_model",
        CLIP,
    ),
    **_rows("siglip_text_model siglip2_text_model", replace(CLIP, context=64)),
    **_rows("owlvit_text_model owlv2_text_model", replace(CLIP, context=16)),
    **_rows("gpt2 gpt-sw3 gpt_bigcode", GPT),
    "gpt_neo": replace(GPT, key="max_position_embeddings", context=2048),
    "openai-gpt": replace(GPT, tensors=("positions_embed.weight",), context=512),
    **_rows("bart mbart mvp plbart", BART),
    "biogpt": replace(BART, causal=True),
    "opt": replace(BART, context=2048, causal=True),
    "pp_formulanet_text": replace(BART, context=2560),
    "trocr": replace(BART, context=512, gate=("use_learned_position_embeddings", True)),
    "blenderbot": replace(BLENDERBOT, context=128),
    "blenderbot-small": BLENDERBOT,
    "bigbird_pegasus": replace(BLENDERBOT, context=4096),
    "led": replace(
        BLENDERBOT,
        tensors=("encoder.embed_positions.weight",),
        key="max_encoder_position_embeddings",
        context=16384,
    ),
}
# nystromformer states 510 tokens, and 512 rows with the two in front.
TABLES["nystromformer"] = replace(TABLES["nystromformer"], context=510)

# Types with positions of more than tokens, or with tables that stock sizes by further keys.
OTHERS = {
    "bark": "holds three models with tables of their own",
    "blip_2_qformer": "reads queries of images, which have no length to extend",
    "canary_decoder": "reads its length from a model of speech",
    "canine": "hashes its positions into buckets",
    "clap_text_model": "saves position numbers beside its table, which have the old length",
    "clvp_decoder": "counts tokens of speech",
    "deberta": "sizes its table of relative positions by the length: longer, it needs new rows",
    "decision_transformer": "counts steps of a game",
    "funnel": "pools its tokens, and no key says how far it tells distances apart",
    "ibert": "keeps a second, quantised copy of its table",
    "imagegpt": "counts pixels",
    "instructblip_qformer": "reads queries of images, which have no length to extend",
    "kosmos-2.5": "counts patches of an image",
    "layoutxlm": "has no model class of its own",
    "luke": "has a second table for entities, which starts at another row",
    "mra": "saves position numbers beside its table, which have the old length",
    "perceiver": "reads its inputs through latents",
    "pop2piano": "counts frames of audio",
    "sam3_lite_text_text_model": "stretches its table to any length by itself",
    "sew-d": "counts frames of audio",
    "udop": "takes its buckets' distances from relative_bias_args, for places on a page too",
    "whisper": "counts frames of audio",
}


@dataclass(frozen=True)
class Distances:
    """One entry: the key up to which a family tells distances apart, which sizes no tensor."""

    keys: tuple[str, ...] = ("relative_attention_max_distance",)  # the first above 0 counts
    context: int = 128  # the value if the keys are absent
    buckets: tuple[str, int] = ("relative_attention_num_buckets", 32)  # the key and its default
    gate: tuple[tuple[str, bool], ...] = ()  # keys and the values that the class needs for it
    # the condition under which the keys do that, in words
    only: str = "that is above half its buckets"


DISTANCES: dict[str, Distances] = {
    **dict.fromkeys(
        ("longt5", "mt5", "pix2struct_text_model", "switch_transformers", "t5", "umt5"), Distances()
    ),
    "deberta-v2": Distances(
        ("max_relative_positions", "max_position_embeddings"),
        512,
        ("position_buckets", -1),
        (("relative_attention", True), ("position_biased_input", False)),
        only="position_buckets is above 0, relative_attention true and position_biased_input false"
        " (otherwise the key sizes a tensor, or a table of absolute positions is added)",
    ),
    # ALiBi's keys state the trained length; stock MPT reads no input beyond its key.
    "bloom": Distances(("seq_length",), 0, ("", 0)),
    "falcon": Distances(("max_position_embeddings",), 2048, ("", 0)),
    "mpt": Distances(("max_seq_len",), 2048, ("", 0)),
    "xlnet": Distances(
        ("clamp_len",), -1, ("", 0), only="that is above 0: else nothing is clamped"
    ),
}


def read_positions(config: dict[str, Any]) -> Positions | None:
    """Return the scheme of a model that does not rotate, such as a learned table, buckets or
    slopes.

    Return None if the model rotates, or has no positions.
    """
    model_type, text_type, path, scheme = locate(config)
    part = text_part(config, path)
    if text_type == "falcon" and part.get("alibi") is True:
        scheme = "alibi"
    if scheme not in SCHEMES:
        return None
    text = Dict(part, ".".join(path))
    row = TABLES.get(text_type)
    positions = Positions(model_type, text_type, path, scheme, 0)
    if text_type in DISTANCES:
        return _distances(positions, text, DISTANCES[text_type])
    if row is None or text.values.get(row.gate[0]) not in (None, row.gate[1]):
        length = text.integer("max_position_embeddings", low=-1) or text.integer("max_seq_len") or 0
        return replace(positions, context=max(0, length))
    offset = row.offset
    if row.pad is not None:
        stated = text.integer("pad_token_id", low=0)
        offset = 1 + (row.pad if stated is None else stated)
    length = text.integer(row.key) or text.integer("max_position_embeddings") or row.context
    key = row.key if text.has(row.key) or not text.has("max_position_embeddings") else (
        "max_position_embeddings"
    )  # fmt: skip
    context = length + row.beyond - offset
    if context < 1:
        raise ConfigError(
            f"{text.name(key)} is {length}, which leaves no position after {offset} reserved rows"
        )
    return replace(
        positions,
        context=context,
        key=key,
        tensors=row.tensors,
        offset=offset,
        beyond=row.beyond,
        causal=row.causal or part.get("is_decoder") is True,
    )


def _distances(positions: Positions, text: Dict, row: Distances) -> Positions:
    """Return the scheme of a model that does not rotate. Add the key up to which it tells tokens
    apart, if it has one."""
    buckets = text.integer(row.buckets[0], low=-1, high=LONGEST_LIST) or row.buckets[1]
    stated = {key: text.integer(key, low=-1) or 0 for key in row.keys}
    key = next((key for key, length in stated.items() if length > 0), row.keys[-1])
    positions = replace(positions, context=stated[key] or row.context, key=key, buckets=buckets)
    gated = any(text.values.get(gate) is not value for gate, value in row.gate)
    single = buckets // 2 + 1 if buckets else 0  # distances with a bucket of their own
    if gated or 0 != buckets < 4 or positions.context <= single:
        return replace(positions, context=max(0, positions.context), key="")
    return positions


def refusal(scheme: Positions) -> str:
    """Return why a model family that does not rotate is not extended, and the config under which it
    is, if there is one."""
    if scheme.text_type in DISTANCES and scheme.kind != "alibi":
        row = DISTANCES[scheme.text_type]
        return f"{scheme.text_type!r} is extended by its {' or '.join(row.keys)} where {row.only}"
    if scheme.text_type in TABLES:
        key, wanted = TABLES[scheme.text_type].gate
        return f"{scheme.text_type!r} has a learned table only where {key} is {shown(wanted)}"
    if scheme.text_type in OTHERS:
        return f"{scheme.text_type!r} {OTHERS[scheme.text_type]}, so it is not extended"
    return f"{scheme.text_type!r} {REFUSALS[scheme.kind]}; there is nothing here to write"
