"""A server that applies the planned scaling passes `verify`; a server that ignores it fails.

The servers are small local ones that compute with transformers, in the answer shapes of vLLM,
SGLang and llama-server; `.ci/slow gguf` asks a real llama-server.
"""

import json
import math
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from command_line import run
from json_schema import check

import ropext
from ropext.base import bundled
from ropext.base.errors import InputError, ProofFailed, Stopped
from ropext.endpoint import server as ports
from ropext.endpoint.issue_form import FORM
from ropext.endpoint.logprobs import next_token, require_logprobs
from ropext.verifying import server as endpoint
from ropext.verifying.judging import Neighbour, judge_neighbour

# Token ids -> the log-probability of every next token.
Reference = Callable[[Sequence[int]], Sequence[float]]

CONTEXT, TARGET = 64, 256
DEMO = bundled.MODELS["ropext://demo"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": CONTEXT}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Make a tiny extended checkpoint whose weights are large enough to reveal a wrong rotation."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TARGET,
        rope_parameters=YARN,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    path = tmp_path_factory.mktemp("endpoint") / "model"
    model.save_pretrained(path)
    return path


def reference_of(directory: Path) -> Reference:
    """Load a model by transformers; return what gives the log-probabilities of the next token."""
    rows = endpoint.load_reference(endpoint.ReferenceModel(directory))
    return lambda ids: rows(ids, [len(ids)])[0]


@pytest.fixture(scope="module")
def right(directory: Path) -> Reference:
    return reference_of(directory)


@pytest.fixture(scope="module")
def unscaled(directory: Path, tmp_path_factory) -> Reference:
    """Return the answers of a server that ignores the rope dict."""
    path = tmp_path_factory.mktemp("unscaled") / "model"
    path.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"rope_parameters": PLAIN}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").symlink_to(directory / "model.safetensors")
    return reference_of(path)


def best(values: list[float], count: int) -> list[tuple[int, float]]:
    order = sorted(range(len(values)), key=lambda token: -values[token])
    return [(token, values[token]) for token in order[:count]]


def vllm(pairs: list[tuple[int, float]]) -> dict:
    return {"top_logprobs": [{f"token_id:{token}": value for token, value in pairs}]}


def sglang(pairs: list[tuple[int, float]]) -> dict:
    """Return the answers by text: the second and third look alike, and the better one stays."""
    texts = {0: "a", 1: "b", 2: "b", 3: "c", 4: "d"}
    told: dict[str, float] = {}
    for rank, (_, value) in enumerate(pairs):
        told.setdefault(texts[rank], value)
    return {"top_logprobs": [told]}


def llama_cpp(pairs: list[tuple[int, float]]) -> dict:
    entries = [{"id": t, "token": "x", "bytes": [120], "logprob": v} for t, v in pairs]
    return {"content": [entries[0] | {"top_logprobs": entries}]}


SHAPES = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp}


def limit_pages(kind: str, limit: int) -> dict[str, dict]:
    """Return the pages on which each kind of server states its context limit."""
    entry = {"id": "tiny", "object": "model"}
    if kind == "vllm":
        return {"/v1/models": {"data": [entry | {"max_model_len": limit}]}}
    models = {"/v1/models": {"data": [entry]}}
    if kind == "llama.cpp":
        return models | {
            "/props": {"build_info": "b7777", "default_generation_settings": {"n_ctx": limit}}
        }
    return models | {"/get_server_info": {"context_length": limit}}


