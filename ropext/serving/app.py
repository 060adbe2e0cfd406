"""The port: a few paths, one model, one machine."""

import asyncio
import gc
import hmac
import ipaddress
import json
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.base.narration import Say, interruptible, no_messages
from ropext.endpoint.server import KEY
from ropext.models.load import silenced
from ropext.serving.answers import CompletionAnswers
from ropext.serving.connections import BACKLOG, AcceptErrorHandler, bounded_connections
from ropext.serving.page import chat_page
from ropext.serving.questions import (
    CompletionRequest,
    RequestBody,
    check_model,
    completion_requests,
    parse_request,
    prompt_ids,
)
from ropext.serving.refusals import RequestRefusal
from ropext.serving.served import ServedModel, model_card
from ropext.serving.turns import AnswerPiece, AnswerStreamer, AnswerThread

AT_ONCE = 4  # requests that are parsed or tokenised
PATIENCE = 2  # seconds for open answers when the port closes
ANSWERED = ("/v1/chat/completions", "/v1/completions")
WITHOUT_KEY = ("/health", "/")  # they say nothing of the model
LOCAL = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(?:([\w.-]+)|\[([0-9a-fA-F:.]+)\])(?::[0-9]{1,5})?", re.ASCII)  # of a header
Action = Callable[[Request], Awaitable[Response]]
Read = TypeVar("Read")


class JsonAnswer(JSONResponse):
    """A JSON response. Half of a surrogate pair, which a request can contain, becomes a question
    mark."""

    def render(self, content: Json) -> bytes:
        """Write the JSON of an HTTP response to a client of `ropext serve`."""
        return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


class ModelServer:
    """The paths of one server and the functions that answer them."""

    def __init__(self, served: ServedModel, say: Say, only_local: bool) -> None:
        self.served = served
        self.say = say
        self.only_local = only_local
        self.key = os.environ.get(KEY, "")
        self.worker = AnswerThread(served, say)
        self.created = int(time.time())
        self.reading = asyncio.Semaphore(AT_ONCE)

    def app(self) -> Starlette:
        """Return the ASGI application of `ropext serve`, with its paths, for uvicorn."""
        actions: list[tuple[str, str, Action]] = [
            ("POST", ANSWERED[0], self.chat),
            ("POST", ANSWERED[1], self.complete),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/load_model", self.is_loaded),
            ("GET", "/health", self.health),
            ("GET", "/", self.show_page),
        ]
        routes = [
            Route(path, self._guarded_action(do), methods=[verb]) for verb, path, do in actions
        ]
        app = Starlette(
            routes=routes, exception_handlers={HTTPException: unknown_path}, lifespan=self._lifespan
        )
        app.router.redirect_slashes = False  # its redirects are made of the Host header
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Report connections that cannot be accepted, while uvicorn runs the server."""
        asyncio.get_running_loop().set_exception_handler(AcceptErrorHandler(self.say))
        yield

    def _guarded_action(self, action: Action) -> Action:
        """Return a handler of an HTTP path that checks the client first, and turns a refusal
        into OpenAI's error."""

        async def guarded(request: Request) -> Response:
            """Answer an HTTP client of the server, or return the refusal in OpenAI's form."""
            try:
                self._check_client(request)
                return await action(request)
            except RequestRefusal as error:
                return JsonAnswer(error.body, error.status)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return guarded

    def _check_client(self, request: Request) -> None:
        """Refuse an HTTP request without the server's key, and refuse web pages.

        A page in a browser can name any host as its own. It may send a form without asking, but
        no JSON.
        """
        # `request.url` is made of the Host header, and of other things if it cannot be read.
        host = HOST.fullmatch(request.headers.get("host", ""))
        if host is None:
            raise RequestRefusal(
                "the Host header must be a name or an address, with or without port", 403
            )
        if self.only_local and (host[1] or host[2]).lower() not in LOCAL:
            raise RequestRefusal(
                f"this server accepts only the host names {' and '.join(LOCAL)}", 403
            )
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        wanted = self.key and request.scope["path"] not in WITHOUT_KEY
        if wanted and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise RequestRefusal(
                f"the key is wrong or missing (Bearer, {KEY})", 401, "", "invalid_api_key"
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise RequestRefusal("send JSON, with the header Content-Type: application/json", 415)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation that a client posts to /v1/chat/completions."""
        return await self._answer_request(request, is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Continue a text that a client posts to /v1/completions."""
        return await self._answer_request(request, is_chat=False)

    async def _answer_request(self, request: Request, is_chat: bool) -> Response:
        """Answer a posted conversation or prompt, as one JSON object or as a stream of events."""
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex[:12]}"

        def read(body: RequestBody) -> list[CompletionRequest]:
            """Return the checked prompts of a posted request."""
            return completion_requests(self.served, body, name, is_chat)

        questions = await self._read(request, read)
        answers = CompletionAnswers(self.served.name, questions[0])
        first = self.worker.ask(questions[0])  # if this is refused, the status can still say so
        choices = self._answer_choices(questions, first, answers, request)
        if questions[0].stream:
            return StreamingResponse(answers.event_stream(choices), media_type="text/event-stream")
        async for _ in choices:
            pass
        return JsonAnswer(answers.whole_answer())

    async def _answer_choices(
        self,
        questions: list[CompletionRequest],
        first: AnswerStreamer,
        answers: CompletionAnswers,
        request: Request,
    ) -> AsyncIterator[dict[str, Json]]:
        """Yield the answers to the prompts of a client's request, one prompt after the other.
        `first` streams the answer to the first."""
        for number, question in enumerate(questions):
            streamer = self.worker.ask(question) if number else first
            pieces = _client_pieces(streamer, request)
            async for choice in answers.answer_prompt(streamer, pieces):
                yield choice

    async def _read(self, request: Request, read: Callable[[RequestBody], Read]) -> Read:
        """Parse a client's posted JSON and read it in a thread, a few requests at a time."""
        data = await _read_body(request, self.served.most_bytes)

        def parse_and_read() -> Read:
            """Parse the body of a client's request and read it, in a thread."""
            return read(parse_request(self.served, data))

        async with self.reading:
            return await asyncio.to_thread(parse_and_read)

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models: list the one served model, by each of its names."""
        cards = [model_card(self.served, name, self.created) for name in self.served.names]
        return JsonAnswer({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME: describe the one served model."""
        name = request.path_params["name"]
        check_model(self.served, name)
        return JsonAnswer(model_card(self.served, name, self.created))

    async def tokenize(self, request: Request) -> Response:
        """Answer /tokenize: count the tokens of posted messages or of a prompt, as an answer
        would read them."""

        def read(body: RequestBody) -> JsonObject:
            check_model(self.served, body.get("model"))
            ids = prompt_ids(self.served, body, is_chat="messages" in body)
            return {"count": len(ids), "max_model_len": self.served.limit, "tokens": ids}

        return JsonAnswer(await self._read(request, read))

    async def is_loaded(self, request: Request) -> Response:
        """Answer /load_model, which `transformers chat` posts before it begins: the model is
        ready. Load nothing."""

        def read(body: RequestBody) -> None:
            check_model(self.served, body.get("model"))

        await self._read(request, read)
        event = json.dumps({"status": "ready", "model": self.served.name, "cached": True})
        return Response(f"data: {event}\n\n", media_type="text/event-stream")

    async def show_page(self, request: Request) -> Response:
        """Answer GET / with a page to talk to the served model. It asks for the key, if there is
        one."""
        return chat_page()

    async def health(self, request: Request) -> Response:
        """Answer /health: `ok`, or status 503 if the thread that answers has ended."""
        if not self.worker.thread.is_alive():
            raise RequestRefusal("the thread that answers has ended; restart the server", 503)
        return JsonAnswer({"status": "ok"})


