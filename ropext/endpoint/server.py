"""Talk to an OpenAI-compatible server: its address, one request, and the model that it serves.

A server is untrusted. Its whole answer has a deadline and a limit of bytes, and must be strict
JSON. No redirect is followed. The API key goes only to the address that the user gave, and is
written nowhere.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import IO

from ropext.base.errors import InputError, NoServer
from ropext.base.jsontext import Json, JsonObject, digest, parse_object

TIMEOUT = 600.0  # seconds for one whole answer
FIRST_TIMEOUT = 30.0  # the same for the first answer, which needs no work of a model
KEY = "ROPEXT_ENDPOINT_KEY"  # environment variable with the server's key, if it wants one
OF_A_MODEL = ("root", "parent", "meta")  # in /v1/models; the name and the limit are known already
OF_LLAMA_SERVER = ("model_path", "build_info", "chat_template")  # in /props
MOST_SHOWN = 300  # characters of an identifying value
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
ANSWER_LIMIT = 4 << 20  # bytes; five candidates take a few hundred, a list of models some thousand
MOST_TOKENS = 1 << 40
BUSY = (429, 503)  # too many requests; still loading, or overloaded
PATIENCE = 300.0  # seconds to wait for a busy server
PAUSES = (1.0, 30.0)  # seconds between two requests to a busy server, the first and the longest


class _Refusing(urllib.request.HTTPRedirectHandler):
    """A handler that raises for a redirect: the user did not name its target, so it gets no
    prompt."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        """Raise InputError: the server answered with a redirect."""
        raise InputError(
            f"--endpoint {req.full_url} redirects to {newurl[:100]!r}; give the final address"
        )


@dataclass(frozen=True)
class Server:
    """The address of a server, and the limits of its requests."""

    root: str
    key: str | None = field(default=None, repr=False)
    deadline: float = TIMEOUT
    most_bytes: int = ANSWER_LIMIT
    patience: float = PATIENCE
    pauses: tuple[float, float] = PAUSES

    def ask(self, path: str, question: JsonObject | None = None) -> dict[str, Json] | None:
        """Send one HTTP request to a path of the running server (--endpoint), and return the JSON
        object that it answers. Return None if the server lacks the path or refuses the request."""
        status, body = self.call_patiently(path, question)
        if status >= 400:
            return None
        return self.parse_answer(path, body)

    def call_patiently(self, path: str, question: JsonObject | None = None) -> tuple[int, bytes]:
        """Return the status and the body of a server's answer; wait for a server that is busy or
        still loads its model."""
        end = monotonic() + self.patience
        pause, longest = self.pauses
        while True:
            status, body = self.call(path, question)
            if status not in BUSY or monotonic() + pause > end:
                return status, body
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def parse_answer(self, path: str, body: bytes) -> dict[str, Json]:
        """Return the JSON object in a server's answer."""
        return parse_object(body, f"--endpoint {self.root}: the answer of {path}")

    def call(self, path: str, question: JsonObject | None = None) -> tuple[int, bytes]:
        """Return the status and the body of a server's answer. It must be whole before the
        deadline, because a server that sends a byte per second keeps every limit of a single
        read."""
        answer: Future[tuple[int, bytes]] = Future()

        def read() -> None:
            """Read the whole answer of the server in a thread of its own."""
            try:
                answer.set_result(self._read_answer(path, question))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=read, daemon=True).start()
        try:
            return answer.result(self.deadline)
        except TimeoutError:
            raise self._late_answer_error() from None

    def _late_answer_error(self) -> TimeoutError:
        """Return the error for a server's answer that is not whole before the deadline."""
        return TimeoutError(f"no whole answer within {self.deadline:g} seconds")

    def _read_answer(self, path: str, question: JsonObject | None) -> tuple[int, bytes]:
        """Send one request to the server, and return the status and the body of its answer."""
        data: bytes | None = None
        if question is not None:
            data = json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, data=data, headers=headers)
        if self.key:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        opener = urllib.request.build_opener(_Refusing)
        if urllib.parse.urlsplit(self.root).hostname in LOOPBACK:  # no proxy leads there
            opener = urllib.request.build_opener(_Refusing, urllib.request.ProxyHandler({}))
        end = monotonic() + self.deadline
        try:
            answer = opener.open(request, timeout=self.deadline)
        except urllib.error.HTTPError as error:
            answer = error
        body = b""
        with answer:
            while piece := answer.read1(1 << 16):
                if monotonic() >= end:
                    raise self._late_answer_error()  # a part is no answer
                body += piece
                if len(body) > self.most_bytes:
                    mib = self.most_bytes >> 20
                    raise InputError(f"--endpoint {self.root}{path} answers more than {mib} MiB")
        return answer.status, body


