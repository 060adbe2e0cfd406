"""A small hub over HTTP: enough of its API for the real huggingface_hub to list and download."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00"
MOVED = "decaf000decaf000decaf000decaf000decaf000"


class Stub:
    """Repositories by id: name -> bytes. `gated` ones show their list and refuse their files."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.broken = False
        self.head = COMMIT  # of the branch main
        self.fetched: list[str] = []
        self.url = ""


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["move"]:
            self.stub.head = MOVED
            self.send(200, b"", with_body=with_body)
        elif self.stub.broken:
            self.send(503, b"overloaded", with_body=with_body)
        elif parts[:2] == ["api", "models"]:
            self.list_repo("/".join(parts[2:4]), parts[4:], with_body)
        else:
            self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body)

    def list_repo(self, repo: str, rest: list[str], with_body: bool) -> None:
        files = self.stub.repos.get(repo)
        if files is None:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif rest[1:2] and rest[1] not in ("main", "v1", COMMIT, MOVED):
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif rest[:1] == ["tree"]:
            tree = [self.entry(name, content) for name, content in files.items()]
            self.send(200, json.dumps(tree).encode(), with_body=with_body)
        else:
            siblings = [{"rfilename": name} for name in files]
            info = {
                "id": repo,
                "sha": COMMIT if COMMIT in rest else self.stub.head,
                "siblings": siblings,
                "tags": [],
                "private": False,
            }
            self.send(200, json.dumps(info).encode(), with_body=with_body)

    def entry(self, name: str, content: bytes) -> dict[str, object]:
        out = {"type": "file", "path": name, "size": len(content), "oid": self.etag(name, content)}
        if is_large(name):
            digest = hashlib.sha256(content).hexdigest()
            out["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return out

    def etag(self, name: str, content: bytes) -> str:
        kind = hashlib.sha256 if is_large(name) else hashlib.sha1
        return kind(content).hexdigest()

    def file(self, repo: str, revision: str, name: str, with_body: bool) -> None:
        content = self.stub.repos.get(repo, {}).get(name)
        if repo in self.stub.gated:
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        elif content is None:
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)
        else:
            if with_body:
                self.stub.fetched.append(name)
            etag = f'"{self.etag(name, content)}"'
            self.send(200, content, {"X-Repo-Commit": revision, "ETag": etag}, with_body)

    def send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass
