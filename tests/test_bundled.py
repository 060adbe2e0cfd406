"""The names of bundled things open the bundled files, from any directory."""

import json
import shutil

import pytest
from command_line import run

from ropext.base import bundled
from ropext.base.errors import InputError, UsageError
from ropext.evaluation.corpus import Source, read_documents
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.snapshot import short_name
from ropext.files.inspecting import open_model


def test_the_demo_opens_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = open_snapshot("ropext://demo", weights=True)
    assert snapshot.weight_files == ("model.safetensors",)
    # What a record and a card say of it holds no path.
    assert (snapshot.name, short_name(snapshot.name, None), snapshot.hub_id) == (
        *["ropext://demo"] * 2,
        None,
    )


def test_bundled_documents_are_the_lines_of_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("held-out", "tuning"):
        lines = bundled.DATA[f"ropext://{name}"].read_text("utf-8").splitlines()
        found = list(read_documents(Source(f"ropext://{name}")))
        assert [own.content for own in found] == [json.loads(line)["text"] for line in lines]
        assert found[0].name == f"{name}.jsonl:1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ropext://dmo", "did you mean ropext://demo"),
        ("ropext://held-out", "is bundled data, not model; bundled model: ropext://demo"),
        ("ropext://", "is not among ropext's bundled model"),
    ],
)
def test_a_wrong_name_of_a_model_is_refused_with_the_right_ones(name, words):
    with pytest.raises(InputError) as caught:
        open_snapshot(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ropext://heldout", "did you mean ropext://held-out"),
        ("ropext://demo", "is bundled model, not data"),
    ],
)
def test_a_wrong_name_of_data_is_refused_with_the_right_ones(name, words):
    with pytest.raises(InputError) as caught:
        list(read_documents(Source(name)))
    assert words in str(caught.value)


def test_a_bundled_model_has_no_revisions():
    with pytest.raises(UsageError, match="ropext://demo is a local directory"):
        open_snapshot("ropext://demo", revision="main")


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """Write one small GGUF as Ollama and as LM Studio keep it, and by itself under another name."""
    from gguf_files import making

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(bundled, "OLLAMA_SERVICE", tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    file = making.write(tmp_path / "made.gguf")
    blob, digest = tmp_path / ".ollama/models/blobs" / f"sha256-{'a' * 64}", "sha256:" + "a" * 64
    studio = tmp_path / ".lmstudio/models/org/small-GGUF/small.Q8_0.gguf"
    for place in (blob, studio, tmp_path / "renamed"):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:x"}]
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    projector = {"mediaType": "application/vnd.ollama.image.projector", "digest": digest}
    projector |= {"digest": "sha256:" + "c" * 64}
    (blob.parent / f"sha256-{'c' * 64}").write_bytes(b"GGUF")
    for name, own in {
        "registry.ollama.ai/library/small/latest": [*layers, model],
        "registry.ollama.ai/library/small/1b": [*layers, model],
        "registry.ollama.ai/me/small/latest": [model],
        "registry.ollama.ai/library/seeing/latest": [model, projector],
        "hf.co/org/small-GGUF/Q8_0": [model],
        "registry.ollama.ai/library/tensors/latest": layers,
        "registry.ollama.ai/library/lost/latest": [model | {"digest": "sha256:" + "b" * 64}],
        "registry.ollama.ai/library/evil/latest": [model | {"digest": "sha256:../../../made"}],
    }.items():
        manifest = tmp_path / ".ollama/models/manifests" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"layers": own}))
    return {"ollama": blob, "lm studio": studio, "renamed": tmp_path / "renamed"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("ollama:small", "ollama"),
        ("ollama:small:1b", "ollama"),
        ("ollama:me/small", "ollama"),
        ("ollama:hf.co/org/small-GGUF:Q8_0", "ollama"),
        ("small.Q8_0.gguf", "lm studio"),
        ("org/small-GGUF/small.Q8_0.gguf", "lm studio"),
        ("renamed", "renamed"),
        ("~/renamed", "renamed"),
    ],
)
def test_a_gguf_is_found_in_the_folders_of_other_programs(homes, name, where):
    assert bundled.find_gguf(name).resolve() == homes[where].resolve()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ollama:small:7b",
            r"not pulled into .*/\.ollama/models .* hf.co/org/small-GGUF:Q8_0, evil:latest",
        ),
        ("ollama:../../etc/passwd", "is not a model name of Ollama"),
        ("ollama:", "is not a model name of Ollama"),
        ("ollama:tensors", "has no GGUF file in Ollama"),
        ("ollama:lost", "names the model sha256:bbb.*, which is not in"),
        ("ollama:evil", "names the model sha256:../../../made, which is not in"),
    ],
)
def test_a_model_that_ollama_lacks_gives_one_sentence(homes, name, says, capsys):
    code, said = run("inspect", name, capsys=capsys)
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    with pytest.raises(InputError, match=says):
        bundled.find_gguf(name)


