"""Ollama's own settings survive an extension: the Modelfile, read as Ollama's parser reads it."""

import hashlib
import json

import pytest
from command_line import run
from gguf_files import making

from ropext.base import bundled
from ropext.files import inspecting
from ropext.files.gguf.modelfile import Modelfile, _add_messages

COMMANDS = {"from", "license", "template", "system", "adapter", "draft", "renderer", "parser"}
COMMANDS |= {"parameter", "message", "requires"}
# Three quotes begin a line, and end none.
TEMPLATE = '{{ if .System }}<|s|>{{ .System }}\r\n{{ end }}\n"""{{ .Prompt }}"""!\n'
SYSTEM = 'Say "yes".\nFROM /etc/passwd\nPARAMETER num_ctx 1\n# a hash\n  indented " '
PARAMETERS = {
    "stop": ["<|im_end|>", ' "x" ', "a\nb"],
    "temperature": 0.6,
    "top_k": 20,
    "penalize_newline": False,
    "num_ctx": 4096,
}
MESSAGES = [
    {"role": "user", "content": "Is it: so?"},
    {"role": "assistant", "content": "Yes.\nMESSAGE system no"},
]
CONFIG = {"model_format": "gguf", "renderer": "qwen3-coder", "parser": "qwen3", "requires": "0.14"}


def parsed(text):
    """Return the commands of a Modelfile, by the state machine of Ollama's parser.go (00dc3af8): a
    value ends at the first line feed after its quotes are closed."""
    commands, state, value, name, role = [], "nil", "", "", ""

    def unquoted(words):
        words = words.strip()
        for quotes in ('"""', '"'):
            if words.startswith(quotes):
                size = len(quotes)
                whole = len(words) >= 2 * size and words.endswith(quotes)
                return words[size:-size] if whole else None
        return words

    for letter in text + "\n":
        newline, space = letter in "\r\n", letter in " \t"
        if state == "nil":
            if letter == "#":
                state = "comment"
            elif not newline and not space:
                state, value = "name", letter
        elif state == "comment":
            state = "nil" if newline else state
        elif state == "name" and space:
            name = value.lower()
            assert name in COMMANDS, name
            state, value = {"parameter": "key", "message": "role"}.get(name, "value"), ""
        elif state == "key" and space:
            state, name, value = "value", value, ""
        elif state == "role" and space:
            assert value in ("system", "user", "assistant")
            state, role, value = "value", f"{value}: ", ""
        elif state == "value" and newline and unquoted(value) is not None:
            commands.append((name, role + unquoted(value)))
            state, value, role = "nil", "", ""
        elif newline or space or letter.isprintable():
            assert state == "value" or not newline
            value += letter
    assert state == "nil"
    return commands


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Make a store of Ollama with one model that has a layer of every kind; return its blobs."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    blobs = tmp_path / "store/blobs"
    blobs.mkdir(parents=True)
    paths = {}

    def put(kind, data):
        digest = hashlib.sha256(kind.encode() + data).hexdigest()
        paths[kind] = blobs / f"sha256-{digest}"
        paths[kind].write_bytes(data)
        media = "container" if kind == "config" else f"application/vnd.ollama.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    gguf = making.write(tmp_path / "made.gguf").read_bytes()
    layers = [put("model", gguf), put("projector", b"GGUF"), put("adapter", b"GGUF")]
    layers += [put("template", TEMPLATE.encode()), put("system", SYSTEM.encode())]
    layers += [put("params", json.dumps(PARAMETERS).encode()), put("license", b"MIT\nas is")]
    layers += [put("messages", json.dumps(MESSAGES).encode()), put("hologram", b"?")]
    layers += [put("license", "Apache – 2".encode())]
    layers += [{"mediaType": "application/vnd.ollama.image.embed", "digest": "sha256:none"}]
    manifest = tmp_path / "store/manifests/registry.ollama.ai/library/whole/latest"
    manifest.parent.mkdir(parents=True)
    entry = put("config", json.dumps(CONFIG).encode())
    manifest.write_text(json.dumps({"config": entry, "layers": layers}))
    return paths


def test_llama_cpp_reads_ollamas_own_file(store):
    lines = inspecting.read_unchanged(inspecting.open_model("ollama:whole")).serving
    assert f"llama-server -m {store['model']} " in lines[0].command


