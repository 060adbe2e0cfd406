"""The kit for authors of loaders: true spectra, the same bytes, no false alarm, every bug seen."""

import json
import math
import os
import re
import subprocess
import sys

import kit as conformance
import numpy as np
import pytest
import telling
import transcriptions
from bases import SIZES, keys_of
from check import findings
from kit import FORMS, spectra

from ropext.base.errors import RopextError, UsageError
from ropext.base.jsontext import read_json
from ropext.families import read
from ropext.verifying import proof

CHOSEN = ("llama", "gemma3_text", "deepseek_v3", "glm4")
# What a small reader may have wrong, in the words of the kit.
BUGS = (
    "without its scaling",
    "with theta 10,000",
    "with its sliding layers scaled",
    "with its factor applied twice",
    "without its attention factor",
    "without its betas",
    "without mscale_all_dim in its softmax",
    "with all channels rotated",
    "with low_freq_factor and high_freq_factor swapped",
    "with its long factors for short inputs",
)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    output = tmp_path_factory.mktemp("kit") / "kit"
    conformance.write_kit(output, CHOSEN)
    return output


def answers(kit, families, form_read=None):
    """Run stock transformers on the files of a kit; `form_read` takes another config."""
    import torch
    import transformers

    expected, ids = read_json(kit / "expected.json"), read_json(kit / "tokens.json")
    out = {}
    for family in families:
        out[family] = {}
        for form in expected["families"][family]:
            whole = "text_config" in read_json(kit / family / form / "config.json")
            kind = "ImageTextToText" if whole else "CausalLM"
            model = (
                getattr(transformers, f"AutoModelFor{kind}")
                .from_pretrained(
                    kit / family,
                    config=transformers.AutoConfig.from_pretrained(
                        kit / family / (form_read or form)
                    ),
                    dtype=torch.float32,
                )
                .eval()
            )
            given = {}
            for length, positions in expected["positions"].items():
                text = torch.as_tensor(ids[: int(length)])
                with torch.inference_mode():
                    said = model(text[None]).logits[0].log_softmax(-1)
                given[length] = [said[at - 1, text[at]].item() for at in positions]
            out[family][form] = {"log_probabilities": given}
    return expected, out


def plain(family):
    return {"model_type": family} | keys_of(family, SIZES, {})


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "glm4", "phi3"])
def test_the_expected_values_equal_the_papers_and_the_plan(family):
    for form in (conformance.PLAIN, *conformance.FORMS):
        try:
            config = conformance.extended(plain(family), form) if form in FORMS else plain(family)
        except RopextError:
            continue
        for site, found in zip(read(config).sites, spectra(plain(family), form), strict=True):
            made = site.rope.spectrum
            assert found["layer_type"] == site.label
            for key in ("inv_freq", "attention_factor", "softmax_factor"):
                assert getattr(made, key) == pytest.approx(found[key], rel=1e-12), (form, key)
            short = found["short_inv_freq"] or found["inv_freq"]
            assert (made.short_inv_freq or made.inv_freq) == pytest.approx(short, rel=1e-12)


def test_the_kit_has_the_numbers_of_the_papers(kit, monkeypatch, tmp_path):
    (found,) = read_json(kit / "expected.json")["families"]["llama"]["yarn-custom"]["embeddings"]
    assert found["inv_freq"] == transcriptions.yarn(32, 5e4, 128, 512, 8, 2)[0]
    assert found["attention_factor"] == 1.3
    (found,) = spectra(plain("deepseek_v3"), "yarn-mscale")
    assert found["attention_factor"] == 1
    assert found["softmax_factor"] == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    (found,) = spectra(plain("llama"), "longrope-two-sets")
    assert found["short_inv_freq"][15] == pytest.approx(5e4 ** (-15 / 16) / (1 + 15 / 16))
    monkeypatch.setattr(conformance, "PAPERS", tmp_path / "transcriptions.py")
    with pytest.raises(UsageError, match="stands in a checkout"):
        spectra(plain("llama"), "yarn")


def test_windowed_layers_are_not_scaled():
    full, windowed = (
        {own["layer_type"]: own for own in spectra(plain("gemma3_text"), form)}
        for form in ("yarn", conformance.PLAIN)
    )
    assert full["sliding_attention"] == windowed["sliding_attention"]
    assert full["full_attention"] != windowed["full_attention"]


def test_no_alarm_on_stock_transformers(kit):
    expected, given = answers(kit, CHOSEN)
    assert set(given["deepseek_v3"]) == {"plain", *conformance.FORMS}
    assert not any(findings(expected, given).values())
    del given["llama"]["yarn"]
    assert findings(expected, given)["llama/yarn"] == ["no answer"]


def test_a_reader_without_scaling_is_found_in_every_form(kit):
    expected, given = answers(kit, CHOSEN, "plain")
    for name, said in findings(expected, given).items():
        assert (name.endswith("/plain") and not said) or (
            "it reads the form without its scaling" in said
        ), (name, said)


def test_every_bug_differs_from_the_right_reading(kit):
    expected = read_json(kit / "expected.json")
    told = {}
    for family, forms in expected["families"].items():
        for form, own in forms.items():
            for what, values in own["misread"].items():
                answer = {family: {form: {"log_probabilities": values}}}
                said = findings(expected, answer)[f"{family}/{form}"]
                assert f"it reads the form {what}" in said
                told.setdefault(what, set()).add(form)
    assert not set(BUGS) - set(told)
    assert told["with its long factors for short inputs"] == {"longrope-two-sets"}


