"""Define the refusal of a request, in OpenAI's form."""


class RequestRefusal(Exception):
    """An HTTP request that `ropext serve` does not answer: a status, and a sentence in OpenAI's
    form."""

    def __init__(self, message: str, status: int = 400, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": error}