async def unknown_path(request: Request, error: Exception) -> Response:
    """Answer an HTTP request for a path or method that `ropext serve` does not have, in OpenAI's
    form."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.scope['path'][:200]}"
    questions = " and ".join(ANSWERED)
    sentence = (
        f"ropext serve does not answer {asked}; it answers POST {questions}, GET /v1/models, and "
        "GET / with a page"
    )
    return JsonAnswer(
        RequestRefusal(sentence, error.status_code).body, error.status_code, error.headers
    )


async def _read_body(request: Request, most: int) -> bytes:
    """Return the bytes of an HTTP request's body; refuse a body that is too large."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise RequestRefusal(f"the request has more than {most:,} bytes", 413)
    return bytes(data)


async def _client_pieces(streamer: AnswerStreamer, request: Request) -> AsyncIterator[AnswerPiece]:
    """Yield the pieces of an answer for a client; stop the generation if the client disconnects."""
    gone = asyncio.create_task(_wait_for_disconnect(request))
    finished = False
    try:
        while not finished:
            coming = asyncio.create_task(streamer.pieces.get())
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise ClientDisconnect
            piece = coming.result()
            finished = piece is None
            if piece is not None:
                yield piece
    finally:
        gone.cancel()
        if not finished:
            streamer.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the HTTP client of a request disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_local_address(host: str) -> bool:
    """Return whether only this machine can reach the address of --host."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reserve_address(host: str, port: int) -> socket.socket:
    """Bind the address of --host and --port before the model is loaded; nobody gets an answer
    until `run_server` listens."""
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


def uvicorn_server(server: ModelServer) -> uvicorn.Server:
    """Build the uvicorn server of `ropext serve`, which logs nothing itself."""
    config = uvicorn.Config(
        server.app(),
        http=bounded_connections(),  # type: ignore[arg-type]  # a class is called in the same way
        loop="asyncio",
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_config=None,
        log_level="error",  # else each request that is no HTTP is a line
        access_log=False,
        timeout_graceful_shutdown=PATIENCE,
        server_header=False,
    )
    return uvicorn.Server(config)


def requires_key() -> bool:
    """Return whether clients of `ropext serve` must send a key."""
    return bool(os.environ.get(KEY))


def run_server(server: ModelServer, taken: socket.socket) -> None:
    """Answer the HTTP clients of `ropext serve` until Ctrl-C, which ends a server."""
    gc.freeze()  # or the many objects of a large request have the model's searched, for seconds
    with suppress(KeyboardInterrupt), interruptible(no_messages, "", at_once=True), silenced():
        uvicorn_server(server).run(sockets=[taken])
