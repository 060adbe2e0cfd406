"""`verify --run`: an engine that reads a checkpoint as stock transformers does passes, one that
reads it otherwise or fails does not.

The readers are the files that the loader table is measured with; other engines than transformers
are played by small scripts in the place of their Python.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ropext import loaders, proof
from ropext.errors import UsageError
from ropext.proof import engines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny yarn whose weights are large enough for a wrong rotation to show."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    path = tmp_path_factory.mktemp("engines") / "model"
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
    legacy["type"] = legacy.pop("rope_type")
    config |= {"rope_theta": 1e4, "rope_scaling": legacy}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def no_proof(monkeypatch):
    """The proof of the spectrum is another test's."""
    monkeypatch.setattr("ropext.verifying._proof", lambda *_: [])
    assert proof.prove


@pytest.fixture(scope="module")
def right(checkpoint) -> dict:
    """What stock transformers tells."""
    text = engines.text_for(checkpoint, 96, 64, 256)
    return engines._read("transformers", sys.executable, checkpoint, text)


@pytest.fixture
def told(right, no_proof, tmp_path, monkeypatch) -> Path:
    """Its answer at hand, and in a file for the engines that are played."""
    read = engines._read

    def quick(name, python, *rest):
        return right if python == sys.executable else read(name, python, *rest)

    monkeypatch.setattr(engines, "_read", quick)
    np.save(tmp_path / "right.npy", right["found"])
    return tmp_path


def fake(folder: Path, lines: str) -> Path:
    """A Python that has every engine and answers in its own way."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\nimport numpy as np\n"
        "if sys.argv[1] == '-c':\n    sys.exit(0)\n"
        "_, reader, ids, output, directory = sys.argv\n"
        f"right = np.load({str(folder / 'right.npy')!r})\n{lines}\n"
    )
    path.chmod(0o755)
    return path


def row(out: str) -> dict:
    found = json.loads(out)
    assert len(found["engines"]) == 1
    return found["engines"][0]


@pytest.mark.slow
def test_transformers_itself_reads_it_the_same(ropext, checkpoint, no_proof):
    code, out, err = ropext("verify", checkpoint, "--run", "transformers", "--json")
    assert code == 0, err
    assert "reads 255 tokens; 254 positions are compared, 191 of them beyond" in err
    own = row(out)
    assert own["verdict"] == own["table"] == "same"
    assert own["largest"] == own["mean"] == 0.0
    assert own["version"] == own["transformers"]


def test_shifted_numbers_are_different(ropext, checkpoint, told):
    python = fake(
        told,
        "np.savez(output, **{'version': '0.32.0+cpu', directory: right - 0.5})",
    )
    words = ("verify", checkpoint, "--run", "vllm", "--python", python)
    code, out, _ = ropext(*words, "--json")
    assert code == 3
    own = row(out)
    assert (own["verdict"], own["table"]) == ("different", "same")
    assert own["largest"] == pytest.approx(0.5)
    code, out, _ = ropext(*words)
    assert code == 3
    assert "WRONG  vllm 0.32.0+cpu  different: " in out
    assert "the table says same, which is not what was measured here: please report it" in out


@pytest.mark.slow
def test_an_engine_that_ignores_the_scaling_is_different(ropext, checkpoint, told):
    python = fake(
        told,
        "import json, pathlib, shutil, subprocess\n"
        "plain = pathlib.Path(output).with_name('plain')\n"
        "shutil.copytree(directory, plain)\n"
        "config = json.loads((plain / 'config.json').read_text())\n"
        "config['rope_parameters'] = {'rope_type': 'default', 'rope_theta': 1e4}\n"
        "del config['rope_scaling']\n"
        "(plain / 'config.json').write_text(json.dumps(config))\n"
        "own = reader.replace('vllm', 'transformers')\n"
        "subprocess.run([sys.executable, own, ids, output, plain], check=True)\n"
        "np.savez(output, **{'version': '99.1', directory: np.load(output)[str(plain)]})",
    )
    code, out, err = ropext("verify", checkpoint, "--run", "vllm", "--python", python, "--json")
    assert code == 3, err
    own = row(out)
    assert (own["verdict"], own["table"]) == ("different", "not measured")
    assert own["largest"] > 10 * engines.SAME


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("sys.exit('No module named q')", "gave no answer: No module named q; --python"),
        (
            "np.savez(output, **{'version': '0.32.0', directory + '/error': 'KeyError: q\\nat 3'})",
            "error: KeyError: q; the table",
        ),
        (
            "np.savez(output, **{'version': '0.32.0', directory: np.zeros(3)})",
            "error: it tells 3 of 254 positions",
        ),
        (
            "np.savez(output, **{'version': '0.32.0', directory: right * np.nan})",
            "different: ",
        ),
    ],
)
def test_a_failure_is_a_verdict(ropext, checkpoint, told, lines, said):
    python = fake(told, lines)
    code, out, _ = ropext("verify", checkpoint, "--run", "vllm", "--python", python)
    assert code == 3
    assert ("the table says" in out) == ("gave no answer" not in out)
    assert said in out


CONVERTER = """
import json
from pathlib import Path