def test_embeddings_are_checked_too(kit):
    expected = read_json(kit / "expected.json")
    (right,) = expected["families"]["llama"]["yarn"]["embeddings"]
    wrong = {"inv_freq": [1.001 * f for f in right["inv_freq"]], "attention_factor": 1.0}
    given = {"llama": {"yarn": {"embeddings": {"": wrong}}}}
    said = findings(expected, given)["llama/yarn"]
    assert [sentence.split(" is off")[0] for sentence in said] == ["inv_freq", "attention_factor"]
    given = {"llama": {"yarn": {"embeddings": {"": {"inv_freq": right["inv_freq"]}}}}}
    assert findings(expected, given)["llama/yarn"] == []


def test_nan_log_probabilities_are_wrong(kit):
    expected = read_json(kit / "expected.json")
    values = [math.nan for _ in expected["positions"]["128"]]
    given = {"llama": {"yarn": {"log_probabilities": {"128": values}}}}
    assert findings(expected, given)["llama/yarn"] == ["log-probabilities are off by up to inf"]


def test_the_script_of_the_kit_runs_alone(kit, tmp_path):
    own = read_json(kit / "expected.json")["families"]["llama"]
    right = {form: {"log_probabilities": one["log_probabilities"]} for form, one in own.items()}
    bug = {"log_probabilities": own["linear"]["misread"]["without its scaling"]}
    paths = kit / "check.py", kit / "expected.json", tmp_path / "answers.json"
    for answer, code, sentence in (
        ({"llama": right}, 0, "llama/linear: right"),
        ({"llama": right | {"linear": bug}}, 3, "it reads the form without its scaling"),
        ({"llama": {**right, "linear": {}}}, 3, "llama/linear: no answer"),
        ({"llama": {"yarn": {"log_probabilities": {"128": [1.0]}}}}, 3, "off by up to inf"),
        ({}, 3, "no family was answered"),
        ({"llama": {"su": {}}}, 2, "llama: form 'su' is not in the kit, which has plain, linear,"),
        ({"lama": {}}, 2, "family 'lama' is not in the kit, which has llama, "),
    ):
        paths[2].write_text(json.dumps(answer))
        done = subprocess.run(
            [sys.executable, "-I", "-S", *map(str, paths)], capture_output=True, text=True
        )
        assert done.returncode == code
        assert sentence in (done.stderr if code == 2 else done.stdout)
        assert "Traceback" not in done.stderr


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_script_writes_the_same_bytes_and_replaces_only_on_request(kit, tmp_path, capsys):
    output = tmp_path / "own"
    words = ["-o", str(output), "--family", "llama"]
    conformance.main(words)
    forms = read_json(kit / "expected.json")["families"]["llama"]
    assert f"wrote {output}: 1 families, {len(forms)} configs" in capsys.readouterr().out
    first = contents(output)
    weights = "llama/model.safetensors"
    assert first[weights] == (kit / weights).read_bytes()
    for wrong, says in (
        (words, f"{output} (--output) exists; --force"),
        (["-o", str(tmp_path / "x"), "--family", "bert"], "error: --family bert is not in the kit"),
    ):
        with pytest.raises(SystemExit) as stop:
            conformance.main(wrong)
        assert stop.value.code == 2
        assert says in capsys.readouterr().err
    conformance.main([*words, "--force"])
    assert contents(output) == first


@pytest.mark.slow
def test_a_reader_measures_the_end_of_a_long_text(kit, tmp_path):
    """More tokens than positions told: the same numbers as from all logits at once."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.arange(2400) % 250
    np.save(tmp_path / "ids.npy", ids)
    reader = conformance.HERE / "read_transformers.py"
    words = [str(tmp_path / "ids.npy"), str(tmp_path / "told.npz"), str(kit / "llama")]
    subprocess.run([sys.executable, str(reader), *words], check=True)
    told = np.load(tmp_path / "told.npz")[str(kit / "llama")]
    model = AutoModelForCausalLM.from_pretrained(kit / "llama", dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.as_tensor(ids)[None]).logits[0, :-1].double().log_softmax(-1)
    wanted = rows.gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()
    assert told.shape == (telling.LAST,)
    np.testing.assert_allclose(told, wanted[-telling.LAST :], atol=1e-4)


def test_readers_import_nothing_of_ropext():
    for path in [*conformance.HERE.glob("read_*.py"), conformance.HERE / "telling.py"]:
        assert not re.search(r"^\s*(import|from) ropext", path.read_text("utf-8"), re.M), path


def test_forms_that_a_family_cannot_hold_are_left_out():
    with pytest.raises(RopextError, match="mscale_all_dim"):
        conformance.extended(plain("llama"), "yarn-mscale")


@pytest.mark.skipif("KIT" not in os.environ, reason="`.ci/slow loaders` runs it")
def test_the_whole_kit_is_small_and_stock_computes_its_spectra(tmp_path):
    made = conformance.write_kit(tmp_path / "kit")
    assert made["bytes"] <= 40e6
    names = [(family, form) for family, forms in made["families"].items() for form in forms]
    places = [tmp_path / "kit" / family / form for family, form in names]
    requests = [proof.BuildRequest(place) for place in places]
    for place, built in zip(places, proof.build(requests, tensors=False), strict=True):
        sites = read(read_json(place / "config.json")).sites
        proof.compare(built, proof.ExpectedRotary(sites, 4), tensors=False)
    expected, given = answers(tmp_path / "kit", made["families"])
    assert not {name: said for name, said in findings(expected, given).items() if said}
