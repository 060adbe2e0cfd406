"""An extended GGUF: what ggml computes from it, and that nothing else changed."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import transcriptions
from command_line import run
from gguf_files import ggml, making

import ropext
from ropext.base import staging
from ropext.base.errors import (
    InputError,
    NotExpressible,
    NotMeasured,
    OutputExists,
    ProofFailed,
    RopextError,
    UsageError,
)
from ropext.base.guard import signed
from ropext.base.narration import Call
from ropext.families.loaders.serving import ollama_name
from ropext.files import inspecting
from ropext.files.gguf import open_gguf, proving, writing
from ropext.files.gguf.header import read_gguf
from ropext.pipeline import extending
from ropext.pipeline.python_results import Extended
from ropext.results.report.screen import plan_screen
from ropext.results.report.text import serving_text
from ropext.verifying import verification

KEYS = ("context_length", "rope.freq_base", "rope.scaling")
DRIFT = 64 * 2**-23  # ggml multiplies up a power in float32

METHODS = {
    "pi": {"method": "pi"},
    "ntk": {"method": "ntk"},
    "dynamic": {"method": "dynamic"},
    "yarn": {"method": "yarn"},
    "yarn, its own attention": {"method": "yarn", "attention_factor": 1.3},
    "yarn, its own betas": {"method": "yarn", "beta_fast": 8.0, "beta_slow": 0.5},
    "llama3": {"method": "llama3"},
    "by-parts, attention": {"method": "by-parts", "attention_factor": 1.1},
    "ntk, attention": {"method": "ntk", "attention_factor": 0.9},
}


@pytest.fixture
def base(tmp_path):
    return making.write(tmp_path / "base.gguf", q8=["blk.0.attn_q.weight"])


def extend(base, out, **options):
    options = {"factor": 4.0} | options
    return ropext.extend(str(base), out, **options)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_ggml_computes_the_plan(base, tmp_path, options):
    out = tmp_path / "long.gguf"
    done = extend(base, out, **options)
    wanted = done.plan.main.wanted
    angles, attention = ggml.rope(out, 16)
    np.testing.assert_allclose(angles, wanted.inv_freq, rtol=DRIFT)
    assert attention == pytest.approx(wanted.attention_factor, rel=1e-6)
    assert ggml.keys(out)["llama.context_length"] == 1024
    found = verification.verify(out, against=str(base), deep=True)
    assert found.passed


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_extending_a_gguf_changes_only_rope_keys(base, tmp_path, options):
    out = tmp_path / "long.gguf"
    extend(base, out, **options)
    before, after = ggml.keys(base), ggml.keys(out)
    changed = {k for k in before | after if before.get(k) != after.get(k)}
    assert all(k.startswith(("ropext.", *(f"llama.{key}" for key in KEYS))) for k in changed)
    held, now = ggml.tensors(base), ggml.tensors(out)
    for name, array in held.items():
        assert array.tobytes() == now.pop(name).tobytes()
    assert set(now) <= {"rope_freqs.weight"}
    # Moved by whole pages, so that holes and shared blocks stay.
    assert (read_gguf(out).data - read_gguf(base).data) % 4096 == 0


def test_the_record_is_in_the_file(base, tmp_path):
    out = tmp_path / "long.gguf"
    job = extending.prepare_extension(str(base), {"method": "yarn", "factor": 4.0}, out)
    done = job.make(out, Call(command=("ropext", "extend", "--hf-token=secret")))
    kept = json.loads(ggml.keys(out)["ropext.record"])
    assert kept["method"] == "yarn"
    assert kept["sites"][0]["spectrum"]["digest"] == done.plan.main.wanted.digest()
    opened = ropext.open(out)
    assert opened == Extended(done.written, done.serving, done.plan)
    assert opened.written.files == (out.name, f"{out.name}.Modelfile")
    assert "secret" not in out.read_bytes().decode(errors="replace")
    served = inspecting.read_unchanged(inspecting.open_model(str(out)))
    assert (served.record.context, served.model.context) == (256, 1024)
    lines = {line.loader: line.command for line in served.serving}
    assert lines == {
        "llama.cpp": f"llama-server -m {out} -c 1024 -np 1",
        "ollama": f"ollama create {out.stem} -f {out}.Modelfile",
        "lm-studio": f"lms import --copy {out}\nlms load {out.name} --context-length 1024",
    }


def test_a_written_file_comes_with_the_lines_of_the_programs_that_run_it(
    base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # a long path would break the lines
    out = "long.gguf"
    code, shown = run("extend", base, "--method", "yarn", "--factor", 4, "-o", out, capsys=capsys)
    assert code == 0
    lines = [line.strip() for line in shown.out.partition("to serve it")[2].splitlines()]
    assert f"llama.cpp    llama-server -m {out} -c 1024 -np 1" in lines
    assert f"ollama       ollama create long -f {out}.Modelfile" in lines
    assert f"lm-studio    lms import --copy {out}" in lines
    assert f"lms load {out} --context-length 1024" in lines
    assert "raise the length alone" not in shown.out
    assert f"\nfiles: {out}, {out}.Modelfile\n" in shown.out


@pytest.mark.parametrize("name", ["base.gguf", "BASE.GGUF"])
def test_the_lines_of_a_file_in_a_directory_name_the_file(tmp_path, name):
    base = making.write(tmp_path / name)
    out = tmp_path / "long"
    extend(base, out, method="yarn")
    (file,) = out.glob("*.gguf")
    assert file.stem == Path(name).stem
    served = {
        line.loader: line.command
        for line in inspecting.read_unchanged(inspecting.open_model(str(out))).serving
    }
    assert served["llama.cpp"] == f"llama-server -m {file} -c 1024 -np 1"
    modelfile = served["ollama"].rpartition(" ")[2]
    assert Path(modelfile).is_file()
    again = inspecting.plan(str(out), factor=2.0, method="yarn", again=True)
    lines = {line.loader: line.command for line in again.serving(str(tmp_path / "longer"))}
    assert lines["llama.cpp"] == f"llama-server -m {tmp_path / 'longer' / file.name} -c 2048 -np 1"


# What llama-server -lv 4 (commit 7e4c0a9) logged of a yarn by 2 from 8,192 tokens.
LOGGED = """
print_info: n_ctx_train           = 16384
print_info: rope type             = 0
print_info: rope scaling          = yarn
print_info: freq_base_train       = 100000.0
print_info: freq_scale_train      = 0.5
print_info: n_ctx_orig_yarn       = 8192
"""


@pytest.mark.parametrize(
    ("method", "kind", "scale"),
    [("yarn", "yarn", "0.25"), ("pi", "linear", "0.25"), ("ntk", "", ""), ("llama3", "", "")],
)
def test_how_the_log_of_llama_cpp_shows_the_scaling(base, tmp_path, method, kind, scale):
    out = tmp_path / "long.gguf"
    made = extend(base, out, method=method).plan
    names = {line.split(":")[1].split("=")[0].strip() for line in LOGGED.split("\n") if line}
    shown = dict(part.split(" = ") for part in made.log.partition(" has ")[2].split(", ") if part)
    assert shown.keys() <= names
    keys = ggml.keys(out)
    if method == "llama3":  # divisors, which no line of the log shows
        assert not shown
        return
    assert shown["n_ctx_train"] == str(keys["llama.context_length"])
    assert shown.get("rope scaling", "") == kind
    assert shown.get("freq_scale_train", "") == scale
    if not kind:
        assert float(shown["freq_base_train"]) == pytest.approx(
            keys["llama.rope.freq_base"], abs=0.06
        )
    assert f"to check it: {made.log}" in " ".join(plan_screen(made).split())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a/smollm2-16k.gguf", "smollm2-16k"),
        ("Qwen3-8B.Q4_K_M.GGUF", "Qwen3-8B.Q4_K_M"),
        ("my model (long)..gguf", "my-model-long"),
        (".gguf", "model"),
    ],
)
def test_ollama_names_a_model_after_its_file(file, name):
    """types/model/name.go: letters, digits, `_`, `-`, `.`, and no two points in a row."""
    assert ollama_name(file) == name


def test_the_line_that_writes_a_file_has_the_plans_settings(base):
    shown = plan_screen(inspecting.plan(str(base), factor=4.0, method="yarn"))
    assert shown.count("OUT.gguf") >= 3
    words = " ".join(shown.replace("\\\n", " ").split())  # a long line is continued
    assert f"ropext extend {base} --method yarn --factor 4 -o OUT.gguf" in words


def test_a_far_target_of_a_file_gets_advice_that_a_file_can_follow(base, tmp_path):
    """It takes no gradients, and llama.cpp has no Self-Extend that is right."""
    warnings = inspecting.plan(str(base), factor=64.0, method="yarn").warnings
    (far,) = [warning for warning in warnings if warning.startswith("[far]")]
    assert "train the Hugging Face checkpoint that it was converted from, or take a smaller" in far
    assert "--finetune" not in far
    assert "Self-Extend" not in far
    with pytest.raises(UsageError, match=r"train the Hugging Face checkpoint .*, take a smaller"):
        extend(base, tmp_path / "out.gguf", factor=64.0, method="yarn")


def test_a_file_that_is_scaled_needs_no_scaling_from_the_environment(base, tmp_path, capsys):
    """Such a variable would replace the scaling in the file."""
    words = ("--method", "yarn", "--factor", 4, "--details")
    planned = run("plan", base, *words, capsys=capsys)[1].out
    assert "export LLAMA_ARG_ROPE_SCALE=4.0" in planned
    assert "--link hard" not in planned  # one file has nothing to share
    extend(base, tmp_path / "long.gguf", method="yarn")
    again = run("plan", tmp_path / "long.gguf", capsys=capsys)[1].out
    assert "PARAMETER num_ctx 1024" in again
    assert "LLAMA_ARG" not in again


def test_the_modelfile_is_in_a_directory_too(base, tmp_path):
    """What the printed line names is there, and a second run replaces it."""
    done = extend(base, tmp_path / "out")
    ollama = next(one for one in done.plan.serving(str(tmp_path / "out")) if one.loader == "ollama")
    beside = Path(ollama.command.split()[-1])
    assert beside.read_text(encoding="utf-8").startswith(
        "FROM ./base.gguf\nPARAMETER num_ctx 1024\n"
    )
    extend(base, tmp_path / "out", factor=None, target=2048, force=True)
    assert "PARAMETER num_ctx 2048\n" in beside.read_text(encoding="utf-8")
    (tmp_path / "out/mmproj-F16.gguf").write_bytes(base.read_bytes())
    assert verification.verify(tmp_path / "out").passed  # one model, named by its folder
    (tmp_path / "out/mmproj-F16.gguf").rename(tmp_path / "out/second.gguf")
    with pytest.raises(InputError, match="only GGUF files"):
        verification.verify(tmp_path / "out")
    (tmp_path / "out/second.gguf").unlink()
    beside.write_text("mine", encoding="utf-8")
    with pytest.raises(OutputExists):
        extend(base, tmp_path / "out", force=True)


def test_a_raised_length_names_no_environment(base):
    lines = inspecting.plan(str(base), factor=4.0, length_only=True).serving("out.gguf")
    assert not any("LLAMA_ARG" in line.note for line in lines)
    scaled = inspecting.plan(str(base), factor=4.0, method="yarn").serving("out.gguf")
    (note,) = (line.note for line in scaled if line.loader == "ollama")
    *_, written, target, why, make, first, second, third = note.splitlines()
    assert (written, target) == ("FROM ./out.gguf", "PARAMETER num_ctx 1024")
    assert "by Ollama's environment" in why
    assert make == "ropext extend MODEL.gguf --length-only --target 1024 -o OUT.gguf"
    assert first == "export LLAMA_ARG_ROPE_SCALING_TYPE=yarn"
    assert second == "export LLAMA_ARG_ROPE_SCALE=4.0"
    assert third == "export LLAMA_ARG_YARN_ORIG_CTX=256"


def test_ollamas_lines_can_be_pasted(base, monkeypatch):
    """Each line has a row of its own, in the form that the shells of its system take."""
    plan = inspecting.plan(str(base), factor=4.0, method="yarn")
    rows = [row.strip() for row in serving_text(plan.serving("out.gguf")).splitlines()]
    for row in ("FROM ./out.gguf", "PARAMETER num_ctx 1024"):
        assert row in rows
    assert "export LLAMA_ARG_ROPE_SCALE=4.0" in rows
    monkeypatch.setattr(sys, "platform", "win32")
    rows = [row.strip() for row in serving_text(plan.serving("out.gguf")).splitlines()]
    assert "setx LLAMA_ARG_ROPE_SCALE 4.0" in rows  # cmd and PowerShell
    assert "ropext extend MODEL.gguf --length-only --target 1024 -o OUT.gguf" in rows


def test_the_modelfile_is_next_to_the_file(base, tmp_path):
    """The Modelfile has two lines, and a comment that names its writer; an edited one stays, and a
    note names it."""
    out, beside = tmp_path / "my long.gguf", tmp_path / "my long.gguf.Modelfile"
    extend(base, out)
    assert beside.read_text().splitlines()[:2] == ["FROM ./my long.gguf", "PARAMETER num_ctx 1024"]
    assert beside.read_text().splitlines()[2].startswith("# ")
    extend(base, out, factor=None, target=2048, force=True)
    assert "PARAMETER num_ctx 2048\n" in beside.read_text()
    with beside.open("a") as stream:
        stream.write("TEMPLATE mine\n")
    edited = beside.read_text()
    done = extend(base, out, force=True)
    assert beside.read_text() == edited
    assert any(f"{beside} was not overwritten" in note for note in done.written.notes)


def test_the_same_extension_gives_the_same_bytes(base, tmp_path):
    for name in ("one.gguf", "two.gguf"):
        extend(base, tmp_path / name)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_a_second_extension_starts_from_the_first(base, tmp_path):
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    first = extend(base, one, method="yarn").plan.main.wanted
    second = extend(one, two, target=2048, factor=None, method="pi", again=True)
    np.testing.assert_allclose(ggml.rope(two, 16)[0], np.array(first.inv_freq) / 2, rtol=DRIFT)
    assert ggml.rope(two, 16)[1] == pytest.approx(first.attention_factor, rel=1e-6)
    assert second.plan.context == 1024
    back = tmp_path / "back.gguf"
    extend(two, back, target=512, factor=None, method="ntk", from_original=True)
    assert set(ggml.tensors(back)["rope_freqs.weight"]) == {1.0}
    assert ggml.keys(back)["llama.rope.scaling.type"] == "none"
    wanted = inspecting.inspect(str(back)).main.rope.spectrum.inv_freq
    np.testing.assert_allclose(ggml.rope(back, 16)[0], wanted, rtol=DRIFT)


def test_from_original_goes_back_to_the_recorded_base(base, tmp_path):
    one, two, out = (tmp_path / f"{name}.gguf" for name in ("one", "two", "out"))
    extend(base, one, method="ntk")
    extend(one, two, method="pi", factor=2.0, again=True)
    done = extend(two, out, method="yarn", factor=None, target=4096, from_original=True)
    inv_freq, attention = transcriptions.yarn(
        16, ggml.keys(base)["llama.rope.freq_base"], 256, 4096
    )
    angles, factor = ggml.rope(out, 16)
    np.testing.assert_allclose(angles, inv_freq, rtol=DRIFT)
    assert factor == pytest.approx(attention, rel=1e-6)
    assert (done.plan.context, done.plan.target) == (256, 4096)


def test_llama_3_is_known_by_its_rope_factors(tmp_path):
    from ropext.scaling.forms import llama3_pair_factors
    from ropext.scaling.rope import plain_inv_freq

    plain = plain_inv_freq(64, 500_000.0)
    factors = np.array(llama3_pair_factors(plain, 8192, 8.0, 1.0, 4.0), np.float32)
    shape = {"embedding_length": 256, "rope.dimension_count": 64, "context_length": 131072}
    data = {"rope_freqs.weight": factors} | making.tensors(width=256)
    path = making.write(
        tmp_path / "m.gguf",
        metadata=making.LLAMA | shape | {"rope.freq_base": 500_000.0},
        data=data,
    )
    site = inspecting.inspect(str(path)).main
    assert site.params["rope_type"] == "llama3"
    assert site.rope.original_context == 8192
    done = extend(path, tmp_path / "o.gguf", factor=2.0, method="yarn")
    angles, attention = ggml.rope(tmp_path / "o.gguf", 64)
    np.testing.assert_allclose(angles, done.plan.main.wanted.inv_freq, rtol=DRIFT)
    assert attention == pytest.approx(1 + 0.1 * np.log(2))
    data["rope_freqs.weight"] = factors * np.linspace(1, 1.01, 32, dtype=np.float32)
    path = making.write(tmp_path / "n.gguf", metadata=making.LLAMA | shape, data=data)
    assert inspecting.inspect(str(path)).main.params["rope_type"] == "longrope"


def test_extending_a_split_gguf_writes_split_files(base, tmp_path, capsys):
    rows = list(making.tensors().items())
    for number, data in enumerate((dict(rows[:3]), dict(rows[3:]))):
        split = {"split.no": np.uint16(number), "split.count": np.uint16(2)}
        split |= {"split.tensors.count": np.int32(6)}
        meta = {} if number else making.LLAMA
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        making.write(path, metadata=meta, general=split, data=data, tokens=0)
    first = tmp_path / "m-00001-of-00002.gguf"
    with pytest.raises(UsageError, match="output=DIR"):
        extend(first, tmp_path / "long.gguf")
    done = extend(first, tmp_path / "out", method="llama3", link="hard")
    out = tmp_path / "out" / first.name
    assert ggml.keys(out)["split.tensors.count"] == 7
    assert open_gguf(str(out)).head.tensor("rope_freqs.weight")
    assert (tmp_path / "out" / "m-00002-of-00002.gguf").stat().st_nlink == 2
    assert verification.verify(out, against=str(first), deep=True).passed
    assert verification.verify(tmp_path / "out", against=str(first)).passed
    served = done.plan.serving(str(tmp_path / "out"))
    assert f"-m {out} " in served[0].command
    assert not (tmp_path / "out" / f"{first.name}.Modelfile").exists()
    (ollama,) = (line for line in served if line.loader == "ollama")
    assert not ollama.command
    assert "llama-gguf-split --merge" in ollama.note
    (studio,) = (line for line in served if line.loader == "lm-studio")
    assert not studio.command
    assert "copy all parts into one folder" in studio.note
    (reading,) = (one for one in done.plan.readings if one.loader == "ollama")
    assert reading.verdict == "error"
    code, said = run("plan", str(tmp_path / "out"), "--for", "ollama", capsys=capsys)
    assert code == 3
    assert "it imports no split file; join the parts first" in " ".join(said.out.split())
    assert "copies one file; copy all parts into one folder" in " ".join(said.out.split())
    assert "lms import --copy" not in said.out
    with pytest.raises(NotExpressible, match="join the parts first"):
        extend(first, tmp_path / "gated", method="llama3", for_loaders=("ollama",))


def test_rope_factors_in_a_later_part_are_read_and_never_doubled(tmp_path):
    """As `llama-gguf-split --no-tensor-first-split` leaves them: the first part has keys alone."""
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32)
    rows = making.tensors() | {"rope_freqs.weight": factors}
    whole = making.write(tmp_path / "whole.gguf", data=rows)
    for number, data in enumerate(({}, rows)):
        split = {"split.no": np.uint16(number), "split.count": np.uint16(2)}
        split |= {"split.tensors.count": np.int32(len(rows))}
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        making.write(path, metadata={} if number else making.LLAMA, general=split, data=data)
    first = tmp_path / "m-00001-of-00002.gguf"
    angles, _ = ggml.rope(whole, 16)
    for path in (whole, first):
        spectrum = inspecting.inspect(str(path)).main.rope.spectrum
        np.testing.assert_allclose(spectrum.inv_freq, angles, rtol=DRIFT)
    extend(first, tmp_path / "kept", length_only=True)
    read = open_gguf(str(tmp_path / "kept"))
    assert read.head.tensor("rope_freqs.weight") is None
    for spectrum in proving.spectra_in(read):
        np.testing.assert_allclose(spectrum.inv_freq, angles, rtol=DRIFT)
    with pytest.raises(NotExpressible, match=r"lies in m-00002-of-00002\.gguf.*--merge"):
        extend(first, tmp_path / "moved", method="pi")
    assert not (tmp_path / "moved").exists()


def test_a_form_that_an_architecture_cannot_hold_is_refused(tmp_path):
    path = making.write(tmp_path / "q.gguf", "qwen2")
    extend(path, tmp_path / "ok.gguf", method="yarn", attention_factor=1.3)
    for wanted in ({"method": "llama3"}, {"method": "yarn", "beta_fast": 8.0}):
        with pytest.raises(NotExpressible, match=r"a qwen2 GGUF.*pi, ntk"):
            extend(path, tmp_path / "long.gguf", **wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ok.gguf", "ok.gguf.Modelfile", "q.gguf"]


@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {"method": "yarn"}), ("qwen3", {"method": "yarn"}), ("gemma3", {"method": "ntk"})],
)
def test_ollama_runs_the_same_files_as_llama_cpp(tmp_path, arch, options):
    path = making.write(tmp_path / "m.gguf", arch)
    made = inspecting.plan(str(path), factor=4.0, **options)
    said = {own.loader: own.verdict for own in made.readings}
    assert (said["llama.cpp"], said["ollama"], said["lm-studio"]) == ("same",) * 3
    asked = {"factor": 4.0, "for_loaders": "ollama"} | options
    assert inspecting.plan(str(path), **asked).main.params == made.main.params


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("llama", {}),
        ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}),
        ("gemma3", {}),
    ],
)
def test_the_length_alone_does_not_change_ggmls_result(tmp_path, arch, more):
    path, out = making.write(tmp_path / "m.gguf", arch, making.LLAMA | more), tmp_path / "l.gguf"
    extend(path, out, factor=None, target=2048, length_only=True)
    assert ggml.keys(out)[f"{arch}.context_length"] == 2048
    assert ggml.rope(out, 16)[0] == pytest.approx(ggml.rope(path, 16)[0], abs=0)
    changed = {key for key, own in ggml.keys(out).items() if ggml.keys(path).get(key) != own}
    # ggml takes the stated length as yarn's original length if no key has one.
    also = {"qwen3": {"original_context_length"}, "gemma3": {"type", "factor"}}.get(arch, set())
    wanted = {f"{arch}.context_length", *(f"{arch}.rope.scaling.{key}" for key in also)}
    assert {key for key in changed if not key.startswith("ropext.")} == wanted


@pytest.mark.parametrize(("arch", "named"), [("gemma3", True), ("llama", False)])
def test_the_scaling_is_named_if_ollama_would_add_one(tmp_path, arch, named):
    """It gives a Gemma 3 of 131,072 tokens linear 8 where rope.scaling.type is absent."""
    path, out = making.write(tmp_path / "m.gguf", arch), tmp_path / "long.gguf"
    extend(path, out, method="ntk")
    keys = ggml.keys(out)
    assert keys.get(f"{arch}.rope.scaling.type") == ("none" if named else None)
    assert keys.get(f"{arch}.rope.scaling.factor") == (1.0 if named else None)


def test_a_mistral_of_ollamas_converter_is_read_by_its_own_names(tmp_path):
    """The same file under llama.cpp's names and under the older ones."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.0}
    found = []
    for fast, slow, log in (
        ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"),
        ("beta_fast", "beta_slow", "mscale_all_dim"),
    ):
        own = {f"rope.scaling.{fast}": 16.0, f"rope.scaling.{slow}": 0.5}
        own |= {f"rope.scaling.{log}": 1.0}
        own |= {"attention.temperature_scale" if "yarn" in fast else "rope.scaling_beta": 0.1}
        path = making.write(tmp_path / f"{fast}.gguf", "mistral3", making.LLAMA | yarn | own)
        found.append((proving.spectra_in(open_gguf(str(path)))[-1], open_gguf(str(path)).config))
    assert found[0] == found[1]
    plain = making.write(tmp_path / "plain.gguf", "mistral3", making.LLAMA | yarn)
    assert proving.spectra_in(open_gguf(str(plain)))[0] != found[0][0]
    assert found[0][1]["rope_scaling"]["llama_4_scaling_beta"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "options", [{"method": "yarn", "from_original": True, "target": 1024}, {"length_only": True}]
)
def test_an_extended_mistral_of_ollamas_converter_says_llama_cpps_names(tmp_path, options):
    """llama.cpp reads only its own key names; with them it computes the planned frequencies."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.0}
    yarn |= {"rope.scaling.beta_fast": 16.0, "rope.scaling.beta_slow": 0.5}
    old = making.LLAMA | yarn | {"rope.scaling.mscale_all_dim": 1.0, "rope.scaling_beta": 0.1}
    path = making.write(tmp_path / "old.gguf", "mistral3", old)
    options = {"target": 512} | options
    wanted = inspecting.plan(str(path), **options).main.wanted
    ropext.extend(str(path), tmp_path / "out.gguf", **options)
    kept = ggml.keys(tmp_path / "out.gguf")
    names = ("log_multiplier", "beta_fast", "beta_slow")
    log, fast, slow = (kept[f"mistral3.rope.scaling.yarn_{name}"] for name in names)
    _, attention = ggml.rope(tmp_path / "out.gguf", 16, log_multiplier=log, betas=(fast, slow))
    assert attention == pytest.approx(wanted.attention_factor, rel=1e-6)
    assert kept["mistral3.attention.temperature_scale"] == pytest.approx(0.1)
    assert kept["mistral3.rope.scaling.original_context_length"] == 64


def test_a_temperature_of_queries_keeps_its_starting_position(tmp_path):
    """llama.cpp takes context_length for it if the file has no original length."""
    path = making.write(
        tmp_path / "m.gguf", "mistral3", making.LLAMA | {"attention.temperature_scale": 0.1}
    )
    for options in ({"method": "ntk"}, {"length_only": True}):
        out = tmp_path / f"{len(options)}{options.get('method')}.gguf"
        ropext.extend(str(path), out, target=1024, **options)
        assert ggml.keys(out)["mistral3.rope.scaling.original_context_length"] == 256


def test_the_proof_of_a_file_accepts_no_name_that_llama_cpp_does_not_read(tmp_path):
    """Older names are Ollama's: a file with them alone does not carry the plan in llama.cpp."""
    from ropext.base.errors import ProofFailed

    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64}
    old = yarn | {"rope.scaling.beta_fast": 16.0, "rope.scaling.beta_slow": 0.5}
    path = making.write(tmp_path / "m.gguf", "mistral3", making.LLAMA | old)
    as_stands, in_ollama = proving.spectra_in(open_gguf(str(path)))
    for wanted in (as_stands, in_ollama):
        with pytest.raises(ProofFailed, match="off the planned spectrum"):
            proving.compare(open_gguf(str(path)), wanted, 256)
    other = making.write(tmp_path / "q.gguf", "qwen2", making.LLAMA | {"rope.scale_linear": 2.0})
    assert {own.inv_freq[0] for own in proving.spectra_in(open_gguf(str(other)))} == {0.5}
    foreign = making.LLAMA | {"rope.global.freq_base": 1e6}
    del foreign["rope.freq_base"]
    config = open_gguf(str(making.write(tmp_path / "l.gguf", "llama", foreign))).config
    assert config["rope_theta"] == 10_000  # only a Gemma 3 of Ollama's has the older name


