"""What tells a text again, whatever file it stands in."""

import hashlib
import unicodedata


def normalised(text: str) -> str:
    """Its characters in one Unicode form, without white space: line ends and indents are a file's,
    not the text's."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def content_hash(text: str) -> str:
    """SHA-256 of the normalised text."""
    return hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).hexdigest()
