"""`ropext serve` from its words to an answer."""

import re
import shutil
import threading

import pytest
from command_line import run
from serving.conftest import Client


@pytest.fixture
def asked(monkeypatch):
    """Ask questions while the command is open, and return their answers."""
    pytest.importorskip("uvicorn")
    from ropext.serving import app

    answers = []

    def stand_in(port, taken):
        server = app.uvicorn_server(port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            client = Client(taken.getsockname()[1], [])
            answers.append(client.get("/v1/models")[1]["data"][0])
            asked = {"prompt": "the fox", "max_tokens": 4, "temperature": 0}
            answers.append(client.ask("/v1/completions", asked)[1])
        finally:
            server.should_exit = True
            thread.join()

    monkeypatch.setattr(app, "run_server", stand_in)
    return answers


def test_a_model_is_extended_in_memory_and_served(directory, asked, capsys):
    words = ("--method", "self-extend", "--factor", "2", "--port", "0", "--device", "cpu")
    code, said = run("serve", str(directory), *words, capsys=capsys)
    assert code == 0, said.err
    assert said.out.startswith("http://127.0.0.1:")
    assert f"/v1 serves {directory}, up to 128 tokens" in said.out
    assert re.search(r"^http://127.0.0.1:\d+/ is a page to talk to it$", said.out, re.MULTILINE)
    assert asked[0]["id"] == str(directory)
    assert asked[0]["max_model_len"] == 128
    assert "0 tokens kept, 3 read, 4 written" in said.err
    assert "warning" not in said.err


def test_a_directory_is_served_as_it_is_and_another_host_is_warned_of(directory, asked, capsys):
    words = ("--host", "0.0.0.0", "--port", "0", "--device", "cpu", "--json")
    code, said = run("serve", str(directory), *words, capsys=capsys)
    assert code == 0, said.err
    assert '"max_model_len": 64' in said.out
    assert "warning: [open-port] other machines can reach 0.0.0.0" in said.err
    assert "no key is set (ROPEXT_ENDPOINT_KEY)" in said.err


def test_a_digest_tells_other_weights_and_another_method_apart(directory, asked, capsys, tmp_path):
    """A client sees by /v1/models whether the model is the one of before."""
    folded = ("--method", "self-extend", "--factor", "2")
    nearer = (*folded, "--window", "16")
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    for place, words in (
        (directory, folded),
        (directory, folded),
        (directory, nearer),
        (directory, ()),
        (directory, ("--dtype", "bfloat16")),
        (other, folded),
    ):
        weights.write_bytes(content)
        common = ("--port", "0", "--device", "cpu")
        code, said = run("serve", str(place), *words, *common, capsys=capsys)
        assert code == 0, said.err
    first, again, *others = [card["meta"]["content_sha256"] for card in asked[::2]]
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert again == first
    assert len({first, *others}) == 5


def test_a_model_that_cannot_be_served_is_refused_before_a_port_is_open(directory, asked, capsys):
    for words, sentence in (
        (("--factor", "2"), "give the method to extend with in memory"),
        (("--method", "self-extend"), "give --factor 4, or --target 256"),
        (("--method", "nonsense", "--factor", "2"), "is not a method"),
        (
            ("--method", "yarn", "--factor", "2", "--literal"),
            "--literal belongs to --method self-ext",
        ),
        (("--window", "16"), "--window belongs to --method self-extend"),
    ):
        code, said = run("serve", str(directory), *words, "--port", "0", capsys=capsys)
        assert code == 2
        assert sentence in said.err
    assert asked == []


def test_help_promises_no_method_that_is_recommended(capsys):
    """`extend` takes the method that `plan` recommends; `serve` extends nothing without a
    method."""
    for command, default in (
        ("extend", "[what plan recommends]"),
        ("serve", "[the model is served as it is]"),
    ):
        code, said = run(command, "--help", capsys=capsys)
        assert code == 0
        method = " ".join(said.out.split()).partition("--method <str>")[2]
        assert default in method.partition(" --")[0]


def test_serve_names_parts_that_transformers_lacks(monkeypatch):
    from ropext.base.errors import InputError
    from ropext.serving import stock

    monkeypatch.setattr(stock, "PARTS", (*stock.PARTS, "Elsewhere"))
    with pytest.raises(InputError, match=r"has no Elsewhere .*install one of 5\.16\.1 to 5\.24\.0"):
        stock.check_transformers_parts()
    monkeypatch.setattr(stock, "PACKAGES", ("no_such_package",))
    with pytest.raises(InputError, match=r"needs no_such_package.*transformers\[serving\]"):
        stock.check_transformers_parts()


def test_the_names_of_the_command_line_are_those_of_requests(directory, asked, capsys):
    names = ("--served-model-name", "gpt-3.5-turbo", "--served-model-name", "b")
    words = ("--port", "0", "--device", "cpu", *names)
    code, said = run("serve", str(directory), *words, capsys=capsys)
    assert code == 0, said.err
    assert f"serves {directory} as gpt-3.5-turbo, b, up to 64 tokens" in said.out
    assert asked[0]["id"] == "gpt-3.5-turbo"
    assert asked[1]["model"] == "gpt-3.5-turbo"
    code, said = run("serve", str(directory), "--served-model-name", "a\nb", capsys=capsys)
    assert code == 2
    assert "--served-model-name takes a name of printable characters" in said.err