def test_for_names_programs_that_run_a_file(base, tmp_path):
    for name in ("llama.cpp", "gguf", "LM-Studio", "ollama", "lmstudio,ollama"):
        inspecting.plan(str(base), factor=4.0, method="yarn", for_loaders=name)
    # The answer is the same, whether the file is extended or not.
    standing = inspecting.read_unchanged(inspecting.open_model(str(base)))
    for ask in (
        lambda name: inspecting.plan(str(base), factor=4.0, method="yarn", for_loaders=name),
        lambda name: inspecting.plan(str(base), factor=4.0, for_loaders=name),
        lambda name: inspecting.gate(standing, (name,)).raise_if_failed(),
    ):
        with pytest.raises(
            UsageError,
            match=r"--for vllm: it was not measured with GGUF files; these were: llama\.cpp",
        ):
            ask("vllm")
        with pytest.raises(RopextError, match=r"was not measured.*its settings pass no rope flag"):
            ask("jan")
        for name in ("llama.cpp==0c1e57098", "llama.cpp==0.5", "ollama==0.31", "ollama==0.33.2"):
            ask(name)
        for name in ("ollama==0.34", "koboldcpp==1.98", "llama.cpp==b6000"):
            with pytest.raises(NotMeasured, match="this version was not measured; measured are"):
                ask(name)
        for name in ("ollama==newest", "ollama=="):
            with pytest.raises(UsageError, match="a version is in numbers; measured are 0"):
                ask(name)
    for options in ({"method": "yarn"}, {}):
        with pytest.raises(
            UsageError,
            match=r"ollama needs a GGUF file as MODEL.*extend the GGUF: its own converter drops",
        ):
            inspecting.plan("ropext://demo", factor=4.0, for_loaders="ollama", **options)


