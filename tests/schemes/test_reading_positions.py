"""Learned tables by family, against stock transformers: names, rows, and the row of position 0."""

import pytest

from ropext.base.errors import InputError
from ropext.families import schemes
from ropext.families.config import census
from ropext.families.schemes import OTHERS, TABLES
from ropext.scaling.rope import Positions
from ropext.scaling.tables import methods_for

NARROW = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 99,
}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 99,
}
READ = {  # keys of a tiny config, and the length key at which it reads 32 tokens
    "gpt2": (GPT, "n_positions", 32),
    "gpt_neo": (
        {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
        | {"attention_types": [[["global"], 2]]},
        "max_position_embeddings",
        32,
    ),
    "openai-gpt": (GPT, "n_positions", 32),
    "bert": (NARROW, "max_position_embeddings", 32),
    "distilbert": (
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "vocab_size": 99},
        "max_position_embeddings",
        32,
    ),
    "roberta": (NARROW, "max_position_embeddings", 34),
    # Its rows begin at 2 in the code, whatever its padding's id.
    "mpnet": (NARROW | {"pad_token_id": 3}, "max_position_embeddings", 34),
    "lilt": (NARROW | {"hidden_size": 24, "num_attention_heads": 1}, "max_position_embeddings", 33),
    "nystromformer": (NARROW, "max_position_embeddings", 32),
    "opt": (NARROW | {"word_embed_proj_dim": 16, "ffn_dim": 32}, "max_position_embeddings", 32),
    "bart": (BART, "max_position_embeddings", 32),
    "blenderbot-small": (BART, "max_position_embeddings", 32),
    "clip_text_model": (NARROW, "max_position_embeddings", 32),
    "siglip_text_model": (NARROW, "max_position_embeddings", 32),
}


def stock_class(model_type):
    import transformers as hf
    from transformers import CONFIG_MAPPING, PreTrainedModel

    config = CONFIG_MAPPING[model_type]
    for auto in (hf.AutoModel, hf.AutoModelForCausalLM):
        if config in auto._model_mapping:
            known = auto._model_mapping[config]
            return config, known[0] if isinstance(known, list | tuple) else known
    name = config.__module__.replace("configuration", "modeling")
    module = __import__(name, fromlist=["_"])
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    return config, next(
        c
        for c in classes
        if issubclass(c, PreTrainedModel)
        and c.config_class is config
        and not c.__name__.endswith("PreTrainedModel")
    )


@pytest.mark.parametrize("model_type", READ)
def test_stock_reads_the_rows_that_the_table_of_families_says(model_type):
    import torch

    keys, key, length = READ[model_type]
    kind, cls = stock_class(model_type)
    config = kind(**keys, **{key: length})
    found = schemes.read_positions(config.to_dict())
    assert found.context == 32
    model = cls(config).eval()
    seen = {}
    for name, module in model.named_modules():
        if found.is_table(f"{name}.weight"):
            own = seen.setdefault(name, [])
            # An embedding with an offset of its own adds it inside, before it looks rows up.
            weight = module.weight.detach()
            assert len(weight) == found.rows
            module.register_forward_hook(lambda _, __, out, own=own: own.append(out.detach()))
            module.weight.data = torch.arange(len(weight)).float()[:, None].expand_as(weight)
    ids = 16 + torch.arange(32)[None]
    more = {"bbox": torch.zeros(1, 32, 4, dtype=torch.long)} if model_type == "lilt" else {}
    more |= {"decoder_input_ids": ids} if model_type == "blenderbot-small" else {}
    with torch.no_grad():
        model(input_ids=ids, **more)
    assert seen
    for rows in seen.values():
        assert (int(rows[0].min()), int(rows[0].max())) == (found.offset, found.rows - 1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TABLES)
def test_every_family_grows_in_stock_by_the_tensors_that_are_named(model_type):
    from accelerate import init_empty_weights

    kind, cls = stock_class(model_type)
    row, shapes = TABLES[model_type], []
    plain = schemes.read_positions({"model_type": model_type})
    stated = plain.rows - plain.beyond
    for longer in (0, 8):
        with init_empty_weights():
            model = cls(kind(**{row.key: stated + longer}))
        shapes.append({name: tuple(t.shape) for name, t in model.state_dict().items()})
    grown = {name for name in shapes[0] if shapes[0][name] != shapes[1][name]}
    assert grown
    assert grown == {name for name in shapes[0] if plain.is_table(name)}
    assert {shapes[0][name][0] for name in grown} == {plain.rows}
    assert getattr(kind(), row.key) == stated


def test_every_learned_type_of_the_census_has_a_row_or_a_reason():
    learned = {name for name, known in census().items() if known.scheme == "learned"}
    assert learned == (set(TABLES) - {"mpnet"}) | (learned & set(OTHERS))
    assert len(TABLES) >= 45
    for name in TABLES:
        assert [*methods_for(schemes.read_positions({"model_type": name}))] == ["linear", "copy"]
    for name in (*OTHERS, "bloom", "deberta-v2", "xlnet", "marian", "layoutlmv3"):
        found = schemes.read_positions({"model_type": name})
        assert not found.tensors
        assert name in schemes.refusal(found)


def test_a_rotary_config_has_no_such_positions_and_falcon_with_alibi_has():
    assert schemes.read_positions({"model_type": "llama"}) is None
    assert schemes.read_positions({"model_type": "mamba"}) is None
    falcon = schemes.read_positions({"model_type": "falcon", "alibi": True})
    assert falcon.kind == "alibi"
    assert schemes.read_positions({"model_type": "falcon"}) is None


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514}, (512, 2, 514)),
        (
            {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 3},
            (510, 4, 514),
        ),
        ({"model_type": "opt", "max_position_embeddings": 2048}, (2048, 2, 2050)),
        ({"model_type": "clip", "text_config": {"max_position_embeddings": 77}}, (77, 0, 77)),
    ],
)
def test_read_positions_finds_published_lengths(config, wanted):
    found = schemes.read_positions(config)
    assert (found.context, found.offset, found.rows) == wanted


def test_an_odd_offset_gives_one_sentence():
    with pytest.raises(InputError, match="leaves no position after 41 reserved rows"):
        schemes.read_positions(
            {"model_type": "roberta", "max_position_embeddings": 40, "pad_token_id": 40}
        )
    with pytest.raises(InputError, match="pad_token_id must be a whole number"):
        schemes.read_positions({"model_type": "roberta", "pad_token_id": "1"})
    config = {"model_type": "bert", "position_embedding_type": "relative_key"}
    relative = schemes.read_positions(config)
    assert isinstance(relative, Positions)
    assert "only where position_embedding_type is 'absolute'" in schemes.refusal(relative)
