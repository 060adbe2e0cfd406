"""A small hub over HTTP: enough of its API for the real huggingface_hub to list, download, upload.

Uploads go the way of Git LFS (huggingface_hub takes it with HF_HUB_DISABLE_XET=1): create the
repository, validate the card, ask how each file travels, send the large ones, commit.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00"
MOVED = "decaf000decaf000decaf000decaf000decaf000"


class Stub:
    """Repositories by id: name -> bytes. `gated` ones show their list and refuse their files."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.broken = False
        self.head = COMMIT  # the head of the branch main
        self.fetched: list[str] = []
        self.url = ""
        # Uploading: which token may write where, and the received files.
        self.writers: dict[str, str] = {}  # token -> organisation
        self.private: dict[str, bool] = {}
        self.commits: dict[str, list[str]] = {}
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256, committed or not
        self.sent: list[str] = []  # hashes of large files, as they came in
        self.drop_after: int | None = None  # large files until the connection breaks
        self.arrived, self.go_on = Event(), Event()  # a large file comes in, and is held until then
        self.go_on.set()
        self.others_push = False  # somebody else commits while files are prepared
        self.cards: list[str] = []


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

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.stub.broken:
            self.send(503, b"overloaded")
        elif not (organisation := self.stub.writers.get(self.token())):
            self.send(401, b'{"error": "Invalid credentials in Authorization header"}')
        elif parts == ["api", "validate-yaml"]:
            self.validate(json.loads(body)["content"])
        elif parts == ["api", "repos", "create"]:
            self.create(json.loads(body), organisation)
        elif parts[2].endswith(".git") or parts[1].endswith(".git"):
            self.batch(json.loads(body))
        elif parts[2] != organisation:
            self.send(403, b"{}")
        elif parts[4] == "preupload":
            self.preupload("/".join(parts[2:4]), json.loads(body)["files"])
        elif parts[4] == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            files = self.stub.repos["/".join(parts[2:4])]
            found = [self.info(name, files[name]) for name in wanted if name in files]
            self.send_json(found)
        elif parts[4] == "commit":
            self.commit("/".join(parts[2:4]), body)
        else:
            self.send(404, b"{}")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.stub.arrived.set()
        self.stub.go_on.wait()
        if self.stub.drop_after is not None and len(self.stub.sent) >= self.stub.drop_after:
            self.close_connection = True
            self.connection.close()
            return
        digest = urlsplit(self.path).path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == digest
        self.stub.sent.append(digest)
        self.stub.stored[digest] = body
        self.send(200, b"")

    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def validate(self, text: str) -> None:
        self.stub.cards.append(text)
        if "license: nonsense" in text:
            errors = [{"message": '"license" must be one of the known'}]
            self.send(400, json.dumps({"error": "no", "errors": errors, "warnings": []}).encode())
        else:
            self.send_json({"errors": [], "warnings": []})

    def create(self, wish: dict[str, str], organisation: str) -> None:
        repo = f"{wish['organization']}/{wish['name']}"
        if wish["organization"] != organisation:
            self.send(403, b"{}")
        elif repo in self.stub.repos:
            self.send(409, json.dumps({"url": f"{self.stub.url}/{repo}"}).encode())
        else:
            self.stub.repos[repo] = {".gitattributes": b"*.safetensors filter=lfs"}
            self.stub.private[repo] = wish["visibility"] == "private"
            self.stub.commits[repo] = [COMMIT]
            self.send_json({"url": f"{self.stub.url}/{repo}"})

    def preupload(self, repo: str, files: list[dict[str, str]]) -> None:
        there = self.stub.repos[repo]
        if self.stub.others_push:
            self.stub.commits[repo].append(MOVED)
        answer = []
        for own in files:
            name = own["path"]
            row = {
                "path": name,
                "uploadMode": "lfs" if is_large(name) else "regular",
                "shouldIgnore": False,
            }
            if name in there:
                row["oid"] = self.info(name, there[name])["oid"]
                if is_large(name):
                    row["oid"] = hashlib.sha256(there[name]).hexdigest()
            answer.append(row)
        self.send_json({"files": answer})

    def batch(self, wish: dict[str, object]) -> None:
        objects = []
        for own in wish["objects"]:
            row = dict(own)
            if own["oid"] not in self.stub.stored:
                row["actions"] = {"upload": {"href": f"{self.stub.url}/lfs/{own['oid']}"}}
            objects.append(row)
        self.send_json({"transfer": "basic", "objects": objects})

    def commit(self, repo: str, body: bytes) -> None:
        files = self.stub.repos[repo]
        header, *rows = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") != self.stub.commits[repo][-1]:
            self.send(412, b'{"error": "the branch has moved"}')
            return
        for row in rows:
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.stub.stored[value["oid"]]
            else:
                del files[value["path"]]
        self.stub.commits[repo].append(hashlib.sha1(body).hexdigest())
        oid = self.stub.commits[repo][-1]
        self.send_json({"commitUrl": f"{self.stub.url}/{repo}/commit/{oid}", "commitOid": oid})

    def info(self, name: str, content: bytes) -> dict[str, object]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": git}

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["move"]:
            self.stub.head = MOVED
            self.send(200, b"", with_body=with_body)
        elif self.stub.broken:
            self.send(503, b"overloaded", with_body=with_body)
        elif parts[:2] == ["api", "models"]:
            self.list_repo("/".join(parts[2:4]), parts[4:], with_body)
        elif len(parts) < 5:  # huggingface_hub asks for more than the repository
            self.send(404, b"{}", with_body=with_body)
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
            head = self.stub.commits.get(repo, [self.stub.head])[-1]
            info = {
                "id": repo,
                "sha": COMMIT if COMMIT in rest else head,
                "siblings": siblings,
                "tags": [],
                "private": self.stub.private.get(repo, False),
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