def test_never_in_place_and_never_over_another_file(base, tmp_path):
    before = base.read_bytes()
    for force in (False, True):
        with pytest.raises(UsageError, match="is the input itself"):
            extend(base, base, force=force)
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(OutputExists, match="force=True replaces"):
        extend(base, tmp_path / "there.gguf")
    with pytest.raises(OutputExists, match="not marked as written by ropext"):
        extend(base, tmp_path / "there.gguf", force=True)
    extend(base, tmp_path / "ours.gguf")
    extend(base, tmp_path / "ours.gguf", force=True)
    assert (tmp_path / "there.gguf").read_text() == "mine"
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(OutputExists, match="no regular file"):
        extend(base, tmp_path / "folder.gguf", force=True)
    assert base.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {
        "base.gguf",
        "there.gguf",
        "ours.gguf",
        "ours.gguf.Modelfile",
        "folder.gguf",
    }


@pytest.mark.parametrize("where", ["key", "tensor", "length", "token"])
def test_a_wrong_file_gets_no_name(base, tmp_path, monkeypatch, where):
    write = writing._write

    def spoiled(head, target, keys, tensors, show):
        if where == "key":
            keys = keys | {"llama.rope.scaling.factor": (6, 4.001)}
        if where == "length":
            keys = keys | {"llama.context_length": (4, 2048)}
        if where == "tensor":
            small = making.tensors() | {"output_norm.weight": np.ones(32, np.float32)}
            head = read_gguf(making.write(tmp_path / "other.gguf", data=small))
        write(head, target, keys, tensors, show)
        if where == "token":  # as a disk or a bad read would
            content = target.read_bytes()
            token = b"\2\0\0\0\0\0\0\0t7"
            assert content.count(token) == 1
            target.write_bytes(content.replace(token, token[:-1] + b"8"))

    monkeypatch.setattr(writing, "_write", spoiled)
    with pytest.raises(
        ProofFailed, match="verification: .*tokens" if where == "token" else "verification: "
    ):
        extend(base, tmp_path / "long.gguf")
    assert not (tmp_path / "long.gguf").exists()


