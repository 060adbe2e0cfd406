"""Define the refusal of a request, in OpenAI's form, and read what any request may hold."""

from ropext.base.jsontext import JsonObject


class RequestRefusal(Exception):
    """An HTTP request that `ropext serve` does not answer: a status, and a sentence in OpenAI's
    form."""

    def __init__(self, message: str, status: int = 400, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": error}


def flag_in(body: JsonObject, name: str, default: bool = False) -> bool:
    """Read true or false from the body of a client's request, the default if it is not given;
    refuse another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestRefusal(f"{name} must be true or false", 400, name)
    return value


def object_in(body: JsonObject, name: str) -> JsonObject:
    """Read an object from the body of a client's request, an empty one if it is not given; refuse
    another type."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestRefusal(f"{name} must be an object", 400, name)
    return value
