"""Masked language models, evaluated: against a literal loop over stock models on the disk."""

import json

import pytest
import torch
from command_line import run
from json_schema import check
from prepared import costs_of
from small_tokenizer import wrapping_tokenizer
from tiny_checkpoints import write_documents
from transformers import (
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import ropext
from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.evaluation.forward import ReadingMode, TokenScorer
from ropext.pipeline.public import evaluate
from ropext.results.gates import parse_gate
from ropext.results.report.compared import compare_runs
from ropext.results.report.tables import headline_table, main_tables
from ropext.results.report.text import inspection_text

CONTEXT, TARGET, TAIL, STRIDE = 64, 256, 16, 8
LENGTHS = [32, CONTEXT, TARGET]
KEYS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KEYS |= {"intermediate_size": 64, "type_vocab_size": 1, "pad_token_id": 1}


def write(path, kind, config):
    torch.manual_seed(0)
    tokenizer = wrapping_tokenizer()
    model = kind(config(vocab_size=len(tokenizer)))
    with torch.no_grad():
        for own in model.parameters():
            own.mul_(4)  # loud enough that its rows are heard
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write a BERT, and a RoBERTa whose first position reads row 2, with each method's
    extension."""
    path = tmp_path_factory.mktemp("masked")
    kinds = {"bert": (BertForMaskedLM, BertConfig, CONTEXT)}
    kinds["roberta"] = RobertaForMaskedLM, RobertaConfig, CONTEXT + 2
    for name, (kind, config, rows) in kinds.items():
        keys = KEYS | {"max_position_embeddings": rows}
        write(path / name, kind, lambda config=config, keys=keys, **more: config(**keys, **more))
        for method in ("linear", "copy"):
            out = path / f"{name}-{method}"
            ropext.extend(path / name, out, method=method, factor=4, no_verify=True)
    write_documents(path / "docs.jsonl", count=8)
    return path


def asked(place, **changes):
    return {"data": str(place / "docs.jsonl"), "lengths": ",".join(map(str, LENGTHS))} | changes


def nll(done, label, length):
    return done.results["variants"][label]["metrics"][f"tail_nll@{length}"]["value"]


def texts(place):
    lines = (place / "docs.jsonl").read_text().splitlines()
    encode = wrapping_tokenizer().encode
    return [encode(json.loads(line)["text"], add_special_tokens=False) for line in lines]


@torch.no_grad()
def literal(model, place, length):
    """Compute the mean NLL of each document's last tokens, each masked once, in windows of a
    length."""
    model.eval()
    found, tokenizer = [], wrapping_tokenizer()
    mask, after = tokenizer.mask_token_id, tokenizer.sep_token_id
    for text in texts(place):
        window = [0, *text[TARGET - (length - 2) : TARGET], after]
        assert len(window) == length
        for first in range(STRIDE):
            at = [len(window) - 1 - TAIL + first + STRIDE * k for k in range(TAIL // STRIDE)]
            masked = [mask if k in at else own for k, own in enumerate(window)]
            logits = model(input_ids=torch.tensor([masked])).logits[0].log_softmax(-1)
            found += [-float(logits[k, window[k]]) for k in at]
    assert len(found) == 8 * TAIL
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("method", ["linear", "copy"])
def test_both_equal_stocks_reading_of_the_base_and_of_the_output(place, name, method):
    load = AutoModelForMaskedLM.from_pretrained
    base, grown = load(place / name), load(place / f"{name}-{method}")
    saved = evaluate(str(place / f"{name}-{method}"), **asked(place))
    memory = evaluate(str(place / name), **asked(place, method=method, factor="4"))
    check(saved.results, "results")
    assert list(saved.results["variants"]) == ["base", "extended"]
    assert list(memory.results["variants"]) == ["base", f"{method}-4x"]
    for length in LENGTHS:
        short = literal(base, place, min(length, CONTEXT))
        whole = literal(grown, place, length)
        for done in (saved, memory):
            assert nll(done, "base", length) == pytest.approx(short, abs=1e-5)
            label = [*done.results["variants"]][1]
            assert nll(done, label, length) == pytest.approx(whole, abs=1e-5)
    gain = saved.results["variants"]["extended"]["metrics"][f"gain@{TARGET}"]
    assert gain["value"] == pytest.approx(short - whole, abs=1e-5)


def test_a_rotary_encoder_is_read_by_the_same_protocol(place, tmp_path):
    more = {"max_position_embeddings": CONTEXT, "local_attention": 16, "num_hidden_layers": 4}
    base = write(
        tmp_path / "modern",
        ModernBertForMaskedLM,
        lambda **own: ModernBertConfig(
            **KEYS
            | more
            | {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
            | own
        ),
    )
    ropext.extend(base, tmp_path / "yarn", method="yarn", factor=4, no_verify=True)
    done = evaluate(str(tmp_path / "yarn"), **asked(place))
    assert list(done.results["variants"]) == ["base", "untouched", "extended"]
    stock = AutoModelForMaskedLM.from_pretrained(base)
    for length in LENGTHS:
        assert nll(done, "base", length) == pytest.approx(
            literal(stock, place, min(length, CONTEXT)), abs=1e-5
        )
    assert nll(done, "untouched", TARGET) == pytest.approx(literal(stock, place, TARGET), abs=1e-5)
    grown = AutoModelForMaskedLM.from_pretrained(tmp_path / "yarn")
    assert nll(done, "extended", TARGET) == pytest.approx(literal(grown, place, TARGET), abs=1e-5)


def test_tables_name_the_measure_and_other_tails_do_not_compare(place, tmp_path, capsys):
    linear, copy = str(place / "bert-linear"), str(place / "bert-copy")
    first = evaluate(linear, tmp_path / "linear", **asked(place))
    evaluate(copy, tmp_path / "copy", **asked(place))
    evaluate(copy, tmp_path / "longer", **asked(place, lengths="32,64,128"))
    said = "of the last 16 tokens of each document, every 8th masked in one pass"
    assert main_tables(first)[0].title == f"Pseudo-perplexity {said}"
    assert headline_table(first).title.startswith("Tail pseudo-perplexity: the last 16 tokens")
    assert first.results["protocol"] == "pseudo-perplexity"
    assert (first.results["mask_stride"], first.results["tail_tokens"]) == (8, 16)
    names = first.results["variants"]["extended"]["metrics"].keys()
    assert not {name.partition("@")[0] for name in names} & {"cumulative", "yarn", "bpb"}
    assert (tmp_path / "linear" / "plots" / "tail.png").is_file()
    compared = compare_runs([str(tmp_path / "linear"), str(tmp_path / "copy")], tmp_path / "c")[1]
    code, shown = run("compare", tmp_path / "linear", tmp_path / "copy", "--json", capsys=capsys)
    assert (code, json.loads(shown.out)) == (0, compared.to_json() | {"gates": []})
    told = json.loads(shown.out)
    assert list(told) == ["text", "retrieval", "gates"]
    assert told["text"]["lengths"][-1]["length"] == TARGET
    assert "copy:extended" in told["text"]["lengths"][-1]["difference"]
    assert compared.tables[0].title == "Tail pseudo-perplexity, 8 paired documents"
    row = compared.text.lengths[-1]
    assert row.difference["copy:extended"].value == pytest.approx(
        nll(evaluate(copy, **asked(place)), "extended", TARGET) - nll(first, "base", TARGET)
    )
    with pytest.raises(InputError, match="the runs mask different tokens"):
        compare_runs([str(tmp_path / "linear"), str(tmp_path / "longer")])


@torch.no_grad()
def test_a_table_shorter_than_the_probe_is_read():
    config = RobertaConfig(vocab_size=90, max_position_embeddings=34, **KEYS)
    scorer = TokenScorer(RobertaForMaskedLM(config).eval(), ReadingMode(None, 16))
    assert scorer.self_check().split


def test_a_dry_run_counts_every_pass(place):
    costs = costs_of(str(place / "bert-copy"), **asked(place))
    # Of eight documents eight passes at each length, the base's no longer than its own.
    assert costs.passes == 8 * 8 * 5
    assert costs.tokens == 8 * 8 * (2 * (32 + CONTEXT) + TARGET)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl": True}, "--kl is of models that predict the next token"),
        ({"kv": "q8_0"}, "--kv is of models that predict the next token"),
        ({"tasks": "copy"}, "--tasks is for models that predict the next token"),
        ({"chunk": 16}, "--chunk is for models"),
        ({"protocol": "yarn"}, "--protocol is for models"),
        ({"lengths": "2,64"}, "--lengths 2 has no room for text"),
        ({"lengths": "512"}, "reads 256 tokens and no more"),
        ({"gates": [parse_gate("bpb@64 > 1")]}, "no such metric; there are tail@LENGTH"),
    ],
)
def test_options_that_do_not_fit_a_masked_model_are_refused(place, changes, said):
    with pytest.raises(UsageError, match=said):
        evaluate(str(place / "bert-copy"), **asked(place, **changes))


def test_a_model_without_a_head_is_referred_to_its_benchmark(place, tmp_path):
    body = AutoModelForMaskedLM.from_pretrained(place / "bert").bert
    body.save_pretrained(tmp_path)
    wrapping_tokenizer().save_pretrained(tmp_path)
    for names in (["BertModel"], ["BertForMaskedLM"], None):  # by its config, then by its weights
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
        with pytest.raises(UnsupportedModel, match=f"mteb run -m {tmp_path} -b LongEmbed"):
            evaluate(str(tmp_path), **asked(place, lengths="32,64"))


def modernbert(every):
    """A ModernBERT of four layers whose windows reach 8 tokens to each side; every `every`-th layer
    has none."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    windows = {"local_attention": 16, "global_attn_every_n_layers": every}
    tokens = {"vocab_size": 50, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertConfig(num_hidden_layers=4, **sizes, **windows, **tokens)


def test_a_window_to_both_sides_is_described_as_stock_transformers_computes_it():
    config = modernbert(every=2)
    stock = ModernBertForMaskedLM._from_config(config, attn_implementation="eager")
    ids = torch.arange(40)[None] % 50
    seen = [layer[0, 0, 20] > 0 for layer in stock(ids, output_attentions=True).attentions]
    assert seen[0].sum() == 40
    assert torch.equal(seen[1].nonzero()[:, 0], torch.arange(12, 29))  # 8 to each side
    made = ropext.plan(config.to_dict(), factor=9.0)
    assert any("see 8 tokens to each side only" in each for each in made.warnings)
    assert "8 tokens to each side in sliding-window layers" in inspection_text(
        ropext.inspect(config.to_dict())
    )


def test_a_model_with_windows_to_both_sides_reaches_a_window_for_each_layer():
    config = modernbert(every=2)
    config.layer_types = ["sliding_attention"] * 4
    stock = ModernBertForMaskedLM._from_config(config, attn_implementation="eager").double().eval()
    ids = torch.full((1, 100), 3)
    with torch.no_grad():
        logits = stock(ids).logits[0, 50]
        for distance in (32, 33):  # four layers of 8
            changed = ids.clone()
            changed[0, 50 + distance] = 4
            assert torch.equal(stock(changed).logits[0, 50], logits) == (distance == 33)
    assert "reaches 32 tokens to each side" in str(
        ropext.plan(config.to_dict(), factor=2.0).warnings
    )


def test_a_plan_of_a_masked_model_does_not_advise_a_server_of_causal_ones():
    made = ropext.plan(modernbert(every=2).to_dict(), factor=9.0)
    assert any(each.startswith("[far]") for each in made.warnings)
    assert "self-extend" not in f"{made.warnings} {made}"


def test_a_model_that_answers_is_no_sentence_encoder(place, tmp_path):
    keys = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    keys |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    words = {"vocab_size": 300, "max_position_embeddings": CONTEXT}
    BartForConditionalGeneration(BartConfig(**keys, **words)).save_pretrained(tmp_path)
    wrapping_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="neither measures nor trains") as refused:
        evaluate(str(tmp_path), **asked(place, lengths="32,64"))
    assert "mteb" not in str(refused.value)


def test_relative_positions_distinguished_by_a_key(place):
    """DeBERTa reads any length as it is: its base is also read untouched beyond its own."""
    keys = {"relative_attention": True, "position_buckets": 32, "pos_att_type": ["c2p", "p2c"]}
    keys |= KEYS | {"position_biased_input": False, "max_position_embeddings": CONTEXT}
    base, out = place / "deberta", place / "deberta-long"
    write(base, DebertaV2ForMaskedLM, lambda **more: DebertaV2Config(**keys, **more))
    ropext.extend(base, out, factor=4, no_verify=True)
    done = ropext.evaluate(out, **asked(place))
    assert list(done.results["variants"]) == ["base", "untouched", "extended"]
    old, new = (AutoModelForMaskedLM.from_pretrained(path) for path in (base, out))
    for length in LENGTHS:
        own = literal(old, place, min(length, CONTEXT))
        assert nll(done, "base", length) == pytest.approx(own, abs=1e-5)
        for label, model in (("untouched", old), ("extended", new)):
            own = literal(model, place, length)
            assert nll(done, label, length) == pytest.approx(own, abs=1e-5)
    changes = {nll(done, label, TARGET) for label in ("base", "untouched", "extended")}
    assert len(changes) == 3
    more = ropext.evaluate(base, **asked(place, method="max-distance", factor="4"))
    for label, like in (("untouched", "untouched"), ("max-distance-4x", "extended")):
        assert nll(more, label, TARGET) == pytest.approx(nll(done, like, TARGET), abs=1e-6)