def test_verify_finds_an_edit(base, tmp_path):
    out = tmp_path / "long.gguf"
    extend(base, out, method="llama3", hash=True)
    assert verification.verify(out, deep=True).passed
    whole, own = out.read_bytes(), read_gguf(out)

    def spoil(place):
        content = bytearray(whole)
        content[place] ^= 0x40
        out.write_bytes(content)
        return verification.verify(out, deep=True)

    spoilt = spoil(own.data + own.tensor("rope_freqs.weight").offset + 7 * 4 + 2)
    assert [check.what for check in spoilt.failures()] == ["spectrum"]
    spoilt = spoil(own.data + own.tensor("output_norm.weight").offset)
    assert [check.what for check in spoilt.failures()] == ["tensors"]
    with pytest.raises(UsageError, match="--against"):
        verification.verify(out, against="ropext://demo")
    making.write(tmp_path / "other.gguf", "granite")  # has the same tensors
    with pytest.raises(UsageError, match="is a GGUF of granite, and"):
        verification.verify(out, against=str(tmp_path / "other.gguf"), deep=True)


def test_force_spares_a_file_with_other_tensors_or_keys(base, tmp_path):
    """A tool that merges an adapter carries the keys over, ropext's among them."""
    out = tmp_path / "long.gguf"
    extend(base, out)
    whole, tensor = out.read_bytes(), read_gguf(out).tensors[1]
    places = {"a tensor": read_gguf(out).data + tensor.offset}
    places["a key"] = read_gguf(out).entries["tokenizer.ggml.tokens"].end - 1
    places["the last byte"] = len(whole) - 1
    for what, place in places.items():
        out.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        edited = out.read_bytes()
        with pytest.raises(OutputExists, match="written by ropext, or was edited since"):
            extend(base, out, force=True)
        assert out.read_bytes() == edited, what
    out.write_bytes(whole)
    extend(base, out, force=True)


