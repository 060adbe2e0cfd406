"""Fill in the form of a cell of the loader table from the identity of a server and the result of
its check."""

import http.client
import json

from ropext.base.jsontext import JsonObject
from ropext.endpoint.server import server_at

# The path at which a program states its version, the key, and the program.
PAGES = (
    ("/version", "version", "vLLM"),
    ("/props", "build_info", "llama-server"),
    ("/get_server_info", "version", "SGLang"),
)
FORM = ("Loader and version", "Model type", "The form", "What it computed", "Versions")


def program_at(url: str) -> str:
    """Return the name and version of the program behind an endpoint, if the server states them."""
    server = server_at(url)
    for path, key, program in PAGES:
        try:
            page = server.ask(path)
        except (OSError, http.client.HTTPException):
            continue
        if page is None:
            continue
        version = page.get(key)
        if isinstance(version, str) and version.isprintable() and len(version) < 100:
            return f"{program} {version}"
    return "(the server does not say; please write it here)"


def filled_issue_form(
    program: str, model_type: str, form: JsonObject, seen: str, versions: str
) -> str:
    """Return the issue form about the running server behind an endpoint, filled in, as GitHub shows
    a submitted one."""
    shown = f"```json\n{json.dumps(form, indent=1)}\n```"
    answers = (program, model_type, shown, seen, f"```text\n{versions}\n```")
    parts = [f"### {label}\n\n{answer}" for label, answer in zip(FORM, answers, strict=True)]
    return "\n\n".join(parts)
