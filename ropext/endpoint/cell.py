"""The form of a cell of the loader table, filled in from what a server said of itself and was
found to compute."""

import http.client
import json

from ropext.base.jsontext import JsonObject
from ropext.endpoint.server import server_at

# Where a program says its version, under which key, and which program that is.
PAGES = (
    ("/version", "version", "vLLM"),
    ("/props", "build_info", "llama-server"),
    ("/get_server_info", "version", "SGLang"),
)
FORM = ("Loader and version", "Model type", "The form", "What it computed", "Versions")


def program_at(url: str) -> str:
    """Name the program behind a port and its version, where it says them."""
    server = server_at(url)
    for path, key, program in PAGES:
        try:
            page = server.get(path)
        except (OSError, http.client.HTTPException):
            continue
        if page is None:
            continue
        version = page.get(key)
        if isinstance(version, str) and version.isprintable() and len(version) < 100:
            return f"{program} {version}"
    return "(the server does not say; please write it here)"


def filled(program: str, model_type: str, form: JsonObject, seen: str, versions: str) -> str:
    """Write the form as GitHub shows one that was sent."""
    shown = f"```json\n{json.dumps(form, indent=1)}\n```"
    answers = (program, model_type, shown, seen, f"```text\n{versions}\n```")
    parts = [f"### {label}\n\n{answer}" for label, answer in zip(FORM, answers, strict=True)]
    return "\n\n".join(parts)