@contextmanager
def serving(kind: str, compute, limit: int = TARGET, requests: list | None = None) -> Iterator[str]:
    """Serve on the loopback, with answers by `compute` from each prompt."""
    pages = limit_pages(kind, limit)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            found = self.path in pages
            self.answer(200 if found else 404, pages.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if requests is not None:
                requests.append((self.path, body, self.headers.get("Authorization")))
            if len(body["prompt"]) > limit:
                self.answer(400, {"error": f"maximum context length is {limit}"})
                return
            told = compute(body["prompt"])
            logprobs = SHAPES[kind](best(told, body["logprobs"])) if told else None
            self.answer(200, {"choices": [{"text": "x", "logprobs": logprobs}]})

        def log_message(self, *args: object) -> None:
            """Print nothing on stderr."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def probe(url: str, directory: Path) -> endpoint.ServerAnswers:
    reference = endpoint.ReferenceModel(directory)
    return endpoint.probe_server(url, endpoint.ServerQuestion(reference, CONTEXT, TARGET))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_right_server_passes(kind: str, directory: Path, right) -> None:
    with serving(kind, right) as url:
        result = probe(f"{url}/v1/", directory)
    assert result.limit == TARGET
    tokens = [prompt.tokens for prompt in result.prompts]
    assert tokens[:8] == sorted(tokens[:8])
    assert (tokens[0], tokens[7], tokens[8], tokens[-1]) == (32, 64, 65, TARGET - 1)
    assert result.reached == TARGET - 1  # one more is generated
    assert [p.beyond for p in result.prompts] == 8 * [False] + 8 * [True]
    assert max(p.difference for p in result.prompts) < 1e-5
    assert result.model == "tiny"


def test_a_server_of_the_base_is_compared_with_a_saved_plan(
    directory: Path, right, unscaled, tmp_path, monkeypatch, capsys
) -> None:
    """The override makes the base's weights equal the written checkpoint; no copy exists."""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    config = json.loads((directory / "config.json").read_text())
    config |= {"rope_parameters": PLAIN, "max_position_embeddings": CONTEXT}
    Path("base/config.json").write_text(json.dumps(config), encoding="utf-8")
    Path("base/model.safetensors").symlink_to(directory / "model.safetensors")
    code, told = run(
        *["plan", "base", "--method", "yarn", "--factor", "4", "--json"], capsys=capsys
    )
    assert code == 0
    Path("plan.json").write_text(told.out, encoding="utf-8")
    for compute, wanted in ((right, 0), (unscaled, 3)):
        with serving("vllm", compute) as url:
            code, told = run("verify", "plan.json", "--endpoint", url, capsys=capsys)
        assert code == wanted, told.err
        assert ("differ from transformers' by" in told.out) == (wanted == 0)
    other = json.dumps(config | {"rope_theta": 5e4})
    Path("base/config.json").write_text(other, encoding="utf-8")
    with serving("vllm", right) as url:
        code, told = run("verify", "plan.json", "--endpoint", url, capsys=capsys)
        assert code == 2
        assert "plan.json was planned from another config than the one of base now" in told.err
        Path("plan.json").write_text("{}", encoding="utf-8")
        code, told = run("verify", "plan.json", "--endpoint", url, capsys=capsys)
        assert (code, "plan.json is not a plan" in told.err) == (2, True)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_server_that_ignores_the_scaling_is_caught(kind: str, directory: Path, unscaled) -> None:
    with (
        serving(kind, unscaled) as url,
        pytest.raises(ProofFailed, match="after 8 prompts inside the old context of 64 tokens"),
    ):
        probe(url, directory)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> dict[str, Reference]:
    """Return the values that transformers computes of the bundled model, extended in several
    ways."""
    room = tmp_path_factory.mktemp("demos")
    base = json.loads((DEMO / "config.json").read_text("utf-8"))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 256}
    ways = {
        "plan": {"factor": 4.0},
        "factor 5": {"factor": 5.0},
        "factor 3.2": {"factor": 3.2},
        "factor 4.5": {"factor": 4.5},
        "factor 8": {"factor": 8.0},
        "attention factor 1": {"factor": 4.0, "attention_factor": 1.0},
        "twice the original length": {"factor": 4.0, "original_max_position_embeddings": 512},
        "the plain base": {"rope_type": "default"},
    }
    found = {}
    for name, way in ways.items():
        place = room / name.replace(" ", "-")
        place.mkdir()
        config = {k: v for k, v in base.items() if k not in ("rope_theta", "rope_scaling")}
        config |= {"rope_parameters": yarn | way, "max_position_embeddings": 1024}
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (place / "model.safetensors").symlink_to(DEMO / "model.safetensors")
        found[name] = reference_of(place)
    return found


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("extended") / "long"
    ropext.extend(str(DEMO), out, factor=4.0, method="yarn", no_verify=True)
    return out


def noisy(compute, nats: float):
    """Return `compute` with noise, as on an engine whose kernels round."""
    draw = random.Random(7)
    return lambda ids: [value + draw.gauss(0, nats) for value in compute(ids)]


def asked_about(directory: Path, url: str, capsys) -> tuple[int, dict, str]:
    code, told = run("verify", directory, "--endpoint", url, "--json", capsys=capsys)
    check(json.loads(told.out), "verify")
    checks = {check["what"]: check for check in json.loads(told.out)["checks"]}
    return code, checks["endpoint"], told.err