def server_at(url: str) -> Server:
    """Return the client of the server at a URL, with or without the trailing /v1."""
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # half an IPv6 address
        known = False
    if "@" in url:
        raise InputError(
            f"--endpoint takes an address without user or password; a key is read from {KEY}"
        )
    if not known:
        raise InputError(
            f"--endpoint {url[:100]!r} is no http address such as http://localhost:8000"
        )
    return Server(url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY))


def model_and_limit(server: Server, url: str, wanted: str | None = None) -> tuple[str, int | None]:
    """Return the served model's name and the server's context limit. If there are several models,
    it is the wanted one, else the first."""
    try:
        models = server.ask("/v1/models")
        if models is None or not models.get("data"):
            raise InputError(f"--endpoint {url} is no OpenAI-compatible server: it lists no models")
        entry = _model_entry(models["data"], wanted, url)
        name = entry["id"]
        limit = _context_limit(server, entry)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NoServer(
            f"--endpoint {url}: no answer from the server ({reason}); start it, or name the "
            "address that it prints"
        ) from None
    except (KeyError, IndexError, TypeError, AttributeError):
        name = limit = None
    is_plain = isinstance(name, str) and len(name) < 1000 and name.isprintable()
    if not is_plain or not (limit is None or (type(limit) is int and 0 < limit < MOST_TOKENS)):
        raise InputError(
            f"--endpoint {url} is no OpenAI-compatible server: its model has no name and limit"
        )
    return name, limit


def _model_entry(models: Json, wanted: str | None, url: str) -> Json:
    """Return the first model that a server lists, or the one with the wanted name."""
    if wanted is None:
        return models[0]
    for entry in models:
        if entry["id"] == wanted:
            return entry
    names = ", ".join(str(entry["id"])[:60] for entry in models[:5])
    raise InputError(f"--endpoint {url} serves no model {wanted[:60]!r}; it lists {names}")


def require_server(url: str) -> None:
    """Raise if no server answers at a URL, before anything is opened or loaded."""
    hasty = replace(server_at(url), deadline=FIRST_TIMEOUT, patience=0.0)
    model_and_limit(hasty, url)


def _context_limit(server: Server, entry: JsonObject) -> Json:
    """Return how many tokens a served model takes, if its server states it."""
    if entry.get("max_model_len"):  # vLLM and SGLang
        return entry["max_model_len"]
    props = server.ask("/props") or {}  # llama-server: the limit of one slot, as a request gets one
    slot = props.get("default_generation_settings")
    if slot and slot.get("n_ctx"):
        return slot["n_ctx"]
    for path in ("/server_info", "/get_server_info"):  # SGLang, newer and older
        info = server.ask(path) or {}
        if info.get("context_length"):
            return info["context_length"]
    return _loaded_limit(server, entry["id"])


def _loaded_limit(server: Server, name: Json) -> Json:
    """Return how many tokens LM Studio or Ollama gives a loaded model."""
    for path, key, name_key in (
        ("/api/v0/models", "data", "id"),
        ("/api/ps", "models", "name"),
    ):
        entries = (server.ask(path) or {}).get(key)
        if not isinstance(entries, list):
            continue
        for entry in entries:
            if isinstance(entry, dict) and entry.get(name_key) == name:
                return entry.get("loaded_context_length") or entry.get("context_length")
    return None


def identity_of(server: Server, model: str) -> dict[str, Json]:
    """Return the properties of a served model that stay the same from one request to the next.

    `created` and `permission` of /v1/models are left out: servers make new ones for each request.
    """
    listed = (server.ask("/v1/models") or {}).get("data")
    properties = dict[str, Json]()
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and entry.get("id") == model:
            properties |= {name: entry[name] for name in OF_A_MODEL if name in entry}
    props = server.ask("/props") or {}  # llama-server
    properties |= {name: props[name] for name in OF_LLAMA_SERVER if name in props}
    meta = properties.pop("meta", None)
    if isinstance(meta, dict):
        properties |= {f"meta: {name}": value for name, value in meta.items()}
    return {name: _short_property(value) for name, value in properties.items() if value is not None}


def _short_property(value: Json) -> Json:
    """Return a property of a served model for a message: a short one as it is, a long one as its
    digest."""
    if isinstance(value, str | int | float) and len(str(value)) <= MOST_SHOWN:
        return value
    return digest(value)