def test_a_name_unknown_to_lm_studio_lists_the_known_ones(homes, tmp_path):
    folder = tmp_path / ".lmstudio/models"
    with pytest.raises(InputError) as caught:
        bundled.find_gguf("small.Q4_0.gguf")
    assert str(caught.value) == (
        "there is no file small.Q4_0.gguf, here or in LM Studio's folder "
        f"{folder}, which holds small.Q8_0.gguf"
    )
    homes["lm studio"].unlink()
    with pytest.raises(InputError, match=r"LM Studio's folder .*models$"):
        bundled.find_gguf("small.Q4_0.gguf")


def test_folders_are_in_the_places_that_their_programs_document(homes, tmp_path, monkeypatch):
    (tmp_path / ".ollama/models").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
    assert bundled.find_gguf("ollama:small").parent == tmp_path / "elsewhere/blobs"
    home, folder = tmp_path / "studio", tmp_path / "big disk"
    (tmp_path / ".lmstudio").rename(home)
    with pytest.raises(InputError, match="there is no file small"):
        bundled.find_gguf("small.Q8_0.gguf")
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{home}\n")
    assert bundled.find_gguf("small.Q8_0.gguf").is_relative_to(home / "models")
    (home / "models").rename(folder)
    (home / "settings.json").write_text(json.dumps({"downloadsFolder": str(folder)}))
    assert bundled.find_gguf("small.Q8_0.gguf").is_relative_to(folder)
    (folder / "me/x").mkdir(parents=True)
    shutil.copy(homes["renamed"], folder / "me/x/small.Q8_0.gguf")
    with pytest.raises(InputError, match=r"2 times: .*name one by its path"):
        bundled.find_gguf("small.Q8_0.gguf")


def test_a_split_model_of_lm_studios_is_named_by_its_first_part(homes, tmp_path):
    parts = [f"large-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        shutil.copy(homes["renamed"], homes["lm studio"].parent / part)
    folder = homes["lm studio"].parent
    assert bundled.find_gguf(parts[0]) == folder / parts[0]
    assert bundled.find_gguf(f"org/small-GGUF/{parts[0]}") == folder / parts[0]
    homes["lm studio"].unlink()
    assert bundled.find_gguf(str(folder)) == folder / parts[0]


def test_a_projector_next_to_the_file_is_named(homes, capsys):
    assert "mmproj" not in run("plan", "renamed", "--factor", "2", capsys=capsys)[1].out
    (homes["renamed"].parent / "mmproj-F16.gguf").write_bytes(b"GGUF")
    said = run("plan", "renamed", "--factor", "2", capsys=capsys)[1].out
    assert "mmproj-F16.gguf beside it is a part for images" in " ".join(said.split())
    said = " ".join(run("plan", "ollama:seeing", "--factor", "2", capsys=capsys)[1].out.split())
    assert f"blobs/sha256-{'c' * 64} beside it is a part for images" in said
    said = run("plan", "ollama:small", "--factor", "2", capsys=capsys)[1].out
    assert "part for images" not in said


def test_only_names_that_end_as_a_gguf_are_looked_for_in_lm_studios_folder(homes):
    """Any other one may be an id of the hub, which a folder of LM Studio's must not replace."""
    (homes["lm studio"].parent / "renamed-there").write_bytes(homes["renamed"].read_bytes())
    for name in ("renamed-there", "org/small-GGUF/renamed-there", "org/small-GGUF", "small.Q8_0"):
        assert bundled.find_gguf(name) is None
    homes["lm studio"].write_bytes(b"no such thing")
    with pytest.raises(InputError, match="is not a GGUF file"):
        open_model("small.Q8_0.gguf")


def test_a_blob_of_ollama_is_extended_and_never_changed(homes, capsys):
    before = homes["ollama"].read_bytes()
    code, said = run("extend", "ollama:small", "--factor", "2", "-o", "out", capsys=capsys)
    assert code == 0, said.err
    kept = {path.name for path in homes["ollama"].parent.iterdir()}
    assert kept == {homes["ollama"].name, f"sha256-{'c' * 64}"}
    assert homes["ollama"].read_bytes() == before
    assert "llama-server -m out/model.gguf -c 512" in said.out
    assert str(homes["ollama"]) not in said.out
    code, said = run("verify", "out/model.gguf", "--against", "ollama:small", capsys=capsys)
    assert code == 0, said.out
    code, said = run("finetune", "ollama:small", "--data", "x", "-o", "y", capsys=capsys)
    assert (code, "a GGUF file takes no gradients" in said.err) == (2, True)
    code, said = run("extend", "renamed", "--factor", "2", "-o", "renamed", capsys=capsys)
    assert (code, "is the input itself" in said.err) == (2, True), said.err