NEIGHBOURS = (
    "factor 5",
    "factor 3.2",
    "the plain base",
    "attention factor 1",
    "twice the original length",
)


@pytest.mark.parametrize("nats", [0.0, 0.05])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_server_of_a_neighbour_is_called_that(name, nats, demos, extended, capsys) -> None:
    with serving("vllm", noisy(demos[name], nats), 1024) as url:
        code, check, _ = asked_about(extended, url, capsys)
    assert (code, check["passed"]) == (3, False)
    assert f"nearer to {name} than to the plan (" in check["sentence"]


@pytest.mark.parametrize("kind", SHAPES)
def test_a_right_server_excludes_every_neighbour(kind, demos, extended, capsys) -> None:
    with serving(kind, noisy(demos["plan"], 0.02), 1024) as url:
        code, check, err = asked_about(extended, url, capsys)
    assert (code, check["passed"]) == (0, True), check
    for name in NEIGHBOURS:
        assert f"; {name}: excluded (" in check["sentence"]
    assert "prompts of up to 1,023 tokens" in check["sentence"]
    # The note on the prompts comes before they are read, then the progress.
    assert err.index("the server is asked 16 prompts of up to 1,023 tokens") < err.index(
        "transformers reads 6,394 tokens here"
    )
    assert err.index("that takes about") < err.index("tokens), about")


def test_a_server_between_two_factors_is_not_known(demos, extended, capsys) -> None:
    with serving("vllm", demos["factor 4.5"], 1024) as url:
        code, check, _ = asked_about(extended, url, capsys)
    assert (code, check["passed"]) == (6, None)
    assert "factor 5: not excluded" in check["sentence"]
    assert "the plain base: excluded" in check["sentence"]


def test_a_server_far_from_every_neighbour_is_wrong(demos, extended, capsys) -> None:
    with serving("vllm", demos["factor 8"], 1024) as url:
        code, check, _ = asked_about(extended, url, capsys)
    assert (code, check["passed"]) == (3, False)


def test_two_readings_are_distinguished_by_hand() -> None:
    """A regression through the origin: one candidate, four prompts, the way there is 1, 1, 2, 2."""
    near = Neighbour("other", {}, decides=True)
    plan = [[0.0]] * 4
    other = [[1.0], [1.0], [2.0], [2.0]]
    done = judge_neighbour(near, [[0.1], [-0.1], [0.2], [0.4]], plan, other)
    assert done.apart == pytest.approx(math.sqrt(10 / 4))
    assert done.at == pytest.approx((0.1 - 0.1 + 0.4 + 0.8) / 10)
    without = [1.1 / 9, 1.3 / 9, 0.8 / 6, 0.4 / 6]
    spread = sum((each - sum(without) / 4) ** 2 for each in without)
    assert done.margin == pytest.approx(3.18245 * math.sqrt(3 / 4 * spread), rel=2e-3)
    assert done.is_excluded
    assert judge_neighbour(near, other, plan, other).is_nearer
    assert not judge_neighbour(near, [[0.5], [0.5], [1.0], [1.0]], plan, other).is_excluded
    assert not judge_neighbour(near, plan, plan, [[1e-4]] * 4).is_excluded


def test_the_place_of_differing_prompts_is_named(directory: Path, right, unscaled) -> None:
    def mixed(ids: list[int]) -> list[float]:
        return unscaled(ids) if len(ids) > 100 else right(ids)

    with (
        serving("llama.cpp", mixed) as url,
        pytest.raises(ProofFailed, match="after 8 prompts beyond the old context of 64 tokens"),
    ):
        probe(url, directory)


def test_requests_hold_plain_prompts_and_the_key(directory: Path, right, monkeypatch) -> None:
    monkeypatch.setenv(ports.KEY, "local-key")
    asked: list = []
    with serving("vllm", right, requests=asked) as url:
        probe(url, directory)
    assert {path for path, _, _ in asked} == {"/v1/completions"}
    assert {key for _, _, key in asked} == {"Bearer local-key"}
    for _, body, _ in asked:
        assert (body["max_tokens"], body["temperature"], body["model"]) == (1, 0, "tiny")
        assert not body.get("echo")  # llama-server refuses it
        assert not {1, 2} & set(body["prompt"])  # no begin or end of text inside
    whole = endpoint.token_ids(TARGET - 1, 96, [1, 2])
    beyond = [body["prompt"] for _, body, _ in asked if len(body["prompt"]) > CONTEXT]
    assert [prompt == whole[: len(prompt)] for prompt in beyond] == 8 * [True]


