"""Run a command whose hub is on this machine and answers every request with 404.

python scripts/empty_hub.py COMMAND [ARGUMENT ...]
"""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Nothing(BaseHTTPRequestHandler):
    """A hub without repositories."""

    def answer(self) -> None:
        """Say that there is no such thing, and count the request."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(404)
        asked.append(f"{self.command} {self.path}")

    do_GET = answer
    do_HEAD = answer
    do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        """Keep the command's output as it is."""


asked: list[str] = []


def main(command: list[str]) -> int:
    """Run the command and return its exit code."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        own["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        code = subprocess.run(command, env=own, check=False).returncode
        print(f"the empty hub answered {len(asked)} requests with 404")
        server.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
