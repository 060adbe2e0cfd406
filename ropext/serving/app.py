"""The port: a few paths, one model, one machine."""

import asyncio
import hmac
import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ropext.errors import InputError
from ropext.jsontext import Json, parse_object
from ropext.models.load import silenced
from ropext.narration import Say, interruptible, silent
from ropext.ports.server import KEY
from ropext.serving.answers import AnswerSoFar
from ropext.serving.questions import Refusal, check_model, prompt_ids, question_of
from ropext.serving.served import LiveModel, model_card
from ropext.serving.turns import Item, TurnStreamer, Worker

MOST_BYTES = 64 << 20  # of a request's body: some ten million tokens
PATIENCE = 2  # seconds for open answers when the port closes
LOCAL = ("localhost", "127.0.0.1", "::1")
Action = Callable[[Request], Awaitable[Response]]


class ModelPort:
    """What answers at the paths."""

    def __init__(self, served: LiveModel, say: Say, only_local: bool) -> None:
        self.served = served
        self.say = say
        self.only_local = only_local
        self.key = os.environ.get(KEY, "")
        self.worker = Worker(served, say)
        self.created = int(time.time())

    def app(self) -> Starlette:
        """The application for uvicorn."""
        actions: list[tuple[str, str, Action]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.complete),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/load_model", self.is_loaded),
            ("GET", "/health", self.health),
        ]
        routes = [Route(path, self._guarded(do), methods=[verb]) for verb, path, do in actions]
        return Starlette(routes=routes)

    def _guarded(self, action: Action) -> Action:
        async def guarded(request: Request) -> Response:
            try:
                self._check(request)
                return await action(request)
            except Refusal as error:
                return JSONResponse(error.body, error.status)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return guarded

    def _check(self, request: Request) -> None:
        """Refuse who lacks the key, and web pages: a page in a browser can name any host as its
        own, and may send a form without asking, but no JSON."""
        name = (request.url.hostname or "").strip("[]").lower()
        if self.only_local and name not in LOCAL:
            raise Refusal(f"this server accepts only the host names {' and '.join(LOCAL)}", 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        wanted = self.key and request.url.path != "/health"
        if wanted and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Refusal(
                f"the key is wrong or missing (Bearer, {KEY})", 401, "", "invalid_api_key"
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise Refusal("send JSON, with the header Content-Type: application/json", 415)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Go on with a text."""
        return await self._answer(request, is_chat=False)

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        body = await _body(request)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex[:12]}"
        question = await asyncio.to_thread(question_of, self.served, body, name, is_chat)
        queue, streamer = self.worker.ask(question)
        answer = AnswerSoFar(self.served.name, question, streamer)
        items = _items(queue, streamer, request)
        if question.stream:
            return StreamingResponse(answer.events(items), media_type="text/event-stream")
        async for item in items:
            answer.add(item)
        return JSONResponse(answer.whole())

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [model_card(self.served, self.created)]})

    async def model(self, request: Request) -> Response:
        """Describe the one model."""
        check_model(self.served, request.path_params["name"])
        return JSONResponse(model_card(self.served, self.created))

    async def tokenize(self, request: Request) -> Response:
        """Count the tokens of messages or of a prompt, as an answer would read them."""
        body = await _body(request)
        check_model(self.served, body.get("model"))
        is_chat = "messages" in body
        ids = await asyncio.to_thread(prompt_ids, self.served, body, is_chat)
        told = {"count": len(ids), "max_model_len": self.served.limit, "tokens": ids}
        return JSONResponse(told)

    async def is_loaded(self, request: Request) -> Response:
        """Tell `transformers chat`, which asks before it begins, that the model is there; nothing
        is loaded by it."""
        check_model(self.served, (await _body(request)).get("model"))
        event = json.dumps({"status": "ready", "model": self.served.name, "cached": True})
        return Response(f"data: {event}\n\n", media_type="text/event-stream")

    async def health(self, request: Request) -> Response:
        """Say that the port is open."""
        return JSONResponse({"status": "ok"})


async def _body(request: Request) -> dict[str, Json]:
    """The JSON object that a request sends, within bounds."""
    parts = list[bytes]()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise Refusal(f"the request has more than {MOST_BYTES >> 20} MiB", 413)
        parts.append(part)
    try:
        return parse_object(b"".join(parts), "the request", MOST_BYTES)  # code is full of brackets
    except InputError as error:
        raise Refusal(str(error)) from None


async def _items(
    queue: "asyncio.Queue[Item]", streamer: TurnStreamer, request: Request
) -> AsyncIterator[Item]:
    """The pieces of an answer; a client that goes away ends its generation."""
    gone = asyncio.create_task(_gone(request))
    finished = False
    try:
        while not finished:
            piece = asyncio.create_task(queue.get())
            await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                piece.cancel()
                raise ClientDisconnect
            item = piece.result()
            finished = item is None
            if item is not None:
                yield item
    finally:
        gone.cancel()
        if not finished:
            streamer.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reserve(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; it answers nobody until `run` listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would share a port that is in use
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise InputError(
            f"--host {host} --port {port} cannot be opened: {error.strerror}; give another --port"
        ) from None
    return taken


def server_of(port: ModelPort) -> uvicorn.Server:
    """uvicorn with nothing of its own in the log."""
    config = uvicorn.Config(
        port.app(),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,
        server_header=False,
    )
    return uvicorn.Server(config)


def has_key() -> bool:
    """Whether requests must bring a key."""
    return bool(os.environ.get(KEY))


def run(port: ModelPort, taken: socket.socket) -> None:
    """Answer until Ctrl-C, which is how a server ends."""
    with suppress(KeyboardInterrupt), interruptible(silent, "", at_once=True), silenced():
        server_of(port).run(sockets=[taken])