@pytest.mark.parametrize("kind", SHAPES)
def test_a_short_limit_is_reported_before_any_prompt(kind: str, directory: Path, right) -> None:
    asked: list = []
    with (
        serving(kind, right, limit=CONTEXT, requests=asked) as url,
        pytest.raises(ProofFailed, match="takes 64 tokens, its context before the extension"),
    ):
        probe(url, directory)
    assert not asked


def test_a_refused_prompt_names_its_length_and_the_servers_reason(right) -> None:
    with serving("sglang", right, limit=CONTEXT) as url:
        server = ports.server_at(url)
        with pytest.raises(ProofFailed, match=r"refuses a prompt of 80 tokens \(HTTP 400: .*64"):
            next_token(server, "tiny", [3] * 80)


def test_a_server_without_log_probabilities_is_refused(directory: Path) -> None:
    with (
        serving("vllm", lambda ids: None) as url,
        pytest.raises(InputError, match="returns no log-probabilities"),
    ):
        probe(url, directory)


def test_a_server_that_does_not_answer_is_named(directory: Path, right) -> None:
    with serving("vllm", right) as url:
        pass
    with pytest.raises(InputError, match="no answer from the server"):
        probe(url, directory)
    with pytest.raises(Stopped, match="went away during a prompt of 3 tokens"):
        next_token(ports.server_at(url), "tiny", [3, 4, 5])
    for wrong in ("file:///etc/passwd", "localhost:8000", "http://"):
        with pytest.raises(InputError, match="is no http address"):
            probe(wrong, directory)


@pytest.mark.parametrize("name", ["model", "model.gguf", "plan.json"])
def test_a_dead_port_is_reported_before_anything_is_opened(name, tmp_path, capsys) -> None:
    """None of these files holds what its name promises, so opening one is another mistake."""
    (tmp_path / name).write_bytes(b"nothing")
    with serving("vllm", None) as url:
        pass
    code, told = run("verify", tmp_path / name, "--endpoint", url, capsys=capsys)
    assert (code, "no answer from the server" in told.err) == (5, True)


def test_a_report_is_the_issue_form_filled_in(directory: Path, right, capsys) -> None:
    """The headings are the form's own labels, in its order; the report names no path of this
    machine."""
    template = Path(__file__).parents[1] / ".github/ISSUE_TEMPLATE/loader.yml"
    labels = [part["attributes"]["label"] for part in yaml.safe_load(template.read_text())["body"]]
    with serving("llama.cpp", right) as url:
        code, told = run("verify", directory, "--endpoint", url, "--report", capsys=capsys)
    assert code == 3  # transformers 5 saved it without the older spelling of its scaling
    form = told.out[told.out.index("###") :]
    assert re.findall(r"^### (.*)$", form, re.M) == labels == list(FORM)
    for part in (
        "llama-server b7777",
        "\nllama\n",
        '"factor": 4.0',
        "as planned: the server",
    ):
        assert part in form, part
    assert str(directory) not in form
    assert url not in form
    code, told = run("verify", directory, "--report", capsys=capsys)
    assert (code, "give --endpoint URL too" in told.err) == (2, True)


@pytest.mark.parametrize("url", ["http://[", "ftp://x", "localhost:8000", "http://", "x" * 9999])
def test_server_at_refuses_what_is_no_http_address(url):
    with pytest.raises(InputError, match="no http address") as caught:
        ports.server_at(url)
    assert len(str(caught.value)) < 300


def test_a_password_in_the_address_is_not_repeated():
    with pytest.raises(InputError, match="without user or password") as caught:
        ports.server_at("http://user:secret@localhost:8000")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "models",
    [{"data": 3}, {"data": {"a": 1}}, {"data": ["x"]}, {"data": [{"max_model_len": "many"}]}],
)
def test_a_server_with_a_nonsensical_model_list_is_refused(monkeypatch, models):
    server = ports.server_at("http://localhost:8000")
    monkeypatch.setattr(
        ports.Server, "ask", lambda self, path: models if "models" in path else None
    )
    with pytest.raises(InputError, match="OpenAI-compatible"):
        ports.model_and_limit(server, "http://localhost:8000")