def test_the_digest_in_a_gguf_is_that_of_its_bytes(base, tmp_path):
    """Zeros take the digest's place; it also holds if a second extension rewrites a divisor's
    tensor."""
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    extend(base, one, method="llama3")
    extend(one, two, factor=None, target=2048, method="pi", again=True)
    for path in (one, two):
        stated = ggml.keys(path)["ropext.file_sha256"]
        content = path.read_bytes()
        assert content.count(stated.encode()) == 1
        assert hashlib.sha256(content.replace(stated.encode(), b"0" * 64)).hexdigest() == stated


def test_a_modelfile_gets_its_name_after_its_file(base, tmp_path, monkeypatch):
    """If the GGUF does not get its name, the old Modelfile stays. If a kill comes between the two,
    the next command names the second."""
    out, beside = tmp_path / "long.gguf", tmp_path / "long.gguf.Modelfile"
    extend(base, out)
    old = beside.read_text()

    def meanwhile(work, target):
        out.write_text("mine")
        return commit(work, target)

    commit = staging._commit
    monkeypatch.setattr(staging, "_commit", meanwhile)
    with pytest.raises(OutputExists, match=r"made is in .*long\.gguf\.new$"):
        extend(base, out, factor=8.0, force=True)
    monkeypatch.undo()
    assert (out.read_text(), beside.read_text()) == ("mine", old)
    assert (
        "FROM ./long.gguf\nPARAMETER num_ctx 2048"
        in (tmp_path / "long.gguf.new/long.gguf.Modelfile").read_text()
    )
    ggml.keys(tmp_path / "long.gguf.new/long.gguf")
    out.unlink()

    def killed(*about):
        raise SystemExit

    monkeypatch.setattr(staging, "_name_beside", killed)
    monkeypatch.setattr(staging, "_discard", lambda work: None)
    with pytest.raises(SystemExit):
        extend(base, out, factor=8.0)
    monkeypatch.undo()
    assert beside.read_text() == old
    with pytest.raises(OutputExists):
        extend(base, out, factor=8.0)
    assert "num_ctx 2048" in beside.read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "os.truncate")