class Kind:
    def __init__(self, directory, kind, output, hparams):
        self.hparams, self.output, self.gguf_writer = hparams, output, self
    def __getattr__(self, name):
        return lambda value: None
    def add_token_list(self, tokens):
        self.tokens = tokens
    def write(self):
        self.set_vocab()
        Path(self.output).write_text(json.dumps([self.hparams["rope_scaling"], self.tokens]))

def get_model_class(name):
    return {"LlamaForCausalLM": Kind}[name]
"""
BASE = """
import json

class ModelBase:
    @staticmethod
    def load_hparams(directory, is_mistral):
        return json.loads((directory / "config.json").read_text())

class ModelType:
    TEXT = 1

def get_model_architecture(hparams, kind):
    return hparams["architectures"][0]
"""
TYPES = "class TokenType:\n    NORMAL = 1\nclass LlamaFileType:\n    ALL_F32 = 0\n"


@pytest.fixture
def converter(tmp_path) -> Path:
    """A llama.cpp checkout that writes what it was given, in the place of a GGUF."""
    for name, lines in {
        "convert_hf_to_gguf.py": CONVERTER,
        "conversion/base.py": BASE,
        "gguf-py/gguf/__init__.py": TYPES,
    }.items():
        path = tmp_path / "llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    return tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"


def test_llama_cpp_reads_what_its_converter_makes(ropext, checkpoint, told, converter):
    python = fake(
        told,
        "import json\nscaling, tokens = json.load(open(directory))\n"
        "assert scaling['factor'] == 4 and tokens == [f't{at}' for at in range(96)]\n"
        "assert reader.endswith('read_llama_cpp.py') and directory.endswith('.gguf')\n"
        "np.savez(output, **{'version': '0.5.0', directory: right + 1e-3})",
    )
    words = ("verify", checkpoint, "--run", "llama.cpp", "--python", python)
    code, out, err = ropext(*words, "--converter", converter, "--json")
    assert code == 0, err
    own = row(out)
    assert (own["engine"], own["verdict"]) == ("llama.cpp", "same")
    (converter.parent / "conversion" / "base.py").write_text("raise ImportError('no torch')")
    code, out, _ = ropext(*words, "--converter", converter)
    assert code == 3
    assert "gave no answer: its converter: ImportError: no torch" in out


def test_a_gguf_needs_no_converter_and_is_held_against_what_is_told(told, right):
    text = engines.EngineText(list(range(255)), 64)
    gguf = told / "long.gguf"
    gguf.write_bytes(b"GGUF")
    python = fake(told, "np.savez(output, **{'version': '0.5.0', directory: right})")
    engines.check_installed(["llama.cpp"], str(python), gguf)
    wanted = right | {"found": right["found"] + 0.5}
    told = [loaders.LoaderReading(name, "any", "same") for name in ("llama.cpp", "ollama")]
    (own,) = engines.compare(["llama.cpp"], str(python), gguf, text, told, wanted=wanted)
    assert (own.verdict, own.largest) == ("different", pytest.approx(0.5))
    assert own.table == "same"
    for gap, verdict in ((0.1, "same"), (0.2, "different")):  # one position of many is far off
        wanted = right | {"found": right["found"] + gap}
        wanted["found"][3] += 2.0
        (own,) = engines.compare(
            ["llama.cpp"], str(python), gguf, text, told, wanted=wanted, rounded=True
        )
        assert own.verdict == verdict
        assert "in the mean (which counts where weights are quantised); the table" in own.sentence
    with pytest.raises(UsageError, match="--run vllm reads a directory"):
        engines.check_installed(["vllm"], str(python), gguf)


def test_stock_transformers_that_fails_is_a_failed_check(ropext, checkpoint, told, monkeypatch):
    monkeypatch.setattr(engines, "_read", lambda *_: {"version": "", "error": "KeyError: q"})
    code, out, err = ropext("verify", checkpoint, "--run", "transformers")
    assert code == 3
    assert f"stock transformers cannot read {checkpoint}: KeyError: q" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run", "vllm"), "has no vllm; --python PATH names"),
        (
            ("--run", "sglang"),
            "engines that can be run here are transformers, vllm, mlx, llama.cpp",
        ),
        (("--run", ","), "--run wants the names of engines"),
        (("--run", "vllm", "--python", "/nowhere/python"), "cannot be run (No such file"),
        (("--python", "/usr/bin/python3"), "says which Python has the engines of --run"),
        (("--converter", "convert.py"), "is for --run llama.cpp; give both"),
        (("--run", "llama.cpp"), "has no llama_cpp, and no llama-server is on PATH; --python PATH"),
    ],
)
def test_a_users_mistake_is_one_sentence(ropext, checkpoint, words, said):
    code, _, err = ropext("verify", checkpoint, *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [(), ("--converter", "nowhere.py")])
def test_llama_cpp_needs_a_converter(ropext, checkpoint, told, words):
    words = ("--run", "llama.cpp", "--python", fake(told, ""), *words)
    code, _, err = ropext("verify", checkpoint, *words)
    assert code == 2
    assert "--converter PATH names the convert_hf_to_gguf.py of a llama.cpp checkout" in err
    assert ("nowhere.py is no file" in err) == (len(words) > 4)
    assert len(err.strip().splitlines()) == 1


def test_weights_are_needed(ropext, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    code, _, err = ropext("verify", tmp_path, "--run", "transformers")
    assert code == 2
    assert "safetensors" in err


def test_long_texts_straddle_the_original_context(checkpoint):
    text = engines.text_for(checkpoint, 96, 8192, 32768)
    assert len(text.ids) == 8192 + engines.BEYOND
    assert f"{engines.LAST:,} positions are compared, {engines.BEYOND:,} of them beyond" in str(
        text
    )
    assert text.ids == engines.text_for(checkpoint, 96, 8192, 32768).ids


@pytest.mark.slow
def test_a_long_text_is_told_at_its_end(checkpoint, tmp_path):
    """More tokens than positions told: the same numbers as from all logits at once."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.arange(2400) % 96
    np.save(tmp_path / "ids.npy", ids)

    reader = Path(engines.__file__).with_name("read_transformers.py")
    words = [str(tmp_path / "ids.npy"), str(tmp_path / "told.npz"), str(checkpoint)]
    subprocess.run([sys.executable, str(reader), *words], check=True)
    told = np.load(tmp_path / "told.npz")[str(checkpoint)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.as_tensor(ids)[None]).logits[0, :-1].double().log_softmax(-1)
    wanted = rows.gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()
    assert told.shape == (engines.LAST,)
    np.testing.assert_allclose(told, wanted[-engines.LAST :], atol=1e-4)