@contextmanager
def answering(answer) -> Iterator[ports.Server]:
    """Serve every GET and POST by `answer(handler)`, and yield the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with suppress(OSError):  # the other side had enough
                answer(self)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *args):
            """Print nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stub:
        stub.daemon_threads = True
        stub.block_on_close = False
        thread = threading.Thread(target=stub.serve_forever, daemon=True)
        thread.start()
        yield ports.server_at(f"http://127.0.0.1:{stub.server_address[1]}")
        stub.shutdown()


def saying(body: bytes):
    def answer(handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_key_is_not_sent_to_the_target_of_a_redirect(monkeypatch):
    """A server that hands the request on to another is refused, and gets no second one."""
    seen = []

    def elsewhere(handler) -> None:
        seen.append((handler.path, handler.headers.get("Authorization")))
        handler.send_response(307 if handler.path == "/v1/models" else 200)
        handler.send_header("Location", "/other\x1b[31m")
        handler.end_headers()
        handler.wfile.write(b"{}")

    monkeypatch.setenv(ports.KEY, "secret")
    with answering(elsewhere) as server, pytest.raises(InputError, match=r"redirects to .*/other"):
        server.ask("/v1/models")
    assert seen == [("/v1/models", "Bearer secret")]


HUGE = b"9" * 400


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (b'{"data": [{"id": "x", "max_model_len": 1e999}]}', "1e999 is too large"),
        (b'{"data": [{"id": "x", "max_model_len": NaN}]}', "NaN is not a JSON number"),
        (b'{"data": [{"id": "x", "max_model_len": %b}]}' % HUGE, "no name and limit"),
        (b'{"data": [{"id": "x", "max_model_len": -4}]}', "no name and limit"),
        (b'{"data": [{"id": ["x"], "max_model_len": 4}]}', "no name and limit"),
        (b'{"data": [{"id": "x\\nall right: y", "max_model_len": 4}]}', "no name and limit"),
        (b'{"data": [{"id": "x"}, %b]}' % (b"[]," * 600_000 + b"[]"), "more than 500,000 objects"),
        (b"[" * 100_000, "nested|cut short"),
        (b" " * (ports.ANSWER_LIMIT + 1), "more than 4 MiB"),
        (b'{"data": [{"id": "\xff"}]}', "not UTF-8"),
    ],
)
def test_a_model_list_of_nonsense_is_one_sentence(models, says):
    with answering(saying(models)) as server, pytest.raises(InputError, match=says) as caught:
        ports.model_and_limit(server, server.root)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [HUGE.decode(), "1e300", '"-1"', "true", "null", "[]"])
@pytest.mark.parametrize("shape", ['"content": [{"top_logprobs": [%s]}]', '"top_logprobs": [%s]'])
def test_an_impossible_log_probability_gives_one_sentence(shape, value):
    one = '{"id": 3, "logprob": %s}' if "content" in shape else '{"token_id:3": %s}'
    body = '{"choices": [{"logprobs": {%s}}]}' % (shape % (one % value))
    with (
        answering(saying(body.encode())) as server,
        pytest.raises(InputError, match="returns no log-probabilities"),
    ):
        require_logprobs(server, "tiny")


@pytest.mark.parametrize("where", ["status", "header", "body", "refusal"])
def test_a_byte_now_and_then_ends_at_the_deadline_of_the_whole_answer(where):
    """Each of its reads is far within the limit of a single one."""
    whole = b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 999\r\n\r\n"
    whole = whole.replace(b"200", b"500") if where == "refusal" else whole
    begun = {"status": b"HT", "header": whole[:20]}.get(where, whole)

    def drip(handler) -> None:
        handler.wfile.write(begun)
        for _ in range(600):
            handler.wfile.write(b"x")
            time.sleep(0.1)

    with answering(drip) as server:
        hasty = replace(server, deadline=1.0)
        with pytest.raises(InputError, match=r"no answer from the server .*within 1 second"):
            ports.model_and_limit(hasty, hasty.root)
        with pytest.raises(Stopped, match=r"went away during a prompt of 1 tokens .*within 1 s"):
            next_token(hasty, "tiny", [3])