def killed_at(step, base, out):
    """Kill a run at this step; return whether it reached its end instead."""
    child = os.fork()
    if child == 0:
        steps = iter(range(10**9))

        def tick(event):
            if event in EVENTS and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(lambda event, args: tick(event))
        for name in ("fsync", "write", "copy_file_range"):
            call = getattr(os, name)
            setattr(os, name, lambda *a, call=call: (tick("open"), call(*a))[1])
        try:
            extend(base, out, method="llama3", force=True)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_extending_a_gguf_killed_at_any_step_leaves_a_whole_file_or_none(base, tmp_path):
    extend(base, tmp_path / "truth.gguf", method="llama3")
    extend(base, tmp_path / "old.gguf", method="pi")
    truth, old = (tmp_path / "truth.gguf").read_bytes(), (tmp_path / "old.gguf").read_bytes()
    seen = set()
    for step in range(2000):
        room = tmp_path / f"run-{step}"
        room.mkdir()
        out = room / "long.gguf"
        out.write_bytes(old)
        beside = room / "long.gguf.Modelfile"
        beside.write_text(signed("FROM ./long.gguf\nPARAMETER num_ctx 1\n"))
        finished = killed_at(step, base, out)
        aside = next(room.glob(".long.gguf.ropext-*/old"), room / "absent")
        state = out.read_bytes() if out.exists() else aside.read_bytes()
        assert state in (old, truth)
        if beside.read_text() != signed("FROM ./long.gguf\nPARAMETER num_ctx 1\n"):
            assert out.read_bytes() == truth
        seen.add((state == truth, aside.exists()))
        extend(base, out, method="llama3", force=True)
        assert sorted(os.listdir(room)) == ["long.gguf", "long.gguf.Modelfile"]
        assert out.read_bytes() == truth
        assert "PARAMETER num_ctx 1024\n" in beside.read_text()
        if finished:
            break
    assert step > 15
    assert len(seen) > 2


def test_a_full_disk_leaves_no_gguf(base, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match="No space left on device"):
        extend(base, tmp_path / "long.gguf", method="llama3")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.gguf"]


def test_verify_sees_that_another_number_of_pairs_turns(base, tmp_path):
    """Half the heads, which are twice as wide, and no key that says how many channels rotate."""
    out = tmp_path / "long.gguf"
    extend(base, out, method="yarn")
    content = out.read_bytes().replace(b"llama.rope.dimension_count", b"llama.rope.dimension_c0unt")
    place = read_gguf(out).entries["llama.attention.head_count"].end - 4
    out.write_bytes(content[:place] + (2).to_bytes(4, "little") + content[place + 4 :])
    assert "spectrum" in [check.what for check in verification.verify(out).failures()]