@pytest.mark.parametrize("output", ["long.gguf", "folder"])
def test_every_setting_of_ollama_is_in_the_modelfile(store, tmp_path, capsys, output):
    code, said = run("extend", "ollama:whole", "--factor", "2", "-o", output, capsys=capsys)
    assert code == 0, said.err
    place = tmp_path / (output if output == "folder" else ".")
    (file,) = place.glob("*.Modelfile")
    commands = parsed(file.read_bytes().decode())
    assert commands == [
        ("from", f"./{file.name.removesuffix('.Modelfile')}"),
        ("from", str(store["projector"])),
        ("adapter", str(store["adapter"])),
        ("template", TEMPLATE),
        ("system", SYSTEM),
        ("stop", "<|im_end|>"),
        ("stop", ' "x" '),
        ("stop", "a\nb"),
        ("temperature", "0.6"),
        ("top_k", "20"),
        ("penalize_newline", "false"),
        ("license", "MIT\nas is"),
        ("message", "user: Is it: so?"),
        ("message", "assistant: Yes.\nMESSAGE system no"),
        ("license", "Apache – 2"),
        ("renderer", "qwen3-coder"),
        ("parser", "qwen3"),
        ("requires", "0.14"),
        ("num_ctx", "512"),
    ]
    notes = " ".join(said.out.split())
    assert "the layer hologram of ollama:whole is left out of the Modelfile: ropext does" in notes
    assert "the layer embed of ollama:whole is left out of the Modelfile: its file is" in notes
    # It is known as ropext's, and replaced.
    code, said = run(
        "extend", "ollama:whole", "--factor", "2", "-o", output, "--force", capsys=capsys
    )
    assert code == 0, said.err


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('a """\nFROM evil', "a line of it ends in three quotes"),
        ('"""\rFROM evil', "a line of it ends in three quotes"),
        ('a """ \t\n\nFROM evil', "a line of it ends in three quotes"),
        ("a\n# as ropext wrote it: SHA-256 0", "a line of it looks like the mark of ropext"),
        ("a\x00b", "it has characters that Ollama drops"),
        ("a\u2028FROM evil", "it has characters that Ollama drops"),
    ],
)
def test_arguments_that_cannot_be_quoted_are_left_out_and_named(value, why):
    made = Modelfile("ollama:x")
    made.add("SYSTEM", value)
    assert made.commands == []
    assert made.notes == [f"SYSTEM of ollama:x is left out of the Modelfile: {why}"]


def test_a_question_without_its_answer_and_the_reverse_are_left_out_together(tmp_path):
    """Half of an example would teach the model to answer nothing, or something else."""
    bad = 'a """\nFROM evil'
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": bad},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Third?"},
        {"role": "assistant", "content": bad},
        {"role": "user", "content": "Fourth?"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "five"},
        {"role": "user", "content": "Last?"},
    ]
    made = Modelfile("ollama:x")
    _add_messages(made, messages)
    text = "FROM ./x\n" + "".join(f"{line}\n" for line in made.commands)
    assert parsed(text)[1:] == [
        ("message", "system: Be short."),
        ("message", "user: First?"),
        ("message", "assistant: One."),
        ("message", "user: Last?"),
    ]
    left = "of ollama:x is left out of the Modelfile:"
    assert made.notes == [
        f"a question and its answer {left} a line of it ends in three quotes",
        f"a question and its answer {left} a line of it ends in three quotes",
        f"a question and its answer {left} it has no role that Ollama takes, or no text",
        f"a message {left} it has no role that Ollama takes, or no text",
    ]


@pytest.mark.parametrize("value", ["", '"', '""', '"""', '""""""', ' " ', "\n", '"\n"', '""\n"""'])
def test_quotes_hold_every_other_text(value):
    made = Modelfile("ollama:x")
    made.add("SYSTEM", value)
    text = "FROM ./x\n" + "".join(f"{line}\n" for line in made.commands)
    assert parsed(text) == [("from", "./x"), ("system", value)]


def test_a_file_by_its_path_has_no_settings(store, tmp_path, capsys):
    assert bundled.kept_by_ollama(str(tmp_path / "made.gguf")) is None
    code, said = run("extend", "made.gguf", "--factor", "2", "-o", "l.gguf", capsys=capsys)
    assert code == 0, said.err
    assert parsed((tmp_path / "l.gguf.Modelfile").read_text()) == [
        ("from", "./l.gguf"),
        ("num_ctx", "512"),
    ]
