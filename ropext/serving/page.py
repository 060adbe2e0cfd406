"""Serve a page to talk to the model: one file that loads nothing else and runs no other script."""

import hashlib
import re
from base64 import b64encode
from pathlib import Path

from starlette.responses import Response

FILE = Path(__file__).with_name("page.html")


def chat_page() -> Response:
    """Return the page to talk to the served model, with headers that let it run its own script
    and ask only this server."""
    text = FILE.read_text("utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_csp_source_of_inline(text, 'script')}",
            f"style-src {_csp_source_of_inline(text, 'style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, media_type="text/html", headers=headers)


def _csp_source_of_inline(text: str, tag: str) -> str:
    """Return the SHA-256 by which the Content-Security-Policy of the served chat page allows its
    one inline script or style element."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"