@pytest.mark.parametrize("name", list(engines.MODULES))
def test_every_engine_has_its_reader(told, checkpoint, name, monkeypatch):
    """A Python that plays the engine runs the reader's very file."""
    lines = "assert __import__('pathlib').Path(reader).exists()\n"
    python = fake(told, lines + "np.savez(output, **{'version': '1', directory: right})")
    gguf = told / "long.gguf"
    gguf.write_bytes(b"GGUF")
    place = gguf if name == engines.GGUF else checkpoint
    found = engines._read(name, str(python), place, engines.EngineText([1, 2, 3], 2))
    assert "error" not in found


def test_readers_import_nothing_of_ropext():
    for path in Path(engines.__file__).parent.glob("[!_]*.py"):
        assert "import ropext" not in path.read_text()
        assert "from ropext" not in path.read_text()


SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
import numpy as np

if sys.argv[1:] == ["--version"]:
    print("version: 9876 (0c1e570)\\nbuilt with clang", file=sys.stderr)
    sys.exit()
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-m"].endswith("long.gguf") and given["-c"] == "255" and given["-fa"] == "off"
{lines}
right, ids, begun = np.load({right!r}), np.load({ids!r}), time.monotonic()

class Own(BaseHTTPRequestHandler):
    def tell(self, body, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        if self.path == "/health" and time.monotonic() < begun + 0.3:
            return self.tell({{"error": "Loading model"}}, 503)
        self.tell({{"data": [{{"meta": {{"n_vocab": 96}}}}]}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = len(asked["prompt"])
        assert asked["n_probs"] == 96 and asked["prompt"] == ids[:place].tolist()
        best = {{"id": int(ids[place]), "logprob": right[place - 1] + {shift}}}
        other = {{"id": 1 - int(ids[place]), "logprob": -1.0}}
        self.tell({{"completion_probabilities": [{{"top_logprobs": [other, best]}}]}})

    def log_message(self, *words):
        pass

HTTPServer((given["--host"], int(given["--port"])), Own).serve_forever()
"""


@pytest.mark.parametrize(
    ("lines", "shift", "verdict", "largest"),
    [("", 1e-3, "same", 1e-3), ("", 0.5, "different", 0.5), ("sys.exit('bad magic')", 0, "", None)],
)
def test_a_llama_server_on_path_answers(told, right, monkeypatch, lines, shift, verdict, largest):
    """At 16 of the positions, as it tells what comes after a prompt and nothing else."""
    text = engines.EngineText(list(range(2, 53)) * 5, 64)
    np.save(told / "ids.npy", np.array(text.ids))
    gguf, server = told / "long.gguf", told / "bin" / "llama-server"
    gguf.write_bytes(b"GGUF")
    server.parent.mkdir()
    own = {"python": sys.executable, "right": str(told / "right.npy"), "ids": str(told / "ids.npy")}
    server.write_text(SERVER.format(**own, lines=lines, shift=shift))
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(server.parent), prepend=":")
    none = told / "none"
    none.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    none.chmod(0o755)
    engines.check_installed(["llama.cpp"], str(none), gguf)
    (found,) = engines.compare(["llama.cpp"], str(none), gguf, text, wanted=right)
    assert (found.verdict, found.version) == (verdict or "error", "9876 (0c1e570)")
    assert found.largest == (largest and pytest.approx(largest, rel=1e-4))
    assert ("llama-server: bad magic" in found.error) == bool(lines)