def test_an_answer_cut_by_the_deadline_is_not_whole():
    """Where the reading thread saw the deadline first, it gave the half as the answer."""

    def drip(handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.05)

    with (
        answering(drip) as server,
        pytest.raises(TimeoutError, match=r"no whole answer within 0\.2"),
    ):
        replace(server, deadline=0.2)._read_answer("/v1/models", None)


# The spectrum in a file: the options that make it, and the difference seen from llama-server.
GGUF_FORMS = {
    "yarn": {"method": "yarn"},
    "rope_freqs": {"method": "llama3"},
    "theta": {"method": "ntk"},
    "linear": {"method": "pi"},
    "standing": {"method": "longrope", "pair_factors": (1.0,) * 10 + (2.0, 3.0) + (math.inf,) * 4},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Write the bundled model as GGUFs: unchanged, extended, and extended by too little to
    notice."""
    from gguf_files import making

    room = tmp_path_factory.mktemp("files")
    base = making.of_checkpoint(DEMO, room / "base.gguf")
    packed = {f"blk.{layer}.{name}.weight" for layer in range(2) for name in ("attn_q", "ffn_up")}
    making.of_checkpoint(DEMO, room / "packed.gguf", q8=packed)
    for name, options in GGUF_FORMS.items():
        ropext.extend(str(base), room / f"{name}.gguf", factor=4.0, **options)
    ropext.extend(str(room / "packed.gguf"), room / "q8.gguf", factor=4.0, method="yarn")
    ropext.extend(str(base), room / "near.gguf", target=258, method="yarn")
    return room


@pytest.fixture(scope="module")
def by_directory(tmp_path_factory) -> dict[str, Reference]:
    """Return the values that stock transformers computes from directories: the files' own source,
    never the file."""
    room = tmp_path_factory.mktemp("directories")
    ropext.extend(str(DEMO), room / "yarn", factor=4.0, method="yarn", no_verify=True)
    ropext.extend(str(DEMO), room / "near", target=258, method="yarn", no_verify=True)
    own = {name: reference_of(room / name) for name in ("yarn", "near")}
    return own | {"base": reference_of(DEMO)}


def verify_file(file: Path, url: str, capsys) -> tuple[int, str]:
    code, said = run("verify", file, "--endpoint", url, capsys=capsys)
    return code, " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    ("file", "served", "code", "says"),
    [
        ("yarn", "yarn", 0, "after 16 prompts of up to 1,023 tokens its log-probabilities differ"),
        ("yarn", "base", 3, "nearer to the plain base than to the plan (1.00 ± 0.00 of the way"),
        ("base", "base", 0, "after 8 prompts of up to 255 tokens its log-probabilities differ"),
        ("near", "near", 6, "the plain base: not excluded"),
    ],
)
def test_a_server_is_compared_with_a_gguf(files, by_directory, capsys, file, served, code, says):
    asked: list = []
    limit = 1024 if file == "yarn" else 258
    with serving("llama.cpp", by_directory[served], limit, asked) as url:
        given, said = verify_file(files / f"{file}.gguf", url, capsys)
    assert (given, says in said) == (code, True), said
    beyond = [body["prompt"] for _, body, _ in asked if len(body["prompt"]) > 256]
    assert len(beyond) == {"yarn": 8, "near": 1, "base": 0}[file]
    for prompt, longer in pairwise(beyond):
        assert longer[: len(prompt)] == prompt  # the server need not read the same text twice


@pytest.mark.parametrize(
    ("untold", "code", "says"), [(1, 0, "after 10 prompts"), (3, 2, "after only 3 of 8")]
)
def test_llama_server_gives_nothing_if_the_next_token_is_no_whole_character(
    files, by_directory, capsys, untold, code, says
):
    """Some of its answers may be missing, not most."""
    whole = by_directory["yarn"]
    with serving(
        "llama.cpp", lambda ids: None if len(ids) % 7 <= untold else whole(ids), 1024
    ) as url:
        given, said = verify_file(files / "yarn.gguf", url, capsys)
    assert (given, says in said) == (code, True), said


def test_a_gguf_served_with_too_short_a_context_is_reported_before_any_prompt(files, capsys):
    asked: list = []
    with serving("llama.cpp", None, 256, asked) as url:
        code, said = verify_file(files / "yarn.gguf", url, capsys)
    assert (code, asked) == (3, [])
    assert "takes 256 tokens, its context before the extension" in said


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize("file", [*GGUF_FORMS, "q8"])
def test_a_real_llama_server_reads_the_file_and_an_override_is_detected(
    files, tmp_path, capsys, file
):
    """What lets it read the base instead are its flags; a theta and divisors have none."""
    flags = {"yarn": ("--rope-scaling", "none"), "theta": ("--rope-freq-base", "10000")}
    flags |= {"linear": ("--rope-scale", "5"), "q8": ("--rope-scale", "5")}
    with llama_server(files / f"{file}.gguf", tmp_path) as url:
        code, said = verify_file(files / f"{file}.gguf", url, capsys)
    assert code == 0, said
    print(file, said)
    if file in flags:
        with llama_server(files / f"{file}.gguf", tmp_path, *flags[file]) as url:
            code, said = verify_file(files / f"{file}.gguf", url, capsys)
        assert code == 3
        assert "does not read the scaling as planned" in said


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "yarn"},
        {"method": "yarn", "attention_factor": 1.3},
        {"method": "pi"},
        {"method": "ntk"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_real_llama_server_runs_the_base_by_the_printed_line(files, tmp_path, options):
    """Log-probabilities after 1.5 windows of tokens: as of the written file, unlike the base's."""
    base, out = files / "base.gguf", tmp_path / "out.gguf"
    made = ropext.extend(str(base), out, target=1024, **options).plan
    (line,) = made.overrides()
    printed = line.command.partition(f"llama-server -m {base} ")[2].partition(" -c ")[0].split()
    longer = ("--override-kv", "llama.context_length=int:1024")
    ids = [(7 * i * i + 3 * i) % 400 for i in range(384)]
    found = []
    for file, flags in ((out, ()), (base, printed), (base, longer)):
        with llama_server(file, tmp_path, *flags) as url:
            body = {"prompt": ids, "n_predict": 1, "n_probs": 20, "temperature": 0.0}
            answer = json.loads(ports.server_at(url).call("/completion", body)[1])
            (told,) = answer["completion_probabilities"]
            found.append({own["id"]: own["logprob"] for own in told["top_logprobs"]})
    written, served, plain = found
    assert len(written.keys() & served.keys()) > 15
    assert all(abs(served[key] - written[key]) < 1e-3 for key in written.keys() & served.keys())
    apart = [abs(plain[key] - written[key]) for key in written.keys() & plain.keys()]
    assert max(apart, default=1.0) > 1e-2


@contextmanager
def llama_server(file: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Start the llama-server that LLAMA_SERVER names, on one file with room for its whole
    context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [os.environ["LLAMA_SERVER"], "-m", str(file), "-c", "1024", "-np", "1", "--port", port]
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen([*words, *flags], stdout=log, stderr=log) as process,
    ):
        try:
            server = ports.server_at(f"http://127.0.0.1:{port}")
            for _ in range(300):
                with suppress(OSError):
                    if server.call("/health")[0] == 200:
                        break
                assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
                time.sleep(0.2)
            yield server.root
        finally:
            process.terminate()


# What llama-server answered for SmolLM2-135M in Q4_1, prompt by prompt, inside the old context and
# beyond (benchmarks/results/endpoint-tolerance-2026-11-28.md).
RIGHT = ([0.19, 0.1, 0.16, 0.17, 0.1, 0.12, 0.24, 0.09], [0.08, 0.22, 0.2, 0.11, 0.18, 0.06])
FACTOR_5 = ([0.36, 0.4, 0.11, 0.2, 0.12, 0.44, 0.2, 0.28], [0.1, 0.34, 0.6, 0.25, 0.43, 0.2])


def measured(inside: Sequence[float], beyond: Sequence[float]) -> endpoint.ServerAnswers:
    prompts = [endpoint.ComparedPrompt(256, False, gap) for gap in inside]
    prompts += [endpoint.ComparedPrompt(2047, True, gap) for gap in beyond]
    return endpoint.ServerAnswers("m", 2048, endpoint.TOLERANCE, tuple(prompts))


def test_the_tolerance_is_between_a_right_quantised_server_and_a_quarter_more_of_the_factor():
    endpoint._require_agreement(measured(*RIGHT), 512)
    # The four largest of them: 0.19 in the mean.
    endpoint._require_agreement(measured(sorted(RIGHT[0])[4:], RIGHT[1]), 512)
    with pytest.raises(ProofFailed, match="does not read the scaling as planned"):
        endpoint._require_agreement(measured(*FACTOR_5), 512)
